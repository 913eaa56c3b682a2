"""Carrying out a read plan: whole chunks from the nearest copy, verified, placed by the caller.

Copies are looked for in the tiers given, in their order (see ckpt.ops.tiers), then in the object store. A
bad or missing copy falls back to the next tier, chunk by chunk, and is reported; only when the store's copy
is bad as well does the read fail.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ckpt import dtypes
from ckpt.digest import DIGEST_NBYTES, Buffer, digest
from ckpt.errors import CkptError, CorruptError, InvalidInputError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.chunks import check_chunk_table, stored_chunk
from ckpt.format.codec import decode_chunk
from ckpt.format.segment import chunk_range
from ckpt.geometry import Box, Region
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.tiers import GIVEN_UP, REMOTE, Tier
from ckpt.plan.read import ChunkCopy, PieceRead, ReadPlan, Want, plan_chunks, plan_read
from ckpt_proto.v1 import disk_pb2

__all__ = ["FetchStats", "Place", "fetch", "fetch_tensor", "read_verified_chunk"]

Place: TypeAlias = Callable[[ChunkCopy, Buffer], None]

_log = get_logger("fetch")
DEFAULT_WORKERS = 4  # chunks in flight: memory is bounded by this times the chunk size


@dataclass(slots=True)
class FetchStats:
    """What a fetch did. Bytes are of whole chunks, as read.

    Attributes:
        nbytes: by name of the tier they came from; REMOTE for the object store.
        repaired_chunks: chunks whose nearest copy was bad or gone and that a farther one gave instead.
    """

    nbytes: Counter[str] = field(default_factory=Counter)
    repaired_chunks: int = 0


class _Segment:
    """One source rank's segment: its index and where its chunks can be had."""

    def __init__(self, checkpoint: Checkpoint, rank: int, tiers: Sequence[Tier]) -> None:
        self._checkpoint = checkpoint
        self._rank = rank
        self._tiers: Sequence[Tier] = ()  # from the nearest that has it on
        for position, tier in enumerate(tiers):
            if (found := tier.index(checkpoint.ident, rank)) is not None:
                self.index = found
                self._tiers = tiers[position:]
                return
        self.index = checkpoint.segment_index(rank)

    def chunk(
        self, number: int, stats: FetchStats, lock: threading.Lock, scratch: memoryview | None = None
    ) -> Buffer:
        """Return the raw bytes of a chunk, verified. Raises CorruptError when no copy is good.

        They may be in ``scratch`` (of at least a chunk), which must then not be used again before they are.
        """
        for position, tier in enumerate(self._tiers):
            data = self._read_from(tier, number, scratch)
            if data is not None:
                with lock:
                    stats.nbytes[tier.name] += len(data)
                    stats.repaired_chunks += position > 0
                return data
        index = self._checkpoint.segment_index(self._rank)
        place = stored_chunk(index, number)
        try:
            stored = self._checkpoint.store.get_range(place.object_key, place.offset, place.nbytes)
        except NotFoundError as error:
            raise CorruptError(
                "an object of the checkpoint is gone", code="missing", key=place.object_key
            ) from error
        with lock:
            stats.nbytes[REMOTE] += len(stored)
            stats.repaired_chunks += len(self._tiers) > 0
        raw = decode_chunk(place.codec, stored, place.raw_nbytes)
        self._check(raw, index, number, where=place.object_key)
        return raw

    def _read_from(self, tier: Tier, number: int, scratch: memoryview | None) -> Buffer | None:
        start, stop = chunk_range(number, self.index.nbytes, self.index.chunks.chunk_nbytes)
        try:
            data = scratch[: stop - start] if scratch is not None else memoryview(bytearray(stop - start))
            tier.read_into(data, self._checkpoint.ident, self._rank, start)
            self._check(data, self.index, number, where=tier.name)
            return data
        except CkptError as error:
            if error.code != GIVEN_UP:
                event(
                    _log,
                    logging.WARNING,
                    "fetch.bad_copy",
                    tier=tier.name,
                    checkpoint=self._checkpoint.ident,
                    error=error,
                )
            return None

    def _check(self, data: Buffer, index: disk_pb2.SegmentIndex, number: int, *, where: str) -> None:
        if digest(data) != index.chunks.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
            raise CorruptError(
                "digest does not match: the chunk is damaged",
                code="digest",
                where=where,
                rank=self._rank,
                chunk=number,
            )


def fetch(
    checkpoint: Checkpoint,
    plan: ReadPlan,
    place: Place,
    *,
    tiers: Sequence[Tier] = (),
    workers: int = DEFAULT_WORKERS,
) -> FetchStats:
    """Read what ``plan`` names and hand each copy to ``place``.

    Args:
        checkpoint: to read from.
        plan: of :func:`ckpt.plan.read.plan_read` over ``checkpoint.layouts``.
        place: called from several threads with a copy and the raw bytes of its chunk; must have copied
            when it returns. Copies never overlap in their targets.
        tiers: where copies are looked for before the store, nearest first.
        workers: chunks in flight; extra memory is this many chunks.

    Raises:
        CorruptError: no good copy of a chunk is left, or the index contradicts the layout.
        UnavailableError: the store cannot be reached.
    """
    stats = FetchStats()
    lock = threading.Lock()
    stop = threading.Event()

    own = threading.local()

    def scratch_of(nbytes: int) -> memoryview:
        # Read again and again into the same pages: fresh memory costs a page fault per 4 KiB.
        if getattr(own, "scratch", None) is None or len(own.scratch) < nbytes:
            own.scratch = memoryview(bytearray(nbytes))
        found: memoryview = own.scratch
        return found

    def read_one(segment: _Segment, number: int, copies: Sequence[ChunkCopy]) -> None:
        if stop.is_set():
            return
        try:
            data = segment.chunk(number, stats, lock, scratch_of(segment.index.chunks.chunk_nbytes))
            for copy in copies:
                place(copy, data)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers, thread_name_prefix="ckpt-fetch") as pool:
        planned = pool.map(
            lambda item: _plan_segment(checkpoint, item[0], item[1], tiers), plan.by_rank.items()
        )
        jobs = [
            pool.submit(read_one, segment, number, copies)
            for segment, chunks in list(planned)
            for number, copies in chunks.items()
        ]
    errors = [error for job in jobs if (error := job.exception()) is not None]
    if errors:
        raise errors[0]
    return stats


def _plan_segment(
    checkpoint: Checkpoint, rank: int, pieces: Sequence[PieceRead], tiers: Sequence[Tier]
) -> tuple[_Segment, dict[int, list[ChunkCopy]]]:
    segment = _Segment(checkpoint, rank, tiers)
    check_chunk_table(segment.index)
    entries = {entry.name: entry for entry in segment.index.tensors}
    return segment, plan_chunks(entries, pieces, segment.index.chunks.chunk_nbytes, segment.index.nbytes)


def read_verified_chunk(
    checkpoint: Checkpoint, rank: int, chunk: int, *, tiers: Sequence[Tier] = ()
) -> Buffer:
    """Return the raw bytes of one chunk of a segment.

    Raises:
        NotFoundError: no such rank.
        InvalidInputError: no such chunk.
        CorruptError: no good copy is left.
    """
    segment = _Segment(checkpoint, rank, tiers)
    chunk_range(
        chunk, segment.index.nbytes, segment.index.chunks.chunk_nbytes
    )  # raises for a number too large
    return segment.chunk(chunk, FetchStats(), threading.Lock())


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
        target = np.frombuffer(data, _raw_dtype(itemsize)).reshape(region.shape)
        plan = plan_read(checkpoint.layouts, [Want(name, region, 0)])
        fetch(checkpoint, plan, lambda copy, chunk: place_in_numpy(target, copy, chunk), tiers=tiers)
    return layout.dtype, region.shape, data


def place_in_numpy(target: np.ndarray, copy: ChunkCopy, chunk: Buffer) -> None:
    """Copy into ``target``, whose dtype only needs the right item size."""
    source = np.frombuffer(chunk, target.dtype, copy.count, copy.offset).reshape(copy.shape)
    target[copy.dst_slices()] = source[copy.src_slices()]


def _raw_dtype(itemsize: int) -> np.dtype:
    return np.dtype(f"V{itemsize}") if itemsize > 8 else np.dtype(f"u{itemsize}")
