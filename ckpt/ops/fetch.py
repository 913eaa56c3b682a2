"""Carrying out a read plan: whole chunks from the nearest copy, verified, put where they belong.

Copies are looked for in the tiers given, in their order (see ckpt.ops.tiers), then in the object store. A
bad or missing copy falls back to the next tier, chunk by chunk, and is reported; only when the store's copy
is bad as well does the read fail.

Bytes that lie in a chunk as they will lie in the destination go straight there and are digested there. So a
destination may hold bytes that turn out to be damaged, until a better copy has overwritten them or the
fetch has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckpt import dtypes
from ckpt.digest import Buffer
from ckpt.errors import InvalidInputError, NotFoundError
from ckpt.format.chunks import check_chunk_table
from ckpt.geometry import Box, Region, flat_range
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.source import FetchStats, SourceSegment
from ckpt.ops.tiers import Tier
from ckpt.plan.read import ChunkCopy, PieceRead, ReadPlan, Want, plan_chunks, plan_read
from ckpt.storage.direct import aligned_buffer

__all__ = [
    "ChunkRead",
    "FetchStats",
    "NumpyTargets",
    "Reader",
    "Targets",
    "fetch",
    "fetch_tensor",
    "raw_dtype",
    "read_all",
    "read_verified_chunk",
]

MAX_WORKERS = 8
_LOCAL_WORKERS = 4  # enough for any page cache; a store needs more requests in flight
_MEMORY_SHARE = 10  # chunks in flight take at most one part in ten of what is read, or two chunks

Span: TypeAlias = tuple[int, int]


class Targets(Protocol):
    """Where bytes go. Called from several threads; copies never overlap in their targets."""

    def window(self, copy: ChunkCopy) -> memoryview | None:
        """Return the bytes of the target that ``copy`` fills, if they are one after another, in host memory
        and exactly as stored; else None. Only asked where ``copy.is_flat``.
        """

    def place(self, copy: ChunkCopy, chunk: Buffer) -> None:
        """Copy out of the raw bytes of a chunk; must have copied when it returns."""

    def scratch(self, nbytes: int) -> memoryview:
        """Return page-aligned memory that chunks without a window are read into; at least ``nbytes``."""


class NumpyTargets:
    """Targets in NumPy arrays, whose dtypes only need the right item size.

    Args:
        arrays: by the ``target`` of the wants.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = arrays
        self._bytes = [
            array.reshape(-1).view(np.uint8).data if array.flags.c_contiguous and array.size else None
            for array in arrays
        ]

    def window(self, copy: ChunkCopy) -> memoryview | None:
        array, held = self._arrays[copy.target], self._bytes[copy.target]
        span = flat_range(array.shape, copy.dst) if held is not None else None
        return None if held is None or span is None else held[slice(*(n * array.itemsize for n in span))]

    def place(self, copy: ChunkCopy, chunk: Buffer) -> None:
        target = self._arrays[copy.target]
        source = np.frombuffer(chunk, target.dtype, copy.count, copy.offset).reshape(copy.shape)
        target[copy.dst_slices()] = source[copy.src_slices()]

    def scratch(self, nbytes: int) -> memoryview:
        return aligned_buffer(nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRead:
    """One chunk to read, and what is taken out of it."""

    segment: SourceSegment
    number: int
    copies: Sequence[ChunkCopy]

    @property
    def nbytes(self) -> int:
        """Raw size of the chunk."""
        return self.segment.chunk_nbytes(self.number)


class Reader:
    """A read plan down to its chunks. Safe for threads.

    Args:
        checkpoint: to read from.
        plan: of :func:`ckpt.plan.read.plan_read` over ``checkpoint.layouts``.
        targets: where the bytes go.
        tiers: where copies are looked for before the store, nearest first.
        alone: nobody else on this node reads what the plan names.

    Raises:
        CorruptError: no good index of a segment is left, or it contradicts the layout.
        UnavailableError: the store cannot be reached.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ReadPlan,
        targets: Targets,
        tiers: Sequence[Tier] = (),
        *,
        alone: bool = False,
    ) -> None:
        self._targets = targets
        self._own = threading.local()
        self.stats = FetchStats()
        self.nbytes = plan.nbytes
        self.chunks: list[ChunkRead] = []

        def planned(item: tuple[int, Sequence[PieceRead]]) -> list[ChunkRead]:
            segment = SourceSegment(checkpoint, item[0], tiers, alone=alone)
            check_chunk_table(segment.index)
            entries = {entry.name: entry for entry in segment.index.tensors}
            found = plan_chunks(entries, item[1], segment.index.chunks.chunk_nbytes, segment.index.nbytes)
            return [ChunkRead(segment, number, copies) for number, copies in found.items()]

        if len(plan.by_rank) <= 1:
            for item in plan.by_rank.items():
                self.chunks += planned(item)
        else:
            with ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="ckpt-plan") as pool:
                for chunks in pool.map(planned, plan.by_rank.items()):
                    self.chunks += chunks

    def workers(self) -> int:
        """How many chunks should be in flight; bounds the memory beyond the targets."""
        largest = max((read.segment.index.chunks.chunk_nbytes for read in self.chunks), default=1)
        most = MAX_WORKERS if any(read.segment.is_remote for read in self.chunks) else _LOCAL_WORKERS
        return max(1, min(most, max(2, self.nbytes // (_MEMORY_SHARE * largest)), len(self.chunks)))

    def read(self, read: ChunkRead) -> None:
        """Read one chunk into the targets. Raises as :meth:`ckpt.ops.source.SourceSegment.read`."""
        scratch = self._scratch(read.nbytes)
        parts, left = self._parts(read, scratch)
        raw = read.segment.read(read.number, parts, self.stats)
        for copy in left:
            self._targets.place(copy, scratch if raw is None else raw)

    def read_raw(self, read: ChunkRead, buffer: memoryview) -> None:
        """Read one chunk into ``buffer`` (of its size) and nowhere else. Raises likewise."""
        read.segment.read(read.number, [buffer], self.stats)

    def place(self, read: ChunkRead, data: Buffer, *, where: str) -> None:
        """Put a chunk that came from elsewhere in its place. Raises CorruptError where it is damaged."""
        read.segment.verify(read.number, data, where=where)
        for copy in read.copies:
            self._targets.place(copy, data)

    def _scratch(self, nbytes: int) -> memoryview:
        # Read again and again into the same pages: fresh memory costs a page fault per 4 KiB.
        if len(getattr(self._own, "scratch", b"")) < nbytes:
            self._own.scratch = self._targets.scratch(nbytes)
        found: memoryview = self._own.scratch
        return found[:nbytes]

    def _parts(self, read: ChunkRead, scratch: memoryview) -> tuple[list[memoryview], list[ChunkCopy]]:
        """Where each byte of the chunk goes, in its order, and the copies to be placed from ``scratch``."""
        parts: list[memoryview] = []
        left: list[ChunkCopy] = []
        done = reached = 0  # bytes that have a place; end of the spans seen so far
        ordered = sorted(((copy.span(), copy) for copy in read.copies), key=lambda item: item[0])
        for number, ((start, stop), copy) in enumerate(ordered):
            is_alone = start >= reached and (
                number + 1 == len(ordered) or stop <= ordered[number + 1][0][0]
            )  # else others need these bytes too
            reached = max(reached, stop)
            window = self._targets.window(copy) if is_alone and copy.is_flat else None
            if window is None:
                left.append(copy)
                continue
            if start > done:
                parts.append(scratch[done:start])
            parts.append(window)
            done = stop
        if done < len(scratch):
            parts.append(scratch[done:])
        return parts, left


def fetch(
    checkpoint: Checkpoint,
    plan: ReadPlan,
    targets: Targets,
    *,
    tiers: Sequence[Tier] = (),
) -> FetchStats:
    """Read what ``plan`` names into ``targets``.

    Args:
        checkpoint: to read from.
        plan: of :func:`ckpt.plan.read.plan_read` over ``checkpoint.layouts``.
        targets: where the bytes go.
        tiers: where copies are looked for before the store, nearest first.

    Raises:
        CorruptError: no good copy of a chunk is left, or the index contradicts the layout.
        UnavailableError: the store cannot be reached.
    """
    reader = Reader(checkpoint, plan, targets, tiers)
    read_all(reader, reader.chunks)
    return reader.stats


def read_all(reader: Reader, chunks: Sequence[ChunkRead]) -> None:
    """Read ``chunks`` of ``reader``, several at a time. Raises as :func:`fetch`, what failed first."""
    stop = threading.Event()

    def read_one(read: ChunkRead) -> None:
        if stop.is_set():
            return
        try:
            reader.read(read)
        except BaseException:
            stop.set()
            raise

    if not chunks:
        return
    with ThreadPoolExecutor(reader.workers(), thread_name_prefix="ckpt-fetch") as pool:
        jobs = [pool.submit(read_one, read) for read in chunks]
    errors = [error for job in jobs if (error := job.exception()) is not None]
    if errors:
        raise errors[0]


def read_verified_chunk(
    checkpoint: Checkpoint, rank: int, chunk: int, *, tiers: Sequence[Tier] = ()
) -> Buffer:
    """Return the raw bytes of one chunk of a segment.

    Raises:
        NotFoundError: no such rank.
        InvalidInputError: no such chunk.
        CorruptError: no good copy is left.
    """
    segment = SourceSegment(checkpoint, rank, tiers)
    data = memoryview(bytearray(segment.chunk_nbytes(chunk)))
    segment.read(chunk, [data], FetchStats())
    return data


def fetch_tensor(
    checkpoint: Checkpoint, name: str, box: Box | None = None, *, tiers: Sequence[Tier] = ()
) -> tuple[str, tuple[int, ...], bytearray]:
    """Read one tensor, or a box of it, into new memory.

    Args:
        checkpoint: to read from.
        name: FQN.
        box: which part; None for all of it.
        tiers: where copies are looked for before the store, nearest first.

    Returns:
        (dtype, shape, row-major bytes).

    Raises:
        NotFoundError: no such tensor.
        InvalidInputError: the box reaches beyond the tensor.
        CorruptError: no good copy of a chunk is left.
    """
    layout = checkpoint.layouts.get(name)
    if layout is None:
        raise NotFoundError("tensor is not in the checkpoint", code="tensor", tensor=name)
    region = Region.whole(layout.global_shape) if box is None else Region.of_box(box)
    itemsize = dtypes.itemsize(layout.dtype)
    if len(region.runs) != len(layout.global_shape):
        raise InvalidInputError("box and tensor have different ndim", tensor=name, shape=layout.global_shape)
    data = bytearray(region.nelements * itemsize)
    if data:
        target = np.frombuffer(data, raw_dtype(itemsize)).reshape(region.shape)
        plan = plan_read(checkpoint.layouts, [Want(name, region, 0)])
        fetch(checkpoint, plan, NumpyTargets([target]), tiers=tiers)
    return layout.dtype, region.shape, data


def raw_dtype(itemsize: int) -> np.dtype[Any]:
    """The dtype by which bits of this item size are moved in NumPy."""
    return np.dtype(f"V{itemsize}") if itemsize > 8 else np.dtype(f"u{itemsize}")
