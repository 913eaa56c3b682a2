"""Copies of a committed checkpoint on a node: found damaged, and replaced by what the store has.

The store is the truth here: a sealed copy of a committed step is the same segment, so what differs from the
committed index is damaged. A copy that the store cannot replace is left as it is: its good chunks are still
of use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt.digest import DIGEST_NBYTES, Buffer, digest
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.format.chunks import stored_chunks
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import chunk_count, chunk_range
from ckpt.ops.rebuild import Demand, Rebuilder
from ckpt.ops.tiers import LocalTier
from ckpt.storage.durable import fsync_dir, new_file
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import disk_pb2

__all__ = ["LocalProblem", "repair_copies"]


@dataclass(frozen=True, slots=True)
class LocalProblem:
    """A damaged copy: its path, what is wrong, and why it could not be replaced (None: it was)."""

    path: str
    code: str
    left: CorruptError | None


def repair_copies(
    place: StagingDir,
    run_key: str,
    ident: CheckpointId,
    indexes: Mapping[int, disk_pb2.SegmentIndex],
    rebuilder: Rebuilder,
    *,
    dry_run: bool,
) -> Iterator[LocalProblem]:
    """Compare each sealed copy of ``ident`` in ``place`` with the committed index; replace what differs.

    Args:
        place: a staging directory, or the one of the node's replicas.
        run_key: the run's folder in it.
        ident: a committed checkpoint.
        indexes: its segment indexes by rank, as committed.
        rebuilder: reads the store.
        dry_run: change nothing; the store's copy is read all the same.

    Raises:
        UnavailableError: the directory or the store cannot be used.
    """
    for rank in place.sealed_ranks(run_key, ident):
        committed = indexes.get(rank)
        if committed is None:
            continue
        problem = _problem(place, run_key, ident, rank, committed)
        if problem is None:
            continue
        path = str(place.segment_path(run_key, ident, rank))
        try:
            if problem.code == "other-run":
                raise problem
            _replace(place, run_key, ident, committed, rebuilder, dry_run=dry_run)
        except CorruptError as error:
            yield LocalProblem(path, problem.code, error)
        except NotFoundError:  # local retention has removed it meanwhile
            continue
        else:
            yield LocalProblem(path, problem.code, None)


def _sealed_form(committed: disk_pb2.SegmentIndex) -> disk_pb2.SegmentIndex:
    """The index as the node sealed it: its table says nothing of the store."""
    index = disk_pb2.SegmentIndex()
    index.CopyFrom(committed)
    table = disk_pb2.ChunkTable(chunk_nbytes=committed.chunks.chunk_nbytes, digests=committed.chunks.digests)
    index.chunks.CopyFrom(table)
    return index


def _problem(
    place: StagingDir, run_key: str, ident: CheckpointId, rank: int, committed: disk_pb2.SegmentIndex
) -> CorruptError | None:
    try:
        found = place.read_index(run_key, ident, rank)
    except NotFoundError:
        return None  # removed meanwhile
    except CorruptError as error:
        return error
    if found != _sealed_form(committed):
        if found.run != committed.run:
            return CorruptError("the copy is of another run", code="other-run", run=found.run)
        return CorruptError("the index is not the one that was committed", code="identity", rank=rank)
    try:
        nbytes = place.segment_path(run_key, ident, rank).stat().st_size
    except FileNotFoundError:
        return CorruptError("the segment file is gone", code="missing", rank=rank)
    if nbytes != committed.nbytes:
        return CorruptError("the segment file has the wrong size", code="size", rank=rank)
    tier = LocalTier(place, run_key)
    for number in range(chunk_count(committed.nbytes, committed.chunks.chunk_nbytes)):
        start, stop = chunk_range(number, committed.nbytes, committed.chunks.chunk_nbytes)
        data = memoryview(bytearray(stop - start))
        try:
            tier.read_into([data], ident, rank, start)
        except CkptError as error:
            return CorruptError("the segment file cannot be read", code="unreadable", reason=error)
        if digest(data) != committed.chunks.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
            return CorruptError("a chunk of the segment file is damaged", code="digest", chunk=number)
    return None


def _replace(
    place: StagingDir,
    run_key: str,
    ident: CheckpointId,
    committed: disk_pb2.SegmentIndex,
    rebuilder: Rebuilder,
    *,
    dry_run: bool,
) -> None:
    """Write the segment from the store beside the damaged one, put it in its place, then the index (SD1)."""
    rank = committed.rank
    pieces = _raw_chunks(committed, rebuilder)
    if dry_run:
        for _ in pieces:
            pass
        return
    path, index_path = place.segment_path(run_key, ident, rank), place.index_path(run_key, ident, rank)
    with (
        os_errors("a damaged copy cannot be replaced", path=path),
        new_file(path.parent, pieces) as written,
    ):
        index_path.stat()  # gone: local retention is at work, and the folder is no longer ours to fill
        written.replace(path)
        fsync_dir(path.parent)
    if not _is_sealed_as(place, run_key, ident, committed):
        place.write_index(run_key, ident, rank, _sealed_form(committed))
    if not path.is_file():  # retention came between: an index without its segment must not stay
        index_path.unlink(missing_ok=True)


def _is_sealed_as(
    place: StagingDir, run_key: str, ident: CheckpointId, committed: disk_pb2.SegmentIndex
) -> bool:
    try:
        return place.read_index(run_key, ident, committed.rank) == _sealed_form(committed)
    except CorruptError:
        return False


def _raw_chunks(committed: disk_pb2.SegmentIndex, rebuilder: Rebuilder) -> Iterator[Buffer]:
    for chunk in stored_chunks(committed):
        yield rebuilder.raw(Demand(chunk))
