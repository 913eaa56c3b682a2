"""Which rank holds, and which rank stores, which part of a tensor: all by arithmetic.

Striping of replicas, with R replicas (product of the Replicate mesh dims) and replica index i
(row-major over those dims): a local shard of at least STRIPE_MIN_NBYTES is cut along its first local
dim of size >= R (else its largest) into rows [n * i // R, n * (i + 1) // R); a smaller one goes whole
to replica crc32(name) mod R.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from ckpt.errors import InvalidInputError
from ckpt.format.mesh import Mesh
from ckpt.format.placement import Placement, Shard, StridedShard, TensorLayout, splits_of
from ckpt.geometry import Region, Run, Runs, Shape, intersect_runs, merge_runs, narrow_runs

__all__ = [
    "STRIPE_MIN_NBYTES",
    "SplitKey",
    "Stripe",
    "local_region",
    "owned_region",
    "owned_stripe",
    "owners",
    "replica_at",
    "replication",
    "right_to_left",
    "split_key",
    "storing_ranks",
]

STRIPE_MIN_NBYTES = 1 << 20

Chain: TypeAlias = tuple[tuple[int, int], ...]
Coord: TypeAlias = tuple[int, ...]


class Stripe(NamedTuple):
    """What one rank stores of a tensor.

    Attributes:
        region: global; never empty.
        local_start: where it begins in the rank's local tensor, per dim. It extends by region.shape.
    """

    region: Region
    local_start: Shape


def _split_once(runs: Runs, size: int, link: tuple[int, int], index: int) -> Runs:
    """Return shard ``index`` of an array of ``size`` elements along a dim, covering ``runs``."""
    count, factor = link
    if factor == 1:
        step = -(-size // count)
        return narrow_runs(runs, step * index, step * (index + 1))
    piece = -(-size // factor)
    parts: list[Run] = []
    for start in range(0, size, piece or 1):
        length = min(piece, size - start)
        step = -(-length // count)
        low, high = step * index, min(step * (index + 1), length)
        if low < high:
            parts.extend(narrow_runs(runs, start + low, start + high))
    return merge_runs(parts)


@lru_cache(maxsize=16384)
def _shard_runs(size: int, chain: Chain, coord: Coord) -> Runs:
    """Return the runs of the shard at ``coord`` (one index per link) of a dim of ``size``."""
    runs: Runs = (Run(0, size),) if size else ()
    for link, index in zip(chain, coord, strict=True):
        runs = _split_once(runs, size, link, index)
        size = sum(run.length for run in runs)
    return runs


def local_region(layout: TensorLayout, rank: int) -> Region | None:
    """Return what DTensor's local tensor covers on ``rank``; None if it is not in the mesh.

    Every replica gets the same answer. The region may be empty.
    """
    coord = layout.mesh.coord_of(rank)
    return None if coord is None else _region_at(layout, coord)


def _region_at(layout: TensorLayout, coord: Coord) -> Region:
    return _region_of(layout.global_shape, layout.mesh.shape, layout.placements, coord)


@lru_cache(maxsize=16384)
def _region_of(shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...], coord: Coord) -> Region:
    # Most tensors of a model have one of a few shapes.
    splits, _ = splits_of(mesh_shape, placements, len(shape))
    return Region(
        tuple(
            _shard_runs(size, split.chain, tuple([coord[dim] for dim in split.mesh_dims]))
            for size, split in zip(shape, splits, strict=True)
        )
    )


@dataclass(frozen=True, slots=True)
class _Striping:
    """How one shard is shared by its replicas: ``dim`` is cut, or (None) ``keeper`` has it all."""

    count: int
    dim: int | None
    keeper: int

    def rows(self, index: int, size: int) -> tuple[int, int]:
        return size * index // self.count, size * (index + 1) // self.count

    def holder(self, row: int, size: int) -> int:
        # The largest i with size * i // count <= row.
        return -(-(row + 1) * self.count // size) - 1


def _striping(layout: TensorLayout, shape: Shape, count: int) -> _Striping:
    nbytes = math.prod(shape) * layout.itemsize
    if count == 1 or nbytes < STRIPE_MIN_NBYTES:
        return _Striping(count, None, _keeper(layout.name, count))
    for dim, size in enumerate(shape):
        if size >= count:
            return _Striping(count, dim, 0)
    return _Striping(count, shape.index(max(shape)), 0)


def _keeper(name: str, count: int) -> int:
    return zlib.crc32(name.encode()) % count if count > 1 else 0


class SplitKey(NamedTuple):
    """What decides which rank stores which part of a tensor: layouts with equal keys are split alike.

    Attributes:
        striped_itemsize: bytes per element where replicas may store stripes, else 0.
        keeper: the replica that stores shards too small for that.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    global_shape: Shape
    striped_itemsize: int
    keeper: int


def split_key(layout: TensorLayout) -> SplitKey:
    """Return the key of ``layout``."""
    _, replica_dims = splits_of(layout.mesh.shape, layout.placements, len(layout.global_shape))
    replicas = math.prod([layout.mesh.shape[dim] for dim in replica_dims])
    is_striped = replicas > 1 and layout.nbytes >= STRIPE_MIN_NBYTES
    return SplitKey(
        layout.mesh,
        layout.placements,
        layout.global_shape,
        layout.itemsize if is_striped else 0,
        _keeper(layout.name, replicas),
    )


def owned_stripe(layout: TensorLayout, rank: int) -> Stripe | None:
    """Return what ``rank`` stores of the tensor, and where that is in its local tensor.

    None: nothing (not in the mesh, an empty shard, or another replica stores it).
    """
    coord = layout.mesh.coord_of(rank)
    if coord is None:
        return None
    region = _region_at(layout, coord)
    if region.is_empty:
        return None
    count, index = 1, 0
    for dim in layout.replica_dims:
        count *= layout.mesh.shape[dim]
        index = index * layout.mesh.shape[dim] + coord[dim]
    start = (0,) * len(region.runs)
    if count == 1:
        return Stripe(region, start)
    shape = region.shape
    striping = _striping(layout, shape, count)
    if striping.dim is None:
        return Stripe(region, start) if striping.keeper == index else None
    low, high = striping.rows(index, shape[striping.dim])
    if low == high:
        return None
    return Stripe(
        region.narrow(striping.dim, low, high), (*start[: striping.dim], low, *start[striping.dim + 1 :])
    )


def replication(layout: TensorLayout, rank: int) -> tuple[int, int, int | None]:
    """Return (replicas, index of ``rank`` among them, index that keeps the shard whole or None: striped).

    Raises:
        InvalidInputError: ``rank`` is not in the mesh.
    """
    coord = layout.mesh.coord_of(rank)
    if coord is None:
        raise InvalidInputError("rank is not in the mesh", code="layout", tensor=layout.name, rank=rank)
    count, index = 1, 0
    for dim in layout.replica_dims:
        count *= layout.mesh.shape[dim]
        index = index * layout.mesh.shape[dim] + coord[dim]
    striping = _striping(layout, _region_at(layout, coord).shape, count)
    return count, index, striping.keeper if striping.dim is None else None


def replica_at(layout: TensorLayout, rank: int, index: int) -> int:
    """Return the rank that is replica ``index`` of the shard that ``rank`` (of the mesh) holds."""
    found = layout.mesh.coord_of(rank)
    assert found is not None
    coord = list(found)
    dims = layout.replica_dims
    _set_replica(coord, dims, [layout.mesh.shape[dim] for dim in dims], index)
    return layout.mesh.rank_at(coord)


def owned_region(layout: TensorLayout, rank: int) -> Region | None:
    """Return what ``rank`` stores of the tensor; None: nothing.

    Over all ranks of the mesh the owned regions cover every element exactly once.
    """
    stripe = owned_stripe(layout, rank)
    return None if stripe is None else stripe.region


def owners(layout: TensorLayout, wanted: Region) -> Iterator[tuple[int, Region]]:
    """Yield (rank, owned region) of every rank that stores a part of ``wanted``, each rank once.

    The cost grows with the number of such ranks, not with the size of the mesh.

    Raises:
        InvalidInputError: ``wanted`` has another ndim than the tensor.
    """
    if len(wanted.runs) != len(layout.global_shape):
        raise InvalidInputError(
            "region of another ndim", tensor=layout.name, expected=len(layout.global_shape)
        )
    splits, replica_dims = splits_of(layout.mesh.shape, layout.placements, len(layout.global_shape))
    candidates = [
        _overlapping(size, split.chain, runs)
        for size, split, runs in zip(layout.global_shape, splits, wanted.runs, strict=True)
    ]
    coord = [0] * layout.mesh.ndim
    for chosen in product(*candidates):
        for split, (indexes, _) in zip(splits, chosen, strict=True):
            for mesh_dim, index in zip(split.mesh_dims, indexes, strict=True):
                coord[mesh_dim] = index
        shard = Region(tuple(runs for _, runs in chosen))
        yield from _storing_replicas(layout, replica_dims, coord, shard, wanted)


def _storing_replicas(
    layout: TensorLayout, replica_dims: Coord, coord: list[int], shard: Region, wanted: Region
) -> Iterator[tuple[int, Region]]:
    # ``coord``: right in the sharded mesh dims; the replica dims are filled in here.
    sizes = [layout.mesh.shape[dim] for dim in replica_dims]
    shape = shard.shape
    striping = _striping(layout, shape, math.prod(sizes))
    dim = striping.dim
    if dim is None:
        _set_replica(coord, replica_dims, sizes, striping.keeper)
        yield layout.mesh.rank_at(coord), shard
        return
    rows = shape[dim]
    last = -1
    for start, _, length in sorted(intersect_runs(shard.runs[dim], wanted.runs[dim])):
        first = max(striping.holder(start, rows), last + 1)
        last = striping.holder(start + length - 1, rows)
        for index in range(first, last + 1):
            low, high = striping.rows(index, rows)
            if low < high:
                _set_replica(coord, replica_dims, sizes, index)
                yield layout.mesh.rank_at(coord), shard.narrow(dim, low, high)


def _set_replica(coord: list[int], dims: Coord, sizes: list[int], index: int) -> None:
    for dim, size in zip(reversed(dims), reversed(sizes), strict=True):
        index, coord[dim] = divmod(index, size)


def _overlapping(size: int, chain: Chain, wanted: Runs) -> list[tuple[Coord, Runs]]:
    """Return (coord, runs) of the shards of one dim that share elements with ``wanted``."""
    found: list[tuple[Coord, Runs]] = []
    if size and wanted:
        _descend((Run(0, size),), size, chain, (), wanted, found)
    return found


def _descend(
    runs: Runs, size: int, chain: Chain, coord: Coord, wanted: Runs, found: list[tuple[Coord, Runs]]
) -> None:
    # ``runs``: of the shard at ``coord``; they share elements with ``wanted``. Which of its parts do
    # follows by division: nothing is looked at that does not matter.
    if not chain:
        found.append((coord, runs))
        return
    count, factor = chain[0]
    piece = -(-size // factor)
    indexes: set[int] = set()
    for low, _, length in intersect_runs(runs, wanted):
        for start in range(low // piece * piece, low + length, piece):
            step = -(-min(piece, size - start) // count)
            first, last = max(low - start, 0), min(low + length - start, piece) - 1
            indexes.update(range(first // step, last // step + 1))
    for index in sorted(indexes):
        part = _split_once(runs, size, chain[0], index)
        _descend(part, sum(run.length for run in part), chain[1:], (*coord, index), wanted, found)


@lru_cache(maxsize=1024)
def _holding_offsets(size: int, chain: Chain, strides: Coord) -> tuple[int, ...]:
    """Return sum(coord * strides) of the shards of one dim that are not empty."""
    if not size:
        return ()
    if not chain:
        return (0,)
    count, factor = chain[0]
    piece = -(-size // factor)
    full, rest = divmod(size, piece)  # pieces of full length, and the length of the last one
    step, rest_step = -(-piece // count), -(-rest // count)
    found: list[int] = []
    for index in range(count):
        held = full * min(step, max(piece - step * index, 0))
        held += min(rest_step, max(rest - rest_step * index, 0))
        here = index * strides[0]
        found.extend([here + deeper for deeper in _holding_offsets(held, chain[1:], strides[1:])])
    return tuple(found)


def storing_ranks(layouts: Iterable[TensorLayout]) -> set[int]:
    """Return every rank that stores a part of at least one of the tensors.

    Tensors that are split alike are looked at once, and none on a mesh whose ranks are all known.
    """
    found: set[int] = set()
    full: set[Mesh] = set()
    seen: set[tuple[object, ...]] = set()
    for layout in sorted(layouts, key=lambda item: -item.nbytes):
        if layout.mesh in full:
            continue
        key = split_key(layout)
        if key in seen:
            continue
        seen.add(key)
        if key.striped_itemsize:
            found.update(rank for rank, _ in owners(layout, Region.whole(layout.global_shape)))
        else:
            found.update(_whole_shard_ranks(layout))
        if len(found) >= layout.mesh.size and found >= layout.mesh.ranks_set:
            full.add(layout.mesh)
    return found


def _whole_shard_ranks(layout: TensorLayout) -> Iterable[int]:
    # No shard is striped: each is stored by one replica, the same one for all shards.
    mesh = layout.mesh
    splits, replica_dims = splits_of(mesh.shape, layout.placements, len(layout.global_shape))
    strides = mesh.strides
    if strides is None:  # then count in the list of ranks
        strides = tuple(math.prod(mesh.shape[dim + 1 :]) for dim in range(mesh.ndim))
    coord = [0] * mesh.ndim
    sizes = [mesh.shape[dim] for dim in replica_dims]
    _set_replica(coord, replica_dims, sizes, _keeper(layout.name, math.prod(sizes)))
    places = [sum(map(int.__mul__, coord, strides))]
    for size, split in zip(layout.global_shape, splits, strict=True):
        held = _holding_offsets(size, split.chain, tuple([strides[dim] for dim in split.mesh_dims]))
        places = [place + offset for place in places for offset in held]
    if mesh.strides is None:
        return [mesh.explicit[place] for place in places]
    return [mesh.base + place for place in places]


def right_to_left(layout: TensorLayout) -> TensorLayout | None:
    """Return the layout of plain shards that FSDP2 really makes where it reports ``_StridedShard``.

    FSDP2 splits the shard that tensor parallelism left, so the later mesh dims come first. DTensor
    describes that as a strided shard whose split factor is the number of those later shards. For
    even sizes both are the same; for some uneven ones they are not (9 rows, TP 2, FSDP 4), and the
    data follow FSDP2. The result lives on the same ranks with permuted mesh dims.

    Returns:
        ``layout`` itself if nothing is strided; None if a split factor is not the number of later
        shards of its dim, so that no such order exists.
    """
    if not any(isinstance(p, StridedShard) for p in layout.placements):
        return layout
    mesh = layout.mesh
    order = list(range(mesh.ndim))
    for tensor_dim in {p.dim for p in layout.placements if isinstance(p, StridedShard)}:
        slots = [i for i, p in enumerate(layout.placements) if _dim_of(p) == tensor_dim]
        chosen: list[int] = []
        count = 1
        for mesh_dim in reversed(slots):
            placement = layout.placements[mesh_dim]
            if isinstance(placement, Shard) or placement == StridedShard(tensor_dim, 1):
                chosen.insert(0, mesh_dim)
            elif placement == StridedShard(tensor_dim, count):
                chosen.append(mesh_dim)
            else:
                return None
            count *= mesh.shape[mesh_dim]
        for slot, mesh_dim in zip(slots, chosen, strict=True):
            order[slot] = mesh_dim
    placements = tuple(_plain(layout.placements[dim]) for dim in order)
    return replace(layout, mesh=mesh.permute(order), placements=placements)


def _dim_of(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def _plain(placement: Placement) -> Placement:
    return Shard(placement.dim) if isinstance(placement, StridedShard) else placement
