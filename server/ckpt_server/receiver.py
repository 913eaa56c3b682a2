"""Segments of clients that share no directory with this server: chunks in, the same sealed files out.

That is a rank whose trainer has no NVMe here, and the server of another node that keeps a replica here. Files
while a segment is arriving, beside where it will be sealed:

    segment-00017.index.incoming        the client's index: what is expected; written first
    segment-00017.safetensors.incoming  full size, sparse; chunks are written at their places

Which chunks are already right is remembered in memory and found again after a restart by hashing the
file, so nothing that arrived is sent twice. Repeating any step is harmless.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ckpt.digest import DIGEST_NBYTES, digest
from ckpt.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.format import keys
from ckpt.format.envelope import Kind, open_message
from ckpt.format.ids import CheckpointId
from ckpt.rpc.bulk import FRAME_NBYTES
from ckpt.storage.durable import fsync_dir, write_durably
from ckpt.storage.own_file import open_own
from ckpt.storage.staging import ARRIVING, StagingDir, os_errors
from ckpt_proto.v1 import disk_pb2
from ckpt_server.chunk_source import check_chunk
from ckpt_server.uploader import Segment

__all__ = ["Receiver", "check_offer"]

# Left free beside an arriving segment, bytes: markers and indexes of others must still fit.
_HEADROOM_NBYTES = 64 * 1024 * 1024
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MOST_CHUNK_NBYTES = 64 * 1024 * 1024


class Receiver:
    """Takes segments chunk by chunk. Thread-safe; one stream at a time per segment."""

    def __init__(self, staging: StagingDir) -> None:
        self._staging = staging
        self._lock = threading.Lock()
        self._locks: dict[Segment, threading.Lock] = {}  # guarded by self._lock
        self._present: dict[Segment, set[int]] = {}  # guarded by the segment's lock

    def offer(self, segment: Segment, sealed_index: bytes, layout: bytes) -> list[int]:
        """Take note of a segment that is to come, and return the chunks wanted, ascending.

        Durable before it returns: index and layout. An empty list means that the segment is sealed here.

        Args:
            segment: its name here.
            sealed_index: the sealed index file, envelope included.
            layout: the LayoutSet bytes.

        Raises:
            InvalidInputError: index or layout do not belong to the request or to each other.
            ConflictError: another segment is sealed, or arriving, under the same name.
            UnavailableError: code "no-space".
        """
        index = check_offer(segment, sealed_index, layout)
        self._staging.write_layout(segment.run_key, index.layout_digest, layout)
        with self._holding(segment):
            if self._is_sealed(segment, sealed_index):
                return []
            self._note(segment, sealed_index)
            self._make_room(segment, index)
            return self._finish_if_complete(segment, index)

    def receive(self, segment: Segment, chunks: list[int], frames: Iterator[bytes]) -> list[int]:
        """Write the frames of ``chunks`` and return the chunks still wanted; empty means sealed.

        What arrived and was right before an error or the end of the stream stays.

        Raises:
            NotFoundError: nothing was offered under this name.
            CorruptError: a chunk does not match its digest; it is still wanted.
            InvalidInputError: frames do not fit the chunks announced.
        """
        if any(a >= b for a, b in pairwise(chunks)):
            raise InvalidInputError("the chunks are not ascending", rank=segment.rank)
        with self._holding(segment):
            index = self._expected(segment)
            if index is None:
                return []
            present = self._chunks_here(segment, index)
            with os_errors("an arriving segment cannot be written", path=self._data_path(segment)):
                fd = open_own(self._staging.path, self._data_path(segment), os.O_RDWR)
                try:
                    for chunk in chunks:
                        start, nbytes = _chunk_span(index, chunk)
                        data = _collect(frames, nbytes, chunk)
                        check_chunk(
                            index.chunks, chunk, memoryview(data), where=str(self._data_path(segment))
                        )
                        _write_full(fd, memoryview(data), start)
                        present.add(chunk)
                finally:
                    os.close(fd)
            return self._finish_if_complete(segment, index)

    def _finish_if_complete(self, segment: Segment, index: disk_pb2.SegmentIndex) -> list[int]:
        count = len(index.chunks.digests) // DIGEST_NBYTES
        wanted = sorted(set(range(count)) - self._chunks_here(segment, index))
        if not wanted:
            self._seal(segment)
        return wanted

    def _seal(self, segment: Segment) -> None:
        """Seal order (I1): bytes, rename, then the index; the layout is durable since the offer."""
        data, noted = self._data_path(segment), self._index_path(segment)
        final = segment.path(self._staging)
        with os_errors("an arrived segment cannot be sealed", path=data):
            fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)
            data.rename(final)
            fsync_dir(final.parent)
            self._staging.write_index(segment.run_key, segment.ident, segment.rank, noted.read_bytes())
            noted.unlink(missing_ok=True)  # a crash brings it back; sweep_leftovers takes it then
        self._present.pop(segment, None)

    def _is_sealed(self, segment: Segment, index: bytes) -> bool:
        try:
            sealed = self._staging.read_index_bytes(segment.run_key, segment.ident, segment.rank)
        except NotFoundError:
            return False
        if sealed != index:
            raise ConflictError(
                "this rank has sealed other bytes under this checkpoint already",
                code="sealed-differently",
                checkpoint=segment.ident,
                rank=segment.rank,
            )
        return True

    def _note(self, segment: Segment, index: bytes) -> None:
        path = self._index_path(segment)
        self._staging.make_checkpoint_dir(segment.run_key, segment.ident)
        with os_errors("an arriving segment cannot be noted", path=path):
            if path.is_file() and path.read_bytes() != index:
                # The client captured this step again (it restarted): what arrived so far is of no use.
                self._present.pop(segment, None)
                self._data_path(segment).unlink(missing_ok=True)
            write_durably(path, index)

    def _make_room(self, segment: Segment, index: disk_pb2.SegmentIndex) -> None:
        path = self._data_path(segment)
        if path.is_file() and path.stat().st_size == index.nbytes:
            return
        disk = os.statvfs(path.parent)
        free = disk.f_bavail * disk.f_frsize
        if free < index.nbytes + _HEADROOM_NBYTES:
            raise UnavailableError(
                "no room in the staging directory", code="no-space", free=free, wanted=index.nbytes
            )
        with os_errors("an arriving segment cannot be created", path=path):
            path.unlink(missing_ok=True)
            with path.open("xb") as file:  # a new one, not what a link of that name leads to
                file.truncate(index.nbytes)
        self._present[segment] = set()

    def _chunks_here(self, segment: Segment, index: disk_pb2.SegmentIndex) -> set[int]:
        """The chunks that are right, from memory or, after a restart, by hashing what is there."""
        known = self._present.get(segment)
        if known is None:
            known = _right_chunks(self._data_path(segment), index)
            self._present[segment] = known
        return known

    def _expected(self, segment: Segment) -> disk_pb2.SegmentIndex | None:
        path = self._index_path(segment)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if self._staging.index_path(segment.run_key, segment.ident, segment.rank).is_file():
                return None
            raise NotFoundError(
                "no such segment was offered; send Seal first", checkpoint=segment.ident, rank=segment.rank
            ) from None
        return open_message(Kind.SEGMENT_INDEX, data, disk_pb2.SegmentIndex(), where=str(path))

    def _data_path(self, segment: Segment) -> Path:
        path = segment.path(self._staging)
        return path.with_name(path.name + ARRIVING)

    def _index_path(self, segment: Segment) -> Path:
        path = self._staging.index_path(segment.run_key, segment.ident, segment.rank)
        return path.with_name(path.name + ARRIVING)

    @contextlib.contextmanager
    def _holding(self, segment: Segment) -> Iterator[None]:
        with self._lock:
            lock = self._locks.setdefault(segment, threading.Lock())
        # A broken stream may not have noticed yet that its client is gone; the client comes again.
        if not lock.acquire(timeout=10.0):
            raise UnavailableError(
                "another stream is sending this segment", checkpoint=segment.ident, rank=segment.rank
            )
        try:
            yield
        finally:
            lock.release()


def check_offer(segment: Segment, sealed_index: bytes, layout: bytes) -> disk_pb2.SegmentIndex:
    """Return the index of an offered segment. Raises InvalidInputError where it does not fit the offer."""
    try:
        index = open_message(Kind.SEGMENT_INDEX, sealed_index, disk_pb2.SegmentIndex(), where="request")
    except CorruptError as error:
        raise InvalidInputError("the index is damaged or not an index", code=error.code) from error
    if index.rank != segment.rank or CheckpointId.from_proto(index.id) != segment.ident:
        raise InvalidInputError("the index belongs to another segment", rank=index.rank)
    if index.run_id and _RUN_ID.fullmatch(index.run_id) is None:
        raise InvalidInputError("the index names no run id", rank=index.rank)
    if digest(layout) != index.layout_digest:
        raise InvalidInputError("the layout is not the one the index names", rank=index.rank)
    table = index.chunks
    expected = -(-index.nbytes // table.chunk_nbytes) if table.chunk_nbytes else -1
    if len(table.digests) != expected * DIGEST_NBYTES or table.codecs:
        raise InvalidInputError("the chunk table does not fit the segment", nbytes=index.nbytes)
    if table.chunk_nbytes > _MOST_CHUNK_NBYTES:  # one is held in memory while it arrives
        raise InvalidInputError(
            "the chunks are too large", nbytes=table.chunk_nbytes, most=_MOST_CHUNK_NBYTES
        )
    if keys.parse_local_index_name(keys.local_index_name(segment.rank)) != segment.rank:
        raise InvalidInputError("rank out of range", rank=segment.rank)
    return index


def _chunk_span(index: disk_pb2.SegmentIndex, chunk: int) -> tuple[int, int]:
    start = chunk * index.chunks.chunk_nbytes
    if not 0 <= start < index.nbytes:
        raise InvalidInputError("no such chunk", chunk=chunk)
    return start, min(index.chunks.chunk_nbytes, index.nbytes - start)


def _collect(frames: Iterator[bytes], nbytes: int, chunk: int) -> bytearray:
    data = bytearray()
    while len(data) < nbytes:
        frame = next(frames, None)
        if frame is None:
            raise UnavailableError("the stream ended in the middle of a chunk", code="cut", chunk=chunk)
        if not 0 < len(frame) <= FRAME_NBYTES:  # empty ones could come for ever
            raise InvalidInputError("a frame has 1 byte to 1 MiB", chunk=chunk, nbytes=len(frame))
        data += frame
    if len(data) > nbytes:
        raise InvalidInputError("a frame crosses the end of its chunk", chunk=chunk)
    return data


def _write_full(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], start + done)


def _right_chunks(path: Path, index: disk_pb2.SegmentIndex) -> set[int]:
    found: set[int] = set()
    table = index.chunks
    with os_errors("an arriving segment cannot be read", path=path), path.open("rb") as file:
        for chunk in range(len(table.digests) // DIGEST_NBYTES):
            data = file.read(table.chunk_nbytes)
            if digest(data) == table.digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES]:
                found.add(chunk)
    return found
