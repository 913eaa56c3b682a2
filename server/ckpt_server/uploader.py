"""One sealed segment into the store: what the checkpoint before it holds is borrowed, the rest is sent once.

Every chunk that is sent is read past the page cache, compared with its digest and, where that pays,
compressed, while the parts before it are on their way. The object is completed only after the last chunk was
good.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import zstandard

from ckpt.digest import digest
from ckpt.errors import CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.format.chunks import SEALING_NBYTES, StoredChunk, chunk_table, object_extents
from ckpt.format.codec import chunk_codecs
from ckpt.format.crypt import ChunkKey
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import chunk_range
from ckpt.ops.borrow import secure
from ckpt.storage.base import Store
from ckpt.storage.direct import ChunkReader
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2
from ckpt_server.chunk_source import AHEAD, ChunkBuffers, ChunkSource, Sent, chunk_digests, chunk_sizes
from ckpt_server.compression import Compression
from ckpt_server.lending import Lending

__all__ = ["Segment", "Uploaded", "Uploader"]

_log = get_logger("server.upload")


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

    Memory of one upload: the parts in flight and one being filled, and :data:`AHEAD` chunks; with
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
        self._threads = ThreadPoolExecutor(max(AHEAD, encoders), thread_name_prefix="ckpt-upload")
        self._buffers = ChunkBuffers()

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
        digests = chunk_digests(index.chunks)
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
        sizes = chunk_sizes(index)
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
    ) -> Sent:
        sent = Sent(key, index)
        raw = all(codecs[number] == disk_pb2.CODEC_RAW for number in own)
        as_it_is = raw and self._key is None
        if as_it_is:
            sent.assume_raw(own)
        if index.nbytes and (not own or (as_it_is and _is_complete(store, sent, own))):
            return sent
        sent = Sent(key, index, self._label)
        path = segment.path(self._staging)
        chunk_nbytes, sizes = index.chunks.chunk_nbytes, chunk_sizes(index)
        with (
            ChunkReader(
                path, nbytes=index.nbytes, chunk_nbytes=chunk_nbytes or 1, root=self._staging.path
            ) as reader,
            self._buffers.in_use(),
            compression.sending(compressed=not raw) as sending,
        ):
            job = ChunkSource(
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


def _is_complete(store: Store, sent: Sent, own: Sequence[int]) -> bool:
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
