"""Many tensors, or boxes of them, read in one go: chunks that they share are read once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import InvalidInputError, NotFoundError
from ckpt.format.layout import TensorLayout
from ckpt.geometry import Box, Region
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.fetch import NumpyTargets, fetch, raw_dtype
from ckpt.ops.tiers import Tier
from ckpt.plan.read import Want, plan_read

__all__ = ["Part", "read_indexes", "read_parts", "region_of"]

_WORKERS = 16

Part: TypeAlias = tuple[str, "Box | None"]
"""Name of a tensor, and which part of it; None for all of it."""


def read_indexes(checkpoint: Checkpoint, ranks: Iterable[int]) -> None:
    """Read the segment indexes of ``ranks`` in parallel; the checkpoint remembers them.

    Raises:
        CorruptError: one is damaged or gone.
    """
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-index") as pool:
        for _ in pool.map(checkpoint.segment_index, ranks):
            pass


def region_of(layout: TensorLayout, box: Box | None) -> Region:
    """Return ``box`` of a tensor as a region. Raises InvalidInputError: it has another ndim."""
    if box is None:
        return Region.whole(layout.global_shape)
    if len(box.sizes) != len(layout.global_shape):
        raise InvalidInputError(
            "box and tensor have different ndim", tensor=layout.name, shape=layout.global_shape
        )
    return Region.of_box(box)


def read_parts(
    checkpoint: Checkpoint,
    parts: Sequence[Part],
    out: Sequence[NDArray[Any]] | None = None,
    *,
    tiers: Sequence[Tier] = (),
) -> list[NDArray[Any]]:
    """Read ``parts`` and return their bits. Extra memory is a few chunks.

    Args:
        checkpoint: to read from.
        parts: what to read.
        out: C-contiguous arrays to fill instead of new ones, of the right shape and item size.
        tiers: where copies are looked for before the store, nearest first.

    Returns:
        One array per part, of unsigned integers of the tensor's item size (or raw bytes, above 8); those of
        ``out``, if given.

    Raises:
        NotFoundError: no such tensor.
        InvalidInputError: a box reaches beyond its tensor, or an array of ``out`` does not fit.
        CorruptError: no good copy of a chunk is left.
    """
    wants: list[Want] = []
    arrays: list[NDArray[Any]] = []
    for number, (name, box) in enumerate(parts):
        layout = checkpoint.layouts.get(name)
        if layout is None:
            raise NotFoundError("tensor is not in the checkpoint", code="tensor", tensor=name)
        region = region_of(layout, box)
        dtype = raw_dtype(layout.itemsize)
        array = np.empty(region.shape, dtype) if out is None else _as_bits(name, out[number], region, dtype)
        arrays.append(array)
        if array.size:
            wants.append(Want(name, region, number))
    plan = plan_read(checkpoint.layouts, wants)
    fetch(checkpoint, plan, NumpyTargets(arrays), tiers=tiers)
    return arrays if out is None else list(out)


def _as_bits(name: str, array: NDArray[Any], region: Region, dtype: np.dtype[Any]) -> NDArray[Any]:
    if array.shape != region.shape or array.dtype.itemsize != dtype.itemsize or not array.flags.c_contiguous:
        raise InvalidInputError(
            "array must be C-contiguous, of the tensor's shape and item size",
            code="out",
            tensor=name,
            expected=region.shape,
            found=array.shape,
            dtype=array.dtype,
        )
    return array.view(dtype)
