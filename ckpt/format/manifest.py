"""Group indexes and manifests: their bytes, and how to read just the part that is needed.

A group index is ``envelope(GroupHeader)`` followed by the SegmentIndex messages of the group, bare; the
header says where each lies and what its digest is. So a commit of 512 groups reads 512 headers of a few KB,
and a restore reads only the segment indexes it needs.

Writing the same segments twice gives the same bytes (``written_at`` is the time of the last capture, not of
the writing), so that two servers, or one server restarted, may put a group index again without changing
what a manifest's ``groups_digest`` stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ckpt.digest import DIGEST_NBYTES, Buffer, digest, digest_many
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.chunks import object_extents
from ckpt.format.envelope import HEAD_NBYTES, Kind, open_envelope, open_message, seal_message
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import checkpoint_of_data_key, own_object_key, pack_of, segment_key
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "GroupIndex",
    "encode_group_index",
    "encode_manifest",
    "group_header",
    "groups_digest",
    "open_manifest",
    "open_segment_index",
    "parse_group_index",
    "reference_ids",
    "single_header",
    "stored_nbytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIndex:
    """The header of a group index that was read.

    Attributes:
        key: object key, for errors.
        header: the message.
        header_nbytes: size of its envelope; segment indexes are counted from here.
        digest: of the envelope, as its last 16 bytes have it.
    """

    key: str
    header: disk_pb2.GroupHeader
    header_nbytes: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Size the whole object must have: its last segment index ends it (G3 says that they are packed)."""
        if not self.header.segments:
            return self.header_nbytes
        last = self.header.segments[-1]
        return self.header_nbytes + last.index_offset + last.index_nbytes

    def summary(self, rank: int) -> disk_pb2.SegmentSummary | None:
        """Return the summary of ``rank``, or None where the group does not have it."""
        return next((segment for segment in self.header.segments if segment.rank == rank), None)


def group_header(segments: Sequence[disk_pb2.SegmentIndex]) -> disk_pb2.GroupHeader:
    """Return the header (without offsets and index digests) of the group that ``segments`` make up.

    Args:
        segments: one per rank of the group, with the chunk tables as the store has them.

    Raises:
        InvalidInputError: code "group": they are not the segments of one group of one checkpoint.
    """
    if not segments:
        raise InvalidInputError("a group has at least one segment", code="group")
    first = segments[0]
    header = _empty_header(first)
    header.written_at = max(segment.captured_at for segment in segments)
    for segment in segments:
        if _identity(segment) != _identity(first):
            raise InvalidInputError(
                "segments of different checkpoints or groups", code="group", ranks=(first.rank, segment.rank)
            )
        header.segments.append(_summary(segment))
    ranks = [segment.rank for segment in segments]
    if ranks != list(first.group.ranks):
        raise InvalidInputError(
            "segments are not those of the group, ascending",
            code="group",
            ranks=ranks,
            group=first.group.index,
        )
    return header


def single_header(segment: disk_pb2.SegmentIndex, *, index_digest: bytes) -> disk_pb2.GroupHeader:
    """Return the header of a segment's group with the summary of this segment alone.

    Args:
        segment: the index.
        index_digest: goes into the summary, as given.
    """
    header = _empty_header(segment)
    header.segments.append(_summary(segment))
    header.segments[0].index_digest = index_digest
    header.segments[0].ClearField("stored_nbytes")  # a sealed index says nothing of objects in the store
    return header


def _empty_header(segment: disk_pb2.SegmentIndex) -> disk_pb2.GroupHeader:
    header = disk_pb2.GroupHeader(
        run=segment.run,
        id=segment.id,
        group=segment.group,
        world_size=segment.world_size,
        written_at=segment.captured_at,
        environment=segment.environment,
        run_id=segment.run_id,
    )
    if segment.HasField("parent"):
        header.parent.CopyFrom(segment.parent)
    return header


def _identity(segment: disk_pb2.SegmentIndex) -> tuple[object, ...]:
    parent = CheckpointId.from_proto(segment.parent) if segment.HasField("parent") else None
    group = segment.group
    ident = (segment.run, segment.run_id, segment.id.step, segment.id.attempt, segment.world_size, parent)
    return (*ident, group.index, group.count, tuple(group.ranks))


def _summary(segment: disk_pb2.SegmentIndex) -> disk_pb2.SegmentSummary:
    ident = CheckpointId.from_proto(segment.id)
    summary = disk_pb2.SegmentSummary(
        rank=segment.rank,
        object_key=segment_key(ident, segment.rank),
        nbytes=segment.nbytes,
        layout_digest=segment.layout_digest,
        has_explicit_boxes=any(tensor.boxes for tensor in segment.tensors),
    )
    if segment.HasField("state"):
        summary.state_digest = digest(segment.state.SerializeToString(deterministic=True))
    if segment.HasField("audit"):
        summary.audit.CopyFrom(segment.audit)
    summary.references.extend(other.to_proto() for other in reference_ids(segment.chunks, ident))
    own = [key for key in segment.chunks.object_keys if checkpoint_of_data_key(key) == ident]
    if len(own) > 1:
        raise CorruptError("a segment has more than one object", code="object-key", rank=segment.rank)
    stored = object_extents(segment.chunks, segment.nbytes)[own[0]] if own else 0
    if stored != segment.nbytes:
        summary.stored_nbytes = stored
    summary.pack = pack_of(own[0]) if own else ""
    if own and own[0] != own_object_key(summary.object_key, summary.pack):
        raise CorruptError("chunk table names another rank's object", code="object-key", key=own[0])
    return summary


def stored_nbytes(message: disk_pb2.SegmentSummary | disk_pb2.Manifest) -> int:
    """Return what a segment or checkpoint takes in the store: compressed, without what it borrows."""
    return message.stored_nbytes if message.HasField("stored_nbytes") else message.nbytes


def reference_ids(chunks: disk_pb2.ChunkTable, ident: CheckpointId) -> list[CheckpointId]:
    """Return the other checkpoints whose objects hold chunks of this table, ascending.

    Raises:
        CorruptError: code "object-key": a key is not one of a segment.
    """
    found = set()
    for key in chunks.object_keys:
        owner = checkpoint_of_data_key(key)
        if owner is None:
            raise CorruptError("chunk table names an object that is no segment", code="object-key", key=key)
        if owner != ident:
            found.add(owner)
    return sorted(found)


def encode_group_index(header: disk_pb2.GroupHeader, segments: Sequence[disk_pb2.SegmentIndex]) -> bytes:
    """Return the bytes of a group index.

    Args:
        header: from :func:`group_header`; offsets, sizes and digests of the indexes are filled in here.
        segments: in the order of ``header.segments``.
    """
    bodies = [segment.SerializeToString(deterministic=True) for segment in segments]
    offset = 0
    for summary, body in zip(header.segments, bodies, strict=True):
        summary.index_offset = offset
        summary.index_nbytes = len(body)
        summary.index_digest = digest(body)
        offset += len(body)
    return b"".join((seal_message(Kind.GROUP_INDEX, header), *bodies))


def parse_group_index(data: Buffer, *, key: str) -> GroupIndex:
    """Parse the header at the start of ``data`` (at least the whole header envelope). Raises CorruptError."""
    payload = open_envelope(Kind.GROUP_INDEX, data, where=key, more=True)
    try:
        header = disk_pb2.GroupHeader.FromString(bytes(payload))
    except DecodeError as error:
        raise CorruptError("payload is not the expected message", code="decode", where=key) from error
    end = HEAD_NBYTES + len(payload)
    nbytes = end + DIGEST_NBYTES
    return GroupIndex(
        key=key, header=header, header_nbytes=nbytes, digest=bytes(memoryview(data)[end:nbytes])
    )


def open_segment_index(data: Buffer, summary: disk_pb2.SegmentSummary, *, key: str) -> disk_pb2.SegmentIndex:
    """Parse the segment index that ``summary`` describes. Raises CorruptError where it is another one."""
    if digest(data) != summary.index_digest:
        raise CorruptError(
            "digest does not match: the segment index is damaged", code="digest", key=key, rank=summary.rank
        )
    index = disk_pb2.SegmentIndex()
    try:
        index.ParseFromString(bytes(data))
    except DecodeError as error:
        raise CorruptError(
            "segment index is not the expected message", code="decode", key=key, rank=summary.rank
        ) from error
    if (index.rank, index.nbytes) != (summary.rank, summary.nbytes):
        raise CorruptError(
            "segment index belongs to another segment", code="identity", key=key, rank=summary.rank
        )
    return index


def groups_digest(groups: Iterable[GroupIndex]) -> bytes:
    """Return the digest that ties a manifest to its group indexes, given in the order of their index."""
    return digest_many(group.digest for group in groups)


def encode_manifest(manifest: disk_pb2.Manifest) -> bytes:
    """Return the bytes of a manifest object."""
    return seal_message(Kind.MANIFEST, manifest)


def open_manifest(data: Buffer, ident: CheckpointId, *, key: str) -> disk_pb2.Manifest:
    """Parse a manifest and check that it is the one of ``ident``. Raises CorruptError."""
    manifest = open_message(Kind.MANIFEST, data, disk_pb2.Manifest(), where=key)
    if (manifest.id.step, manifest.id.attempt) != (ident.step, ident.attempt):
        raise CorruptError(
            "manifest belongs to another checkpoint",
            code="identity",
            key=key,
            found=f"step {manifest.id.step}, attempt {manifest.id.attempt}",
        )
    return manifest
