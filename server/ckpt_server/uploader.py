"""One sealed segment into the store: what the checkpoint before it holds is borrowed, the rest is sent once.

Every chunk that is sent is read past the page cache, compared with its digest and, where that pays,
compressed, while the parts before it are on their way. The object is completed only after the last chunk was
good.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from ckpt.digest import DIGEST_NBYTES, Buffer, digest
from ckpt.errors import CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.format.chunks import SEALING_NBYTES, StoredChunk, chunk_table, object_extents
from ckpt.format.codec import chunk_codecs, encode_chunk
from ckpt.format.crypt import ChunkKey, encrypt_chunk
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import chunk_range
from ckpt.ops.borrow import secure
from ckpt.storage.base import Store
from ckpt.storage.direct import ChunkReader, aligned_buffer, round_up
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2
from ckpt_server.compression import Compression
from ckpt_server.lending import Lending

__all__ = ["Segment", "Uploaded", "Uploader", "check_chunk", "encoder_threads"]

_log = get_logger("server.upload")

# Chunks of one upload that are read, verified and encoded ahead of the parts that are sent. Four readers
# reached the disk's rate on the development machine where one had two thirds of it.
_AHEAD = 4
_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Names one rank's segment of one checkpoint on this node."""

    run_key: str
    ident: CheckpointId
    rank: int

    def path(self, staging: StagingDir) -> Path:
        return staging.segment_path(self.run_key, self.ident, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """What an upload came to, bytes.

    Attributes:
        nbytes: raw size of the segment.
        sent_nbytes: into the store by this call; 0 where it was there already.
        stored_nbytes: of the segment's own object: compressed, without what is borrowed.
        borrowed_nbytes: raw bytes of chunks that lie in older checkpoints' objects.
    """

    nbytes: int
    sent_nbytes: int
    stored_nbytes: int
    borrowed_nbytes: int


class Uploader:
    """Sends segments; its threads are shared by all runs.

    Memory of one upload: the parts in flight and one being filled, and :data:`_AHEAD` chunks; with
    compression two buffers per encoding thread more.

    Args:
        staging: where the segments are.
        part_nbytes: wanted part size.
        concurrency: parts in flight per segment.
        encoders: threads that compress at once, over all segments.
        key: what chunks are encrypted with; None: they are not.
    """

    def __init__(
        self,
        staging: StagingDir,
        *,
        part_nbytes: int,
        concurrency: int,
        encoders: int,
        key: ChunkKey | None = None,
    ) -> None:
        self._key = key
        self._staging = staging
        self._part_nbytes = part_nbytes
        self._concurrency = concurrency
        self._encoding = threading.BoundedSemaphore(encoders)
        self._threads = ThreadPoolExecutor(max(_AHEAD, encoders), thread_name_prefix="ckpt-upload")
        self._buffers = _Buffers()

    def upload(
        self, store: Store, segment: Segment, *, lending: Lending, compression: Compression, wanted: str
    ) -> Uploaded:
        """Make the segment's chunks complete in the store, then note that durably (SD2).

        Blocking. Idempotent: where the note is missing but the whole segment's object is there (the reply or
        the process was lost), nothing is sent.

        Args:
            store: of the run.
            segment: which.
            lending: knows what the run's segments may borrow.
            compression: decides for the run.
            wanted: "auto", "on" or "off".

        Raises:
            CorruptError: the file does not match its index; names file and chunk.
            NotFoundError: the segment is not (or no longer) here.
            CkptError: whatever the store raises.
        """
        run_key, ident, rank = segment.run_key, segment.ident, segment.rank
        record = self._staging.read_uploaded(run_key, ident, rank)
        if record is not None:
            return _summary(record, sent_nbytes=0)
        index = self._staging.read_index(run_key, ident, rank)
        if not index.chunks.chunk_nbytes and index.nbytes:
            raise CorruptError("segment index has no chunk size", code="chunk-table", rank=rank)
        digests = _digests(index.chunks)
        borrowed = self._borrow(store, segment, index, digests, lending)
        own = _first_of_each(digests, borrowed)
        compressed = compression.choose(wanted) if own else False
        codecs = chunk_codecs(index) if compressed else [disk_pb2.CODEC_RAW] * len(digests)
        key = _own_key(segment, own, codecs, count=len(digests), compressed=compressed, sealed=self._label)
        sent = self._send(
            store,
            segment,
            index,
            own=own,
            codecs=codecs,
            key=key,
            compression=compression,
            sample=wanted == "auto" and compression.wants_samples,
        )
        record = disk_pb2.UploadRecord(object_key=key, nbytes=index.nbytes)
        record.chunks.CopyFrom(
            chunk_table(index.chunks.chunk_nbytes, [sent.chunks.get(x) or borrowed[x] for x in digests])
        )
        self._staging.mark_uploaded(run_key, ident, rank, record)
        return _summary(record, sent_nbytes=sent.nbytes)

    def _borrow(
        self,
        store: Store,
        segment: Segment,
        index: disk_pb2.SegmentIndex,
        digests: Sequence[bytes],
        lending: Lending,
    ) -> Mapping[bytes, StoredChunk]:
        """The chunks that need not be sent, by digest; safe from deletion from here on."""
        lender = lending.lender(store, segment.ident, index)
        if lender is None:
            return {}
        sizes = _sizes(index)
        wanted = [
            x
            for x, size in zip(digests, sizes, strict=True)
            if _fits(lender.chunks.get(x), size, self._label)
        ]
        if not wanted or not secure(store, lender, segment.ident):
            return {}
        return lender.lendable(store, wanted)

    def _send(
        self,
        store: Store,
        segment: Segment,
        index: disk_pb2.SegmentIndex,
        *,
        own: Sequence[int],
        codecs: Sequence[int],
        key: str,
        compression: Compression,
        sample: bool,
    ) -> _Sent:
        sent = _Sent(key, index)
        raw = all(codecs[number] == disk_pb2.CODEC_RAW for number in own)
        as_it_is = raw and self._key is None
        if as_it_is:
            sent.assume_raw(own)
        if index.nbytes and (not own or (as_it_is and _is_complete(store, sent, own))):
            return sent
        sent = _Sent(key, index, self._label)
        path = segment.path(self._staging)
        chunk_nbytes, sizes = index.chunks.chunk_nbytes, _sizes(index)
        with (
            ChunkReader(
                path, nbytes=index.nbytes, chunk_nbytes=chunk_nbytes or 1, root=self._staging.path
            ) as reader,
            self._buffers.in_use(),
            compression.sending(compressed=not raw) as sending,
        ):
            job = _Job(
                reader, index, codecs, str(path), compression, self._encoding, self._buffers, self._key, key
            )
            pieces = job.pieces(self._threads, own, sent, sample=sample)
            try:
                store.put_parts(
                    key,
                    pieces,
                    most_nbytes=sum(sizes[number] + SEALING_NBYTES for number in own),
                    part_nbytes=self._part_nbytes,
                    concurrency=self._concurrency,
                )
            finally:
                pieces.close()
            sending.nbytes = sent.nbytes = sent.end
        event(_log, logging.DEBUG, "upload.segment", key=key, nbytes=sent.nbytes, compressed=not raw)
        return sent

    @property
    def _label(self) -> str:
        return self._key.label if self._key is not None else ""

    def close(self) -> None:
        """Start nothing new; jobs that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Sent:
    """The chunks of the segment's own object, by digest, as they are laid out one after the other."""

    def __init__(self, key: str, index: disk_pb2.SegmentIndex, label: str = "") -> None:
        self.key = key
        self._label = label
        self.chunks: dict[bytes, StoredChunk] = {}
        self.end = 0
        self.nbytes = 0
        self._digests = _digests(index.chunks)
        self._sizes = _sizes(index)

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


class _Buffers:
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
    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        self._buffers._enter(1)

    def __exit__(self, *_: object) -> None:
        self._buffers._enter(-1)


class _Job:
    """Reads, verifies and encodes the chunks of one upload."""

    def __init__(
        self,
        reader: ChunkReader,
        index: disk_pb2.SegmentIndex,
        codecs: Sequence[int],
        where: str,
        compression: Compression,
        encoding: threading.BoundedSemaphore,
        buffers: _Buffers,
        key: ChunkKey | None,
        object_key: str,
    ) -> None:
        self._key = key
        self._run = index.run
        self._object_key = object_key
        self._reader = reader
        self._table = index.chunks
        self._sizes = _sizes(index)
        self._codecs = codecs
        self._where = where
        self._compression = compression
        self._encoding = encoding
        self._buffers = buffers
        self._sampled = chunk_codecs(index)
        self._buffer_nbytes = round_up(min(index.chunks.chunk_nbytes, index.nbytes))

    def pieces(
        self, threads: ThreadPoolExecutor, own: Sequence[int], sent: _Sent, *, sample: bool
    ) -> Generator[Buffer, None, None]:
        """Yield the stored bytes of the chunks ``own``, in order, and note them in ``sent``."""
        flying: deque[tuple[int, Future[tuple[int, Buffer]]]] = deque()
        samples = set(own[:: max(1, len(own) // _SAMPLES)][:_SAMPLES]) if sample else set()
        numbers = iter(own)

        def fill() -> None:
            while len(flying) < _AHEAD and (number := next(numbers, None)) is not None:
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


def _digests(table: disk_pb2.ChunkTable) -> list[bytes]:
    whole = table.digests
    return [whole[i : i + DIGEST_NBYTES] for i in range(0, len(whole), DIGEST_NBYTES)]


def _sizes(index: disk_pb2.SegmentIndex) -> list[int]:
    count = len(index.chunks.digests) // DIGEST_NBYTES
    spans = [chunk_range(i, index.nbytes, index.chunks.chunk_nbytes) for i in range(count)]
    return [stop - start for start, stop in spans]


def _fits(chunk: StoredChunk | None, size: int, label: str) -> bool:
    """Whether a chunk can be borrowed: of another key, or of none, it would not be kept as it should be."""
    return chunk is not None and chunk.raw_nbytes == size and chunk.key == label


def _first_of_each(digests: Sequence[bytes], borrowed: Mapping[bytes, StoredChunk]) -> list[int]:
    """The chunks to send, ascending: of those that are alike, the first."""
    first: dict[bytes, int] = {}
    for number, found in enumerate(digests):
        if found not in borrowed:
            first.setdefault(found, number)
    return sorted(first.values())


def _own_key(
    segment: Segment,
    own: Sequence[int],
    codecs: Sequence[int],
    *,
    count: int,
    compressed: bool,
    sealed: str,
) -> str:
    """Where the own object goes: what is not the segment byte for byte has a name that says what was packed
    how. So two servers that pack one segment differently never replace each other's object.
    """
    key = keys.segment_key(segment.ident, segment.rank)
    if len(own) == count and not compressed and not sealed:
        return key
    recipe = repr((list(own), [codecs[number] for number in own], zstandard.ZSTD_VERSION, sealed)).encode()
    return keys.own_object_key(key, digest(recipe).hex()[:16])


def _summary(record: disk_pb2.UploadRecord, *, sent_nbytes: int) -> Uploaded:
    table = record.chunks
    own = list(table.object_keys).index(record.object_key) if record.object_key in table.object_keys else None
    stored = object_extents(table, record.nbytes).get(record.object_key, 0)
    borrowed = 0
    if table.objects:
        for i, owner in enumerate(table.objects):
            if owner != own:
                start, stop = chunk_range(i, record.nbytes, table.chunk_nbytes)
                borrowed += stop - start
    elif own is None:
        borrowed = record.nbytes
    return Uploaded(
        nbytes=record.nbytes, sent_nbytes=sent_nbytes, stored_nbytes=stored, borrowed_nbytes=borrowed
    )


def _is_complete(store: Store, sent: _Sent, own: Sequence[int]) -> bool:
    """Whether our object is there already. Only complete objects are visible (ST1) and the key is this
    attempt's own, so the size would do; the last chunk is read back all the same.
    """
    try:
        found = store.head(sent.key)
    except NotFoundError:
        return False
    if found.nbytes != sent.end or not own:
        return False
    last = list(sent.chunks.values())[-1]
    try:
        data = store.get_range(sent.key, last.offset, last.nbytes)
        if digest(memoryview(data).cast("B")) == last.digest:
            return True
    except CorruptError as error:
        event(_log, logging.WARNING, "upload.replaced", key=sent.key, error=error)
        return False
    event(_log, logging.WARNING, "upload.replaced", key=sent.key)
    return False
