"""Optimizer state in plain tensors beside sharded parameters: what the tensors mean has to be declared.

A DTensor says how it is sharded. A plain tensor in the state of a sharded parameter may be this rank's part,
or the same on every rank, and 8-bit optimizers keep one scale per block of this rank's part. Nothing in
the tensor tells which.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import InvalidInputError
from ckpt.format.layout import TensorLayout
from ckpt.geometry import Box, Region, Run
from ckpt_trainer_hooks.compat import as_dtensor, local_tensor, strided_split_factor
from ckpt_trainer_hooks.layout import LayoutBuilder, Placed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "LocalState",
    "declare_local_state",
    "declared",
    "flat_range",
    "like_parameter",
    "looks_like_a_shard",
    "place_scales",
    "rank_name",
    "rows_per_block",
]

_declarations: weakref.WeakKeyDictionary[torch.optim.Optimizer, LocalState] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class LocalState:
    """What :func:`declare_local_state` was told."""

    shards: frozenset[str] = frozenset()
    scales: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    block_size: int = 0


def declare_local_state(
    optimizer: torch.optim.Optimizer,
    *,
    shards: Iterable[str] = (),
    scales: Iterable[str] = (),
    block_size: int = 0,
    replicated: Iterable[str] = (),
) -> None:
    """Say what plain tensors in the state of ``optimizer`` mean, by the key they have there.

    Needed where parameters are sharded (DTensor); harmless, and without it unnecessary, where they are not.
    For bitsandbytes, for example::

        declare_local_state(
            optimizer,
            shards=("state1", "state2"),
            scales=("absmax1", "absmax2"),
            block_size=256,
            replicated=("qmap1", "qmap2"),
        )

    Args:
        optimizer: one that is or will be registered with a manager. Kept weakly.
        shards: one element per element of this rank's part of the parameter, in its shape or flat.
        scales: one-dimensional, one element per block of ``block_size`` elements of this rank's part, counted
            in row-major order from its start; the last block may be shorter. Another layout is restored where
            no block is cut; else the restore is refused before anything is changed.
        block_size: in elements; with ``scales`` only.
        replicated: the same on every rank.

    Raises:
        InvalidInputError: scales without a block size, or a key declared twice.
    """
    found = LocalState(frozenset(shards), frozenset(scales), frozenset(replicated), block_size)
    if bool(found.scales) != (block_size > 0):
        raise InvalidInputError("scales need a block size, and only they", block_size=block_size)
    if len(found.shards | found.scales | found.replicated) != sum(
        map(len, (found.shards, found.scales, found.replicated))
    ):
        raise InvalidInputError("a key of the optimizer's state is declared twice")
    _declarations[optimizer] = found


def declared(optimizer: torch.optim.Optimizer) -> LocalState:
    """Return what was declared for ``optimizer``; an empty declaration where nothing was."""
    return _declarations.get(optimizer) or LocalState()


def rank_name(name: str, rank: int) -> str:
    """The name under which a rank stores scales that no other layout can use."""
    return f"{name}@rank{rank}"


def looks_like_a_shard(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a plain state tensor has the size of this rank's part of a parameter that others share."""
    sharded = as_dtensor(parameter)
    if sharded is None or as_dtensor(value) is not None or value.ndim == 0:
        return False
    local = local_tensor(sharded)
    return local.shape != sharded.shape and value.shape in (local.shape, (local.numel(),))


def like_parameter(parameter: torch.Tensor, value: torch.Tensor, key: str) -> torch.Tensor:
    """``value``, this rank's part in plain form, as a tensor laid out like ``parameter``; no copy."""
    sharded = as_dtensor(parameter)
    local = parameter if sharded is None else local_tensor(sharded)
    if value.numel() != local.numel():
        raise InvalidInputError(
            "optimizer state declared as this rank's shard has another size",
            key=key,
            found=value.numel(),
            expected=local.numel(),
        )
    shaped = value.detach().view(local.shape)
    return shaped if sharded is None else _global(sharded, shaped, tuple(sharded.shape), sharded.placements)


def place_scales(
    builder: LayoutBuilder,
    rank: int,
    name: str,
    parameter: torch.Tensor,
    value: torch.Tensor,
    block_size: int,
) -> Placed:
    """Lay out the scales of this rank's blocks: over all blocks of the parameter where shards end at block
    borders, else under a name of this rank's own.
    """
    sharded = as_dtensor(parameter)
    local = parameter if sharded is None else local_tensor(sharded)
    if value.ndim != 1 or value.numel() != -(-local.numel() // block_size):
        raise InvalidInputError(
            "scales must be one-dimensional, one per block of this rank's shard",
            tensor=name,
            found=tuple(value.shape),
            blocks=-(-local.numel() // block_size),
        )
    if sharded is None:
        return builder.place(name, value)
    placements = tuple(sharded.placements)
    if all(p.is_replicate() for p in placements):
        return builder.place(name, _global(sharded, value.detach(), tuple(value.shape), placements))
    per_block = rows_per_block(sharded, block_size)
    if per_block is None:
        return builder.place(rank_name(name, rank), value, alone=True)
    rows, row_size = sharded.shape[0], max(1, sharded.numel() // max(1, sharded.shape[0]))
    if per_block == 0:  # each row is some blocks
        blocks = row_size // block_size
        shaped = value.detach().view(local.shape[0], blocks)
        return builder.place(name, _global(sharded, shaped, (rows, blocks), placements))
    return builder.place(name, _global(sharded, value.detach(), (-(-rows // per_block),), placements))


def rows_per_block(sharded: DTensor, block_size: int) -> int | None:
    """Rows in one block where shards end at block borders; 0 where each row is some whole blocks; None where
    a block may cross the end of a shard. Decided by the placements alone, so alike on every rank.
    """
    cut = [(dim, p) for dim, p in enumerate(sharded.placements) if not p.is_replicate()]
    if len(cut) != 1 or not cut[0][1].is_shard(0) or strided_split_factor(cut[0][1]) is not None:
        return None
    rows = sharded.shape[0]
    row_size = sharded.numel() // rows if rows else 0
    if row_size == 0:
        return None
    if row_size % block_size == 0:
        return 0
    per_shard = -(-rows // sharded.device_mesh.size(cut[0][0]))
    if block_size % row_size == 0 and per_shard % (block_size // row_size) == 0:
        return block_size // row_size
    return None


def flat_range(region: Region, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The row-major range of elements that ``region`` covers in a tensor of ``shape``, if it is one."""
    if region.nelements == 0:
        return (0, 0)
    if not shape:
        return (0, 1)
    whole = Region.whole(shape)
    if len(region.runs[0]) != 1 or region.runs[1:] != whole.runs[1:]:
        return None
    row_size = whole.nelements // shape[0]
    run: Run = region.runs[0][0]
    return run.start * row_size, (run.start + run.length) * row_size


def scales_region(
    saved: TensorLayout, shape: tuple[int, ...], start: int, stop: int, block_size: int
) -> Region | None:
    """The part of the stored scales that belongs to elements ``start`` to ``stop`` of a parameter, or None
    where a block would be cut, or the stored scales are of other blocks.
    """
    total = Region.whole(shape).nelements
    if start % block_size or (stop % block_size and stop != total):
        return None
    first, last = start // block_size, -(-stop // block_size)
    if saved.global_shape == (-(-total // block_size),):
        return Region.of_box(Box((first,), (last - first,)))
    per_row = saved.global_shape[-1] if len(saved.global_shape) == 2 else 0
    if not per_row or saved.global_shape != (shape[0], per_row) or per_row * block_size * shape[0] != total:
        return None
    return Region.of_box(Box((first // per_row, 0), ((last - first) // per_row, per_row)))


def renamed(layout: TensorLayout, name: str) -> TensorLayout:
    """The same layout under another name, to compare."""
    return replace(layout, name=name)


def _global(sharded: DTensor, local: torch.Tensor, shape: tuple[int, ...], placements: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, sharded.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
