"""All ranks of the group uploaded: layouts and group index into the store, then the commit."""

from __future__ import annotations

from ckpt.errors import CorruptError, NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key
from ckpt.format.manifest import group_header
from ckpt.ops.groups import put_encoded_layout, put_group_index, read_group_header
from ckpt.storage.base import Store
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import common_pb2, disk_pb2

__all__ = ["publish_group"]


def publish_group(
    store: Store, staging: StagingDir, run_key: str, ident: CheckpointId, group: common_pb2.NodeGroup
) -> list[disk_pb2.SegmentIndex]:
    """Put the layouts, then the group index. Idempotent: the same files give the same bytes.

    Every rank's segment must be uploaded (SD2); so a group index names complete objects only.

    Returns:
        The segment indexes as published.

    Raises:
        CorruptError: a local file is damaged.
        NotFoundError: a local file is missing.
        CkptError: whatever the store raises.
    """
    segments = [_published_index(staging, run_key, ident, rank) for rank in sorted(group.ranks)]
    for layout_digest in sorted({segment.layout_digest for segment in segments}):
        put_encoded_layout(store, layout_digest, staging.layout(run_key, layout_digest))
    if not _is_published(store, segments):
        put_group_index(store, segments)
    return segments


def _is_published(store: Store, segments: list[disk_pb2.SegmentIndex]) -> bool:
    """Whether a group index of these very segments is there, with their objects packed in whatever way.

    Another node may have published in our place while we were cut off, and a manifest depend on it (I6).
    """
    header = group_header(segments)
    key = group_key(CheckpointId.from_proto(header.id), header.group.index, header.group.count)
    try:
        there = read_group_header(store, key).header
    except (NotFoundError, CorruptError):
        return False

    def content(of: disk_pb2.GroupHeader) -> list[tuple[int, int, bytes, bytes]]:
        return [(one.rank, one.nbytes, one.layout_digest, one.state_digest) for one in of.segments]

    return there.group == header.group and content(there) == content(header)


def _published_index(
    staging: StagingDir, run_key: str, ident: CheckpointId, rank: int
) -> disk_pb2.SegmentIndex:
    """The sealed index, its chunk table now pointing into the store."""
    index = staging.read_index(run_key, ident, rank)
    record = staging.read_uploaded(run_key, ident, rank)
    if record is None:
        raise NotFoundError("segment has no upload record", run=run_key, checkpoint=ident, rank=rank)
    if record.nbytes != index.nbytes or record.chunks.digests != index.chunks.digests:
        raise CorruptError(
            "a segment was sealed again after its upload; its step cannot be committed",
            code="resealed",
            checkpoint=ident,
            rank=rank,
        )
    index.chunks.CopyFrom(record.chunks)
    return index
