"""Read the checkpoints of a run from any program: needs neither torch nor a server nor a template.

    with Repository("s3://bucket/run") as run:
        weights = run.load("model.*")
        bias = weights["model.head.bias"].numbers()

Chunks are verified as they are read. Nothing is cached between calls but the metadata of checkpoints that
were opened: they never change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.layout import LayoutSet
from ckpt.format.states import merge_values
from ckpt.format.tensor_data import TensorData, numpy_dtype
from ckpt.format.values import decode_value
from ckpt.geometry import Box
from ckpt.ops import catalog
from ckpt.ops.arrays import read_parts, region_of
from ckpt.ops.catalog import CheckpointInfo
from ckpt.ops.checkpoint import Checkpoint
from ckpt.storage.open import open_store
from ckpt.urls import absolute_url

__all__ = ["Repository", "TensorName", "choose_names"]

T = TypeVar("T")

_TRIES = 5  # a reader under which every latest is pruned reads more slowly than the run saves


@dataclass(frozen=True, slots=True)
class TensorName:
    """Stands in plain values for a tensor, which :meth:`Repository.tensor` reads."""

    name: str


class Repository:
    """One run's checkpoints, to read. Not for several threads at once.

    Args:
        url: of the run, or a directory.
        store_options: of the object store (``endpoint_url``, ``region``, ...).

    Raises:
        InvalidInputError: not a URL of a store.
    """

    def __init__(self, url: str, store_options: Mapping[str, str] | None = None) -> None:
        self.url = absolute_url(url)
        self._store = open_store(self.url, store_options)
        self._opened: dict[CheckpointId, Checkpoint] = {}

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._store.close()

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return every committed checkpoint, newest first."""
        return list(catalog.list_checkpoints(self._store))

    def latest(self) -> CheckpointId | None:
        """Return the checkpoint that a run would resume from, or None."""
        return catalog.latest(self._store)

    def open(self, checkpoint: str | int | CheckpointId = "latest") -> Checkpoint:
        """Return a checkpoint with its metadata; valid until :meth:`close`.

        Args:
            checkpoint: "latest" (looked up anew at each call), a step, or an id.

        Raises:
            NotFoundError: there is none such.
            CorruptError: its metadata is damaged.
        """
        return self._reading(checkpoint, lambda opened: opened)

    def _reading(self, checkpoint: str | int | CheckpointId, use: Callable[[Checkpoint], T]) -> T:
        """Return ``use`` of a checkpoint. Where "latest" is pruned under it, of the latest there is then.

        Raises:
            NotFoundError: code "pruned": one that was named was pruned while it was read.
        """
        for left in range(_TRIES - 1, -1, -1):
            ident = (
                checkpoint
                if isinstance(checkpoint, CheckpointId)
                else catalog.resolve(self._store, str(checkpoint))
            )
            try:
                with catalog.naming_pruned(self._store, ident):
                    known = self._opened.get(ident)
                    if known is None:
                        known = self._opened[ident] = catalog.load_checkpoint(self._store, ident)
                    return use(known)
            except NotFoundError as error:
                if error.code != "pruned":
                    raise
                self._opened.pop(ident, None)
                if checkpoint != "latest" or not left:
                    raise
        raise AssertionError("unreachable")

    def layouts(self, checkpoint: str | int | CheckpointId = "latest") -> LayoutSet:
        """Return name, dtype, shape and split of every tensor. Raises as :meth:`open`."""
        return self.open(checkpoint).layouts

    def load(
        self,
        names: str | Collection[str] | None = None,
        checkpoint: str | int | CheckpointId = "latest",
        *,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> dict[str, TensorData]:
        """Read tensors into memory; beyond the result it takes a few chunks.

        Args:
            names: patterns (``*`` crosses dots); None: all tensors.
            checkpoint: as in :meth:`open`.
            out: C-contiguous arrays to fill, by name, of the tensors' shapes and item sizes. Tensors in it
                are not returned; without ``names`` only these are read.

        Raises:
            NotFoundError: no such checkpoint, or a pattern or a name of ``out`` fits no tensor.
            InvalidInputError: an array of ``out`` does not fit.
            CorruptError: no good copy of a chunk is left.
        """
        return self._reading(checkpoint, lambda opened: self._load(opened, names, out))

    def _load(
        self,
        opened: Checkpoint,
        names: str | Collection[str] | None,
        out: Mapping[str, NDArray[Any]] | None,
    ) -> dict[str, TensorData]:
        given = dict(out or {})
        if names is None and out is not None:
            names = sorted(given)
            chosen = choose_exactly(names, opened.layouts)
        else:
            chosen = choose_names(names, opened.layouts)
        new = {name: bytearray(opened.layouts[name].nbytes) for name in chosen if name not in given}
        arrays = [
            given[name] if name in given else _array_over(new[name], opened.layouts, name) for name in chosen
        ]
        read_parts(opened, [(name, None) for name in chosen], arrays)
        return {
            name: TensorData(
                ident=opened.ident,
                dtype=opened.layouts[name].dtype,
                shape=opened.layouts[name].global_shape,
                global_shape=opened.layouts[name].global_shape,
                data=data,
            )
            for name, data in new.items()
        }

    def tensor(
        self, name: str, box: Box | None = None, checkpoint: str | int | CheckpointId = "latest"
    ) -> TensorData:
        """Read one tensor, or the part ``box`` of it. Only the chunks it lies in are read.

        Raises:
            NotFoundError: no such checkpoint or tensor.
            InvalidInputError: the box is not inside the tensor.
            CorruptError: no good copy of a chunk is left.
        """
        return self._reading(checkpoint, lambda opened: _read_tensor(opened, name, box))

    def values(self, checkpoint: str | int | CheckpointId = "latest") -> dict[str, Any]:
        """Return the plain state that is the same on all ranks: docs/format.md, "State values".

        Tensors inside it come as :class:`TensorName`.

        Raises:
            NotFoundError, CorruptError: as :meth:`open`.
            InvalidInputError: it holds an object of a type that is not registered in this program.
        """
        return self._reading(
            checkpoint,
            lambda opened: merge_values(
                [
                    decode_value(opened.segment_index(rank).state, leaf=TensorName)
                    for rank in opened.manifest.state_ranks or [0]
                ]
            ),
        )

    def aliases(self, checkpoint: str | int | CheckpointId = "latest") -> dict[str, str]:
        """Return the names of tied tensors that are stored under another name, with that name."""
        return self._reading(checkpoint, _read_aliases)

    def rank_values(self, rank: int, checkpoint: str | int | CheckpointId = "latest") -> dict[str, Any]:
        """Return the plain state of one rank alone: loaders, random numbers. Raises as :meth:`values`."""
        found: dict[str, Any] = self._reading(
            checkpoint, lambda opened: decode_value(opened.segment_index(rank).rank_state, leaf=TensorName)
        )
        return found


def _read_tensor(opened: Checkpoint, name: str, box: Box | None) -> TensorData:
    layout = opened.layouts.get(name)
    if layout is None:
        raise NotFoundError("tensor is not in the checkpoint", code="tensor", tensor=name)
    shape = region_of(layout, box).shape
    array = np.empty(shape, f"V{layout.itemsize}")
    read_parts(opened, [(name, box)], [array])
    return TensorData(
        ident=opened.ident,
        dtype=layout.dtype,
        shape=shape,
        global_shape=layout.global_shape,
        data=bytearray(array.tobytes()),
    )


def _read_aliases(opened: Checkpoint) -> dict[str, str]:
    found: dict[str, str] = {}
    for rank in opened.manifest.state_ranks or [0]:
        mapping = opened.segment_index(rank).state.mapping
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            if key.text == "aliases":  # the rest may hold types that are not registered here
                found |= decode_value(value)
    return found


def choose_names(patterns: str | Collection[str] | None, known: Collection[str]) -> list[str]:
    """Return the names that fit at least one pattern, in the order of ``known``; all for None.

    Raises:
        NotFoundError: a pattern fits no name.
    """
    if patterns is None:
        return list(known)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    unused = [pattern for pattern in wanted if not any(fnmatchcase(name, pattern) for name in known)]
    if unused:
        raise NotFoundError("a pattern fits no tensor of the checkpoint", code="tensor", patterns=unused)
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in wanted)]


def choose_exactly(names: Collection[str], known: Collection[str]) -> list[str]:
    """Return ``names``. Raises NotFoundError where some are not in ``known``."""
    missing = [name for name in names if name not in known]
    if missing:
        raise NotFoundError("tensors are not in the checkpoint", code="tensor", tensors=missing)
    return list(names)


def _array_over(data: bytearray, layouts: LayoutSet, name: str) -> NDArray[Any]:
    layout = layouts[name]
    return np.frombuffer(data, numpy_dtype(layout.dtype)).reshape(layout.global_shape)
