"""One sealed segment into the store: every chunk verified before it leaves, nothing sent twice."""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from ckpt.digest import DIGEST_NBYTES, digest
from ckpt.errors import CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.base import Store
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import disk_pb2

__all__ = ["Segment", "check_chunk", "upload_segment", "verify_segment_file"]

_log = get_logger("server.upload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Names one rank's segment of one checkpoint on this node."""

    run_key: str
    ident: CheckpointId
    rank: int

    def path(self, staging: StagingDir) -> Path:
        return staging.segment_path(self.run_key, self.ident, self.rank)


def upload_segment(
    store: Store, staging: StagingDir, segment: Segment, *, part_nbytes: int, concurrency: int
) -> bool:
    """Make the segment's object complete in the store, then note that durably (SD2).

    Blocking; memory is one chunk plus the page cache. Idempotent: where the note is missing but the
    object is there in full (the reply or the process was lost), nothing is sent.

    Returns:
        Whether bytes were sent.

    Raises:
        CorruptError: the file does not match its index; names file and chunk.
        NotFoundError: the segment is not (or no longer) here.
        CkptError: whatever the store raises.
    """
    run_key, ident, rank = segment.run_key, segment.ident, segment.rank
    if staging.read_uploaded(run_key, ident, rank) is not None:
        return False
    index = staging.read_index(run_key, ident, rank)
    key = keys.segment_key(ident, rank)
    sent = False
    if not _is_complete(store, key, index):
        path = segment.path(staging)
        verify_segment_file(path, index)
        _send(store, key, path, index.nbytes, part_nbytes=part_nbytes, concurrency=concurrency)
        event(_log, logging.DEBUG, "upload.segment", key=key, nbytes=index.nbytes)
        sent = True
    record = disk_pb2.UploadRecord(object_key=key, nbytes=index.nbytes)
    record.chunks.chunk_nbytes = index.chunks.chunk_nbytes
    record.chunks.digests = index.chunks.digests
    record.chunks.object_keys.append(key)
    staging.mark_uploaded(run_key, ident, rank, record)
    return sent


def verify_segment_file(path: Path, index: disk_pb2.SegmentIndex) -> None:
    """Check size and every chunk's digest. Raises CorruptError naming the chunk, NotFoundError.

    Reads instead of mapping: a bad block of the disk is an error here and a SIGBUS there.
    """
    table = index.chunks
    buffer = bytearray(min(table.chunk_nbytes, max(1, index.nbytes)))
    view = memoryview(buffer)
    with os_errors("a sealed segment cannot be read", path=path), path.open("rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != index.nbytes:
            raise CorruptError(
                "segment has the wrong size", code="size", path=path, nbytes=nbytes, expected=index.nbytes
            )
        for chunk, start in enumerate(range(0, nbytes, table.chunk_nbytes)):
            part = view[: min(table.chunk_nbytes, nbytes - start)]
            _read_full(file.fileno(), part, start, path)
            check_chunk(table, chunk, part, where=str(path))


def check_chunk(table: disk_pb2.ChunkTable, chunk: int, data: memoryview, *, where: str) -> None:
    """Raise CorruptError unless ``data`` are the raw bytes of ``chunk``."""
    expected = table.digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES]
    if digest(data) != expected:
        raise CorruptError(
            "chunk does not match its digest: the bytes are damaged", code="digest", where=where, chunk=chunk
        )


def _read_full(fd: int, part: memoryview, start: int, path: Path) -> None:
    done = 0
    while done < len(part):
        count = os.preadv(fd, [part[done:]], start + done)
        if count == 0:
            raise CorruptError("segment is cut short", code="truncated", path=path, at=start + done)
        done += count


def _is_complete(store: Store, key: str, index: disk_pb2.SegmentIndex) -> bool:
    """Whether our object is there already. Only complete objects are visible (ST1) and the key is this
    attempt's own, so the size would do; the last chunk is read back all the same.
    """
    try:
        found = store.head(key)
    except NotFoundError:
        return False
    if found.nbytes != index.nbytes or index.nbytes == 0:
        return False
    last = (index.nbytes - 1) // index.chunks.chunk_nbytes
    start = last * index.chunks.chunk_nbytes
    try:
        data = store.get_range(key, start, index.nbytes - start)
        check_chunk(index.chunks, last, memoryview(data).cast("B"), where=key)
    except CorruptError as error:
        event(_log, logging.WARNING, "upload.replaced", key=key, error=error)
        return False
    return True


def _send(store: Store, key: str, path: Path, nbytes: int, *, part_nbytes: int, concurrency: int) -> None:
    if nbytes == 0:
        store.put(key, b"")
        return
    with os_errors("a sealed segment cannot be mapped", path=path), path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    # Not closed here: a client that gave up on a part may still hold the view; the mapping goes
    # with the last reference.
    store.put_parts(
        key, [memoryview(mapped)], most_nbytes=nbytes, part_nbytes=part_nbytes, concurrency=concurrency
    )
