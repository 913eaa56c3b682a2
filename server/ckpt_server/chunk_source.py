"""Chunks of one upload: read past the page cache, verified, compressed and encrypted ahead of the parts."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from ckpt.digest import DIGEST_NBYTES, Buffer, digest
from ckpt.errors import CorruptError
from ckpt.format.chunks import StoredChunk
from ckpt.format.codec import chunk_codecs, encode_chunk
from ckpt.format.crypt import ChunkKey, encrypt_chunk
from ckpt.format.segment import chunk_range
from ckpt.storage.direct import ChunkReader, aligned_buffer, round_up
from ckpt_proto.v1 import disk_pb2
from ckpt_server.compression import Compression

__all__ = [
    "AHEAD",
    "ChunkBuffers",
    "ChunkSource",
    "Sent",
    "check_chunk",
    "chunk_digests",
    "chunk_sizes",
    "encoder_threads",
]

# Chunks of one upload that are read, verified and encoded ahead of the parts that are sent. Four readers
# reached the disk's rate on the development machine where one had two thirds of it.
AHEAD = 4
_SAMPLES = 2


class Sent:
    """The chunks of the segment's own object, by digest, as they are laid out one after the other."""

    def __init__(self, key: str, index: disk_pb2.SegmentIndex, label: str = "") -> None:
        self.key = key
        self._label = label
        self.chunks: dict[bytes, StoredChunk] = {}
        self.end = 0
        self.nbytes = 0
        self._digests = chunk_digests(index.chunks)
        self._sizes = chunk_sizes(index)

    def add(self, number: int, codec: int, nbytes: int) -> None:
        self.chunks[self._digests[number]] = StoredChunk(
            object_key=self.key,
            offset=self.end,
            nbytes=nbytes,
            raw_nbytes=self._sizes[number],
            codec=codec,
            digest=self._digests[number],
            key=self._label,
        )
        self.end += nbytes

    def assume_raw(self, own: Sequence[int]) -> None:
        for number in own:
            self.add(number, disk_pb2.CODEC_RAW, self._sizes[number])


class ChunkBuffers:
    """Chunk buffers that are used again as soon as nobody refers to the bytes, and freed when no upload runs.

    Memory that was never touched costs more than the read itself (a page fault per 4 KiB).
    """

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()  # its put may run in a destructor
        self._lock = threading.Lock()
        self._users = 0  # guarded by self._lock

    def take(self, nbytes: int) -> memoryview:
        """Return a page-aligned buffer of at least ``nbytes`` bytes."""
        try:
            found = self._free.get_nowait()
        except queue.Empty:
            return aligned_buffer(nbytes)
        return found if len(found) >= nbytes else aligned_buffer(nbytes)

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back. Safe in a destructor, on any thread."""
        if self._users:
            self._free.put(buffer)

    def lend(self, buffer: memoryview, nbytes: int) -> memoryview:
        """Return a view of the first bytes; the buffer is free again when the last view of them is gone."""
        # Views of one exporter share it, so its end is the end of them all; a view's own end is not.
        exporter = np.frombuffer(buffer, np.uint8, nbytes)
        weakref.finalize(exporter, self.give, buffer).atexit = False
        return exporter.data

    def in_use(self) -> _InUse:
        """Around an upload: buffers are kept while one runs."""
        return _InUse(self)

    def _enter(self, change: int) -> None:
        with self._lock:
            self._users += change
            if self._users:
                return
        while True:
            try:
                self._free.get_nowait()
            except queue.Empty:
                return


class _InUse:
    def __init__(self, buffers: ChunkBuffers) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        self._buffers._enter(1)

    def __exit__(self, *_: object) -> None:
        self._buffers._enter(-1)


class ChunkSource:
    """Reads, verifies and encodes the chunks of one upload."""

    def __init__(
        self,
        reader: ChunkReader,
        index: disk_pb2.SegmentIndex,
        codecs: Sequence[int],
        where: str,
        compression: Compression,
        encoding: threading.BoundedSemaphore,
        buffers: ChunkBuffers,
        key: ChunkKey | None,
        object_key: str,
    ) -> None:
        self._key = key
        self._run = index.run
        self._object_key = object_key
        self._reader = reader
        self._table = index.chunks
        self._sizes = chunk_sizes(index)
        self._codecs = codecs
        self._where = where
        self._compression = compression
        self._encoding = encoding
        self._buffers = buffers
        self._sampled = chunk_codecs(index)
        self._buffer_nbytes = round_up(min(index.chunks.chunk_nbytes, index.nbytes))

    def pieces(
        self, threads: ThreadPoolExecutor, own: Sequence[int], sent: Sent, *, sample: bool
    ) -> Generator[Buffer, None, None]:
        """Yield the stored bytes of the chunks ``own``, in order, and note them in ``sent``."""
        flying: deque[tuple[int, Future[tuple[int, Buffer]]]] = deque()
        samples = set(own[:: max(1, len(own) // _SAMPLES)][:_SAMPLES]) if sample else set()
        numbers = iter(own)

        def fill() -> None:
            while len(flying) < AHEAD and (number := next(numbers, None)) is not None:
                flying.append((number, threads.submit(self._stored, number, sample=number in samples)))

        try:
            fill()
            while flying:
                number, future = flying.popleft()
                codec, stored = future.result()
                fill()
                sent.add(number, codec, len(stored))
                yield stored
                del stored, future  # or the last piece would be kept while the next is waited for
        finally:
            for _, future in flying:
                future.cancel()
            wait([future for _, future in flying])

    def _stored(self, number: int, *, sample: bool) -> tuple[int, Buffer]:
        codec, encoded = self._encode(number, sample=sample)
        if self._key is None:
            return codec, encoded
        with self._encoding:
            sealed = encrypt_chunk(
                self._key,
                encoded,
                run=self._run,
                object_key=self._object_key,
                codec=codec,
                raw_nbytes=self._sizes[number],
                digest=self._table.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES],
            )
        return codec, sealed

    def _encode(self, number: int, *, sample: bool) -> tuple[int, Buffer]:
        size = self._sizes[number]
        buffer = self._buffers.take(self._buffer_nbytes)
        view = self._reader.read(number, buffer)
        check_chunk(self._table, number, view, where=self._where)
        wanted = self._codecs[number]
        if wanted != disk_pb2.CODEC_RAW:
            codec, stored = self._timed(wanted, view)
            if codec != disk_pb2.CODEC_RAW:
                self._buffers.give(buffer)
                return codec, stored
        elif sample:
            self._timed(self._sampled[number], view)
        return disk_pb2.CODEC_RAW, self._buffers.lend(buffer, size)

    def _timed(self, codec: int, view: memoryview) -> tuple[int, Buffer]:
        with self._encoding:
            began = time.perf_counter()
            found, stored = encode_chunk(codec, view)
            seconds = time.perf_counter() - began
        self._compression.encoded(raw_nbytes=len(view), stored_nbytes=len(stored), seconds=seconds)
        return found, stored


def check_chunk(table: disk_pb2.ChunkTable, chunk: int, data: memoryview, *, where: str) -> None:
    """Raise CorruptError unless ``data`` are the raw bytes of ``chunk``."""
    expected = table.digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES]
    if digest(data) != expected:
        raise CorruptError(
            "chunk does not match its digest: the bytes are damaged", code="digest", where=where, chunk=chunk
        )


def encoder_threads() -> int:
    """Return how many threads may compress at once: half the CPUs this process may use, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def chunk_digests(table: disk_pb2.ChunkTable) -> list[bytes]:
    """Return the digest of every chunk."""
    whole = table.digests
    return [whole[i : i + DIGEST_NBYTES] for i in range(0, len(whole), DIGEST_NBYTES)]


def chunk_sizes(index: disk_pb2.SegmentIndex) -> list[int]:
    """Return the raw size of every chunk."""
    count = len(index.chunks.digests) // DIGEST_NBYTES
    spans = [chunk_range(i, index.nbytes, index.chunks.chunk_nbytes) for i in range(count)]
    return [stop - start for start, stop in spans]
