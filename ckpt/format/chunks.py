"""Where each chunk of a segment is stored: the compact lists of a ChunkTable, spelled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.digest import DIGEST_NBYTES
from ckpt.errors import CorruptError
from ckpt.format.keys import require_below
from ckpt.format.limits import MAX_CHUNK_NBYTES
from ckpt.format.segment import chunk_count, chunk_range
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "SEALING_NBYTES",
    "StoredChunk",
    "check_chunk_table",
    "chunk_table",
    "object_extents",
    "stored_chunk",
    "stored_chunks",
]

CHUNK_ALIGN = 16  # a chunk size is a multiple: no element of any type straddles two chunks
SEALING_NBYTES = 28  # what encryption adds to a chunk: nonce and tag
_OFFSET_MOST = (1 << 62) - 1  # an end computed from it still fits in the 63 bits that stores take


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """One chunk in object storage.

    Attributes:
        object_key: relative to the run's URL.
        offset: of the stored bytes in the object.
        nbytes: stored bytes.
        raw_nbytes: bytes after decoding.
        codec: disk_pb2.Codec number.
        digest: xxh3-128 of the raw bytes.
        key: label of the key it is encrypted under; empty: it is not.
    """

    object_key: str
    offset: int
    nbytes: int
    raw_nbytes: int
    codec: int
    digest: bytes
    key: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the raw bytes themselves are stored."""
        return self.codec == disk_pb2.CODEC_RAW and not self.key and self.nbytes == self.raw_nbytes


def check_chunk_table(index: disk_pb2.SegmentIndex) -> None:
    """Raise CorruptError, code "chunk-table", unless the table has a digest for every chunk.

    After that the number of chunks is bounded by the size of the document.
    """
    table = index.chunks
    size = table.chunk_nbytes
    is_sound = 0 < size <= MAX_CHUNK_NBYTES and size % CHUNK_ALIGN == 0
    if not is_sound or len(table.digests) != chunk_count(index.nbytes, size) * DIGEST_NBYTES:
        raise CorruptError("chunk table is malformed", code="chunk-table", rank=index.rank, chunk_nbytes=size)


def stored_chunk(index: disk_pb2.SegmentIndex, number: int) -> StoredChunk:
    """Return where chunk ``number`` of the segment is in object storage.

    Args:
        index: from a group index (on NVMe the table names no objects).
        number: of the chunk, from 0.

    Raises:
        InvalidInputError: no such chunk.
        CorruptError: code "chunk-table": the table's lists have wrong lengths or numbers.
    """
    table = index.chunks
    start, stop = chunk_range(number, index.nbytes, table.chunk_nbytes)
    count = chunk_count(index.nbytes, table.chunk_nbytes)
    lists = (table.codecs, table.objects, table.offsets, table.stored_nbytes, table.keys)
    key = table.keys[number] if len(table.keys) == count else 0
    most = stop - start + (SEALING_NBYTES if key else 0)
    owner = table.objects[number] if len(table.objects) == count else 0
    if (
        len(table.digests) != count * DIGEST_NBYTES
        or any(len(numbers) not in (0, count) for numbers in lists)
        or owner >= len(table.object_keys)
        or (table.offsets and table.offsets[number] > _OFFSET_MOST)
        or (table.stored_nbytes and table.stored_nbytes[number] > most)
        or key > len(table.key_ids)
    ):
        raise CorruptError("chunk table is malformed", code="chunk-table", rank=index.rank, chunk=number)
    return StoredChunk(
        object_key=require_below(table.object_keys[owner]),
        offset=table.offsets[number] if table.offsets else start,
        nbytes=table.stored_nbytes[number] if table.stored_nbytes else stop - start,
        raw_nbytes=stop - start,
        codec=table.codecs[number] if table.codecs else disk_pb2.CODEC_RAW,
        digest=table.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES],
        key=table.key_ids[key - 1] if key else "",
    )


def stored_chunks(index: disk_pb2.SegmentIndex) -> list[StoredChunk]:
    """Return the place of every chunk. Raises CorruptError where the table does not fit."""
    if not index.chunks.chunk_nbytes:
        raise CorruptError("chunk table is malformed", code="chunk-table", rank=index.rank, chunk=0)
    return [stored_chunk(index, i) for i in range(chunk_count(index.nbytes, index.chunks.chunk_nbytes))]


def chunk_table(chunk_nbytes: int, chunks: Sequence[StoredChunk]) -> disk_pb2.ChunkTable:
    """Return the table of these chunks, in their order; lists that say nothing new are left out."""
    table = disk_pb2.ChunkTable(chunk_nbytes=chunk_nbytes, digests=b"".join(item.digest for item in chunks))
    table.object_keys.extend(dict.fromkeys(item.object_key for item in chunks))
    position = {key: i for i, key in enumerate(table.object_keys)}
    if any(item.codec != disk_pb2.CODEC_RAW for item in chunks):
        table.codecs.extend(item.codec for item in chunks)
    if len(position) > 1:
        table.objects.extend(position[item.object_key] for item in chunks)
    if any(item.offset != i * chunk_nbytes for i, item in enumerate(chunks)):
        table.offsets.extend(item.offset for item in chunks)
    if any(item.nbytes != item.raw_nbytes for item in chunks):
        table.stored_nbytes.extend(item.nbytes for item in chunks)
    if any(item.key for item in chunks):
        table.key_ids.extend(dict.fromkeys(item.key for item in chunks if item.key))
        number = {key: i for i, key in enumerate(table.key_ids, 1)}
        table.keys.extend(number.get(item.key, 0) for item in chunks)
    return table


def object_extents(table: disk_pb2.ChunkTable, nbytes: int) -> dict[str, int]:
    """Return for each object that a table names where the last of its chunks ends in it.

    An object of the segment itself ends there; one of another checkpoint may be longer.

    Args:
        table: as the store has it.
        nbytes: raw size of the segment.

    Raises:
        CorruptError: code "chunk-table": its lists do not fit together.
    """
    count = len(table.digests) // DIGEST_NBYTES
    lists = (table.objects, table.offsets, table.stored_nbytes)
    if any(len(numbers) not in (0, count) for numbers in lists) or (
        count and max(table.objects, default=0) >= len(table.object_keys)
    ):
        raise CorruptError("chunk table is malformed", code="chunk-table", chunks=count)
    if not (table.objects or table.offsets or table.stored_nbytes):
        return dict.fromkeys(table.object_keys, nbytes)
    lists = (table.objects, table.offsets, table.stored_nbytes)
    if any(len(numbers) not in (0, count) for numbers in lists) or any(
        owner >= len(table.object_keys) for owner in table.objects or ((0,) if count else ())
    ):
        raise CorruptError("chunk table is malformed", code="chunk-table")
    ends = [0] * len(table.object_keys)
    for i in range(count):
        start = i * table.chunk_nbytes
        offset = table.offsets[i] if table.offsets else start
        stored = table.stored_nbytes[i] if table.stored_nbytes else min(table.chunk_nbytes, nbytes - start)
        owner = table.objects[i] if table.objects else 0
        ends[owner] = max(ends[owner], offset + stored)
    return dict(zip(table.object_keys, ends, strict=True))
