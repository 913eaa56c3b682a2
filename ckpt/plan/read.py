"""Decides what a restore reads: wanted regions x saved layout -> ranks, then chunks and copies. Pure.

Two steps, because which ranks matter follows from the layout alone, while the byte offsets are in the
segment indexes of those ranks:

    plan = plan_read(saved, wants)                        # no I/O needed
    for rank, pieces in plan.by_rank.items():             # read only these segment indexes
        copies = plan_chunks(entries of rank, pieces, ...)
        for chunk, items in copies.items():               # fetch and verify the chunk, then for each item
            view = np.frombuffer(chunk, dtype, count, item.offset).reshape(item.shape)
            targets[item.target][item.dst_slices()] = view[item.src_slices()]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt import dtypes
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.layout import LayoutSet, SplitKey, TensorLayout, owners, split_key
from ckpt.format.limits import MAX_CHUNK_NBYTES
from ckpt.geometry import Box, Region, Shape, flat_range, flat_range_boxes, intersect_regions
from ckpt_proto.v1 import disk_pb2

__all__ = ["ChunkCopy", "PieceRead", "ReadPlan", "Want", "plan_chunks", "plan_read"]


@dataclass(frozen=True, slots=True)
class Want:
    """A part of a saved tensor that the caller needs.

    Attributes:
        name: FQN in the checkpoint.
        region: which part, in global coordinates.
        target: the caller's index of a destination array; its shape is ``region.shape``.
    """

    name: str
    region: Region
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRead:
    """What one source rank has of one want.

    Attributes:
        rank: the source rank.
        name: FQN; names the stored array in that rank's segment.
        dtype: of the saved tensor.
        target: of the want.
        src_shape: shape of the stored array.
        pairs: (box in the stored array, box in the target); equal sizes.
    """

    rank: int
    name: str
    dtype: str
    target: int
    src_shape: Shape
    pairs: tuple[tuple[Box, Box], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What to read from whom.

    Attributes:
        by_rank: the pieces of each source rank, ranks ascending.
        nbytes: bytes that will be written to the targets.
    """

    by_rank: Mapping[int, tuple[PieceRead, ...]]
    nbytes: int


def plan_read(saved: LayoutSet, wants: Sequence[Want]) -> ReadPlan:
    """Find which rank has which part of every want, and prove that nothing is missing.

    Raises:
        NotFoundError: a wanted tensor is not in the checkpoint, code "tensor".
        InvalidInputError: a region reaches beyond its tensor or has another ndim.
        CorruptError: the saved layout does not cover a want exactly once, code "coverage".
    """
    found: dict[int, list[PieceRead]] = {}
    nbytes = 0
    # A model's tensors have few shapes and few placements: the arithmetic is done once for each.
    known: dict[tuple[SplitKey, Region], list[_Overlap]] = {}
    for want in wants:
        layout = saved.get(want.name)
        if layout is None:
            raise NotFoundError("tensor is not in the checkpoint", code="tensor", tensor=want.name)
        key = (split_key(layout), want.region)
        overlaps = known.get(key)
        if overlaps is None:
            overlaps = known[key] = _overlaps(layout, want)
        for overlap in overlaps:
            piece = PieceRead(
                rank=overlap.rank,
                name=want.name,
                dtype=layout.dtype,
                target=want.target,
                src_shape=overlap.src_shape,
                pairs=overlap.pairs,
            )
            found.setdefault(overlap.rank, []).append(piece)
            nbytes += overlap.nelements * layout.itemsize
    return ReadPlan(by_rank={rank: tuple(found[rank]) for rank in sorted(found)}, nbytes=nbytes)


def _check_bounds(layout: TensorLayout, want: Want) -> None:
    shape = layout.global_shape
    inside = len(want.region.runs) == len(shape) and all(
        run.start >= 0 and run.start + run.length <= n
        for n, runs in zip(shape, want.region.runs, strict=True)
        for run in runs
    )
    if not inside:
        raise InvalidInputError(
            "wanted region reaches beyond the saved tensor",
            code="region",
            tensor=want.name,
            saved=list(shape),
            region=[list(runs) for runs in want.region.runs],
        )


class _Overlap(NamedTuple):
    """What one source rank has of a wanted region; the fields are as in :class:`PieceRead`."""

    rank: int
    src_shape: Shape
    pairs: tuple[tuple[Box, Box], ...]
    nelements: int


def _overlaps(layout: TensorLayout, want: Want) -> list[_Overlap]:
    """Every rank that stores a part of ``want``; together they are proved to store all of it."""
    _check_bounds(layout, want)
    found: list[_Overlap] = []
    for rank, region in owners(layout, want.region):
        pairs = tuple(intersect_regions(region, want.region))
        if pairs:
            found.append(_Overlap(rank, region.shape, pairs, sum(dst.nelements for _, dst in pairs)))
    covered = sum(overlap.nelements for overlap in found)
    # The owned regions of a layout are disjoint, so an equal count means each element once.
    if covered != want.region.nelements:
        raise CorruptError(
            "saved shards do not cover what is wanted",
            code="coverage",
            tensor=want.name,
            covered=covered,
            wanted=want.region.nelements,
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCopy:
    """One strided copy out of one chunk.

    ``shape`` elements of ``dtype`` lie contiguously at ``offset`` of the chunk; ``src`` selects from
    them, ``dst`` (same sizes) is where that goes in the target.

    Attributes:
        target: of the want.
        dtype: torch's name.
        offset: bytes from the start of the chunk.
        shape: of the contiguous array.
        src: box within that array.
        dst: box within the target.
    """

    target: int
    dtype: str
    offset: int
    shape: Shape
    src: Box
    dst: Box

    @property
    def nbytes(self) -> int:
        """Bytes copied."""
        return self.src.nelements * dtypes.itemsize(self.dtype)

    @property
    def count(self) -> int:
        """Elements of the contiguous array."""
        return math.prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """Whether what is copied lies in the chunk without gaps."""
        return flat_range(self.shape, self.src) is not None

    def span(self) -> tuple[int, int]:
        """Return the bytes [start, stop) of the chunk from the first to the last one that is copied."""
        itemsize = dtypes.itemsize(self.dtype)
        if self.src.sizes == self.shape:  # the common case, on the way of every chunk
            return self.offset, self.offset + self.count * itemsize
        first, last = _flat_span(self.shape, self.src)
        return self.offset + first * itemsize, self.offset + (last + 1) * itemsize

    def src_slices(self) -> tuple[slice, ...]:
        return self.src.slices()

    def dst_slices(self) -> tuple[slice, ...]:
        return self.dst.slices()


def plan_chunks(
    entries: Mapping[str, disk_pb2.TensorEntry],
    pieces: Iterable[PieceRead],
    chunk_nbytes: int,
    segment_nbytes: int,
) -> dict[int, list[ChunkCopy]]:
    """Return the chunks of one segment that ``pieces`` need (ascending), with the copies of each.

    Args:
        entries: the segment index's tensors by name.
        pieces: all of the segment's rank.
        chunk_nbytes: from the segment index.
        segment_nbytes: size of the segment file.

    Raises:
        CorruptError: the index contradicts the layout, code "index-mismatch".
    """
    found: dict[int, list[ChunkCopy]] = {}
    for piece in pieces:
        entry = entries.get(piece.name)
        if entry is None:
            raise CorruptError(
                "segment lacks a tensor that its layout promises",
                code="index-mismatch",
                tensor=piece.name,
                rank=piece.rank,
            )
        _check_entry(entry, piece, chunk_nbytes, segment_nbytes)
        for src, dst in piece.pairs:
            for chunk, copy in _copies(entry.start, piece, src, dst, chunk_nbytes):
                found.setdefault(chunk, []).append(copy)
    return {chunk: found[chunk] for chunk in sorted(found)}


def _check_entry(
    entry: disk_pb2.TensorEntry, piece: PieceRead, chunk_nbytes: int, segment_nbytes: int
) -> None:
    itemsize = dtypes.itemsize(piece.dtype)
    sound = (
        tuple(entry.shape) == piece.src_shape
        and entry.dtype == piece.dtype
        and entry.nbytes == math.prod(piece.src_shape) * itemsize
        and entry.start + entry.nbytes <= segment_nbytes
        and entry.start % itemsize == 0
        and 0 < chunk_nbytes <= MAX_CHUNK_NBYTES
        and chunk_nbytes % itemsize == 0  # else an element could straddle two chunks
    )
    if not sound:
        raise CorruptError(
            "segment index contradicts the layout",
            code="index-mismatch",
            tensor=piece.name,
            rank=piece.rank,
            found=f"{entry.dtype}{list(entry.shape)}",
            expected=f"{piece.dtype}{list(piece.src_shape)}",
        )


def _copies(
    start: int, piece: PieceRead, src: Box, dst: Box, chunk_nbytes: int
) -> Iterator[tuple[int, ChunkCopy]]:
    itemsize = dtypes.itemsize(piece.dtype)
    shape = piece.src_shape
    number, offset = divmod(start, chunk_nbytes)
    if src.sizes == shape and offset + src.nelements * itemsize <= chunk_nbytes:
        # A whole array within one chunk, as most are.
        yield (
            number,
            ChunkCopy(target=piece.target, dtype=piece.dtype, offset=offset, shape=shape, src=src, dst=dst),
        )
        return
    first, last = _flat_span(shape, src)
    delta = tuple(b - a for a, b in zip(src.offsets, dst.offsets, strict=True))
    for chunk in range(
        (start + first * itemsize) // chunk_nbytes, (start + last * itemsize) // chunk_nbytes + 1
    ):
        chunk_start = chunk * chunk_nbytes
        low = max(first, -(-(chunk_start - start) // itemsize))
        high = min(last + 1, (chunk_start + chunk_nbytes - start) // itemsize)
        flat = low
        for box in flat_range_boxes(shape, low, high):
            offset = start + flat * itemsize - chunk_start
            flat += box.nelements
            common = box.intersect(src)
            if common is not None:
                yield (
                    chunk,
                    ChunkCopy(
                        target=piece.target,
                        dtype=piece.dtype,
                        offset=offset,
                        shape=box.sizes,
                        src=common.shift(tuple(-a for a in box.offsets)),
                        dst=common.shift(delta),
                    ),
                )


def _flat_span(shape: Shape, box: Box) -> tuple[int, int]:
    """Return the flat indexes of the first and the last element of ``box``."""
    first = last = 0
    for n, offset, size in zip(shape, box.offsets, box.sizes, strict=True):
        first = first * n + offset
        last = last * n + offset + size - 1
    return first, last
