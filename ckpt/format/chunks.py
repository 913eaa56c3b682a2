"""Where each chunk of a segment is stored: the compact lists of a ChunkTable, spelled out."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.digest import DIGEST_NBYTES
from ckpt.errors import CorruptError
from ckpt.format.keys import require_below
from ckpt.format.segment import chunk_count, chunk_range
from ckpt_proto.v1 import disk_pb2

__all__ = ["StoredChunk", "stored_chunk"]


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
    """

    object_key: str
    offset: int
    nbytes: int
    raw_nbytes: int
    codec: int
    digest: bytes


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
    lists = (table.codecs, table.objects, table.offsets, table.stored_nbytes)
    owner = table.objects[number] if len(table.objects) == count else 0
    if (
        len(table.digests) != count * DIGEST_NBYTES
        or any(len(numbers) not in (0, count) for numbers in lists)
        or owner >= len(table.object_keys)
    ):
        raise CorruptError("chunk table is malformed", code="chunk-table", rank=index.rank, chunk=number)
    return StoredChunk(
        object_key=require_below(table.object_keys[owner]),
        offset=table.offsets[number] if table.offsets else start,
        nbytes=table.stored_nbytes[number] if table.stored_nbytes else stop - start,
        raw_nbytes=stop - start,
        codec=table.codecs[number] if table.codecs else disk_pb2.CODEC_RAW,
        digest=table.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES],
    )
