"""From a snapshot in the arena to a sealed segment on local disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from ckpt.digest import digest
from ckpt.errors import InvalidInputError, RefusedError
from ckpt.format.envelope import Kind, seal_message
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.storage.direct import DirectFile, write_chunks
from ckpt.storage.durable import fsync_dir
from ckpt.storage.spares import is_ours_alone, take_spare
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import disk_pb2, flusher_pb2

__all__ = ["Sealed", "being_written", "seal_segment", "sweep_debris"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A segment that is durable on local disk.

    Attributes:
        ident: checkpoint.
        rank: whose segment.
        nbytes: size of the segment file.
        direct: False where the page cache had to be used.
    """

    ident: CheckpointId
    rank: int
    nbytes: int
    direct: bool


def seal_segment(
    staging: StagingDir, run_key: str, flush: flusher_pb2.Flush, arena: memoryview, *, threads: int
) -> Sealed:
    """Write the snapshot that ``flush`` describes, durably. Blocks until it is sealed.

    Idempotent: the same snapshot may be flushed again (by a trainer whose flusher died).

    Args:
        staging: where.
        run_key: of the run.
        flush: where the parts lie in ``arena``.
        arena: must not change until the call returns.
        threads: chunks written at once.

    Raises:
        InvalidInputError: the message and the arena do not agree. Nothing was written.
        RefusedError: code "already-sealed": another snapshot of this checkpoint and rank is sealed here.
        UnavailableError: the disk is full or refuses. Nothing is left behind.
    """
    ident = CheckpointId.from_proto(flush.id)
    index, layout = _parse(flush, arena)
    tmp = staging.segment_tmp_path(run_key, ident, flush.rank)
    staging.make_checkpoint_dir(run_key, ident)
    if flush.rank in staging.sealed_ranks(run_key, ident):
        return _confirm(staging, run_key, index, ident)
    with os_errors("a segment cannot be written", path=tmp), contextlib.ExitStack() as stack:
        stack.callback(_remove_quietly, tmp)  # no debris, whatever happens; after the rename it is gone
        take_spare(staging, run_key, flush.rank, tmp)
        file = stack.enter_context(_open_alone(tmp))
        report = write_chunks(file, arena, flush.segment_nbytes, chunk_nbytes=CHUNK_NBYTES, threads=threads)
        index.chunks.CopyFrom(disk_pb2.ChunkTable(chunk_nbytes=CHUNK_NBYTES, digests=report.digests))
        _publish(staging, run_key, ident, file, tmp, index, layout)
    return Sealed(ident=ident, rank=flush.rank, nbytes=flush.segment_nbytes, direct=report.direct)


def _publish(
    staging: StagingDir,
    run_key: str,
    ident: CheckpointId,
    file: DirectFile,
    tmp: Path,
    index: disk_pb2.SegmentIndex,
    layout: bytes,
) -> None:
    """Make a written segment sealed (SD1). Each line would be a bug if it came later."""
    os.fdatasync(file.fd)  # else after a power cut a sealed segment may hold zeros: names outlive data
    tmp.replace(staging.segment_path(run_key, ident, index.rank))  # else the marker names no file
    staging.write_layout(run_key, index.layout_digest, layout)  # else nobody can tell where the tensors go
    fsync_dir(tmp.parent)  # else a power cut may keep the marker and forget the segment's new name
    staging.write_index(run_key, ident, index.rank, index)  # the marker: durable before it returns


def _parse(flush: flusher_pb2.Flush, arena: memoryview) -> tuple[disk_pb2.SegmentIndex, bytes]:
    """Return index and layout set from the arena, proved to be those that ``flush`` means."""
    ends = (
        flush.segment_nbytes,
        flush.index_offset + flush.index_nbytes,
        flush.layout_offset + flush.layout_nbytes,
    )
    if max(ends) > len(arena) or min(flush.index_offset, flush.layout_offset) < flush.segment_nbytes:
        raise InvalidInputError("flush does not fit its arena", arena=len(arena), needed=max(ends))
    layout = bytes(arena[flush.layout_offset : flush.layout_offset + flush.layout_nbytes])
    try:
        index = disk_pb2.SegmentIndex.FromString(
            bytes(arena[flush.index_offset : flush.index_offset + flush.index_nbytes])
        )
    except DecodeError as error:
        raise InvalidInputError("the arena holds no segment index where flush says") from error
    said = (flush.rank, flush.segment_nbytes, flush.layout_digest, flush.id)
    if (index.rank, index.nbytes, index.layout_digest, index.id) != said:
        raise InvalidInputError("flush and segment index disagree", rank=flush.rank, index_rank=index.rank)
    if digest(layout) != flush.layout_digest:
        raise InvalidInputError("layout set does not match its digest", digest=flush.layout_digest.hex())
    return index, layout


def _confirm(staging: StagingDir, run_key: str, index: disk_pb2.SegmentIndex, ident: CheckpointId) -> Sealed:
    """Accept a second flush of the snapshot that is sealed already; refuse to replace another one."""
    sealed = staging.read_index(run_key, ident, index.rank)
    index.chunks.CopyFrom(sealed.chunks)
    # The time of capture is in the index: two snapshots of one step differ in it.
    if seal_message(Kind.SEGMENT_INDEX, index) != seal_message(Kind.SEGMENT_INDEX, sealed):
        raise RefusedError(
            "another snapshot of this step is sealed already",
            code="already-sealed",
            id=ident,
            rank=index.rank,
        )
    fsync_dir(staging.checkpoint_dir(run_key, ident))  # its writer may have died before this
    return Sealed(ident=ident, rank=index.rank, nbytes=index.nbytes, direct=False)


def _open_alone(tmp: Path) -> DirectFile:
    """Open the unfinished file of a segment, new or a spare, under a lock that tells the live from debris."""
    while True:
        file = DirectFile(tmp, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fd), tmp.stat()):
                    if is_ours_alone(file.fd) or not os.fstat(file.fd).st_size:
                        return file
                    tmp.unlink()  # a spare that somebody still reads
        except BaseException:
            file.close()
            raise
        file.close()  # swept between open and lock, or to be left alone; make a new one


def _remove_quietly(tmp: Path) -> None:
    with contextlib.suppress(OSError):
        tmp.unlink()


def being_written(staging: StagingDir, run_key: str) -> list[Path]:
    """Return the unfinished segments of ``run_key`` whose flusher lives: they will be sealed presently.

    By the kernel's list of locks, not by trying the lock, which would get in the flusher's way. Where that
    list cannot be read, or does not show processes of another container, nothing is found.

    Raises:
        UnavailableError: the staging directory cannot be read.
    """
    found = []
    locked: set[tuple[int, int]] | None = None
    for ident in staging.checkpoints(run_key):
        folder = staging.checkpoint_dir(run_key, ident)
        with os_errors("unfinished segments cannot be looked for", path=folder):
            for path in sorted(folder.glob("segment-*.safetensors.tmp")):
                locked = _locked_files() if locked is None else locked
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if (status.st_dev, status.st_ino) in locked:
                        found.append(path)
    return found


def _locked_files() -> set[tuple[int, int]]:
    """(device, inode) of every file that somebody holds an flock of."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # number: FLOCK ADVISORY WRITE pid major:minor:inode start end
            if len(fields) > 5 and fields[1] == "FLOCK":
                major, minor, inode = fields[5].split(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def sweep_debris(staging: StagingDir, run_key: str) -> int:
    """Remove unfinished segments of ``run_key`` that no living flusher writes; return how many.

    Raises:
        UnavailableError: the staging directory cannot be read.
    """
    removed = 0
    for ident in staging.checkpoints(run_key):
        folder = staging.checkpoint_dir(run_key, ident)
        with os_errors("debris cannot be removed", path=folder):
            removed += sum(_sweep_one(path) for path in folder.glob("segment-*.safetensors.tmp"))
    return removed


def _sweep_one(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
