"""The group indexes of a committed checkpoint: read whole, and made again where they are damaged or gone.

The same sealed segments give the same bytes (I13), so a group index can be made again from the segment
indexes that nodes keep, and the manifest's digest tells whether it is the one that was committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key, segment_key
from ckpt.format.manifest import (
    GroupIndex,
    encode_group_index,
    group_header,
    groups_digest,
    open_segment_index,
    parse_group_index,
)
from ckpt.ops.copies import Copies
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Groups", "find_groups", "read_all_groups"]


@dataclass(slots=True)
class Groups:
    """The group indexes as they were committed.

    Attributes:
        data: the bytes, by key.
        indexes: of every segment.
        summaries: of every segment, in the same order.
        damaged: by key, the code of what is wrong with the object in the store.
    """

    data: dict[str, bytes] = field(default_factory=dict)
    indexes: list[disk_pb2.SegmentIndex] = field(default_factory=list)
    summaries: list[disk_pb2.SegmentSummary] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Whole:
    group: GroupIndex
    data: bytes
    indexes: list[disk_pb2.SegmentIndex]


def find_groups(
    store: Store, manifest: disk_pb2.Manifest, copies: Copies
) -> tuple[Groups | None, list[CorruptError]]:
    """Return the group indexes that ``manifest`` committed, from the store or made again from copies.

    Puts nothing. Returns (None, problems) where the committed ones cannot be had.
    """
    ident = CheckpointId.from_proto(manifest.id)
    found: dict[int, _Whole] = {}
    problems: dict[int, CorruptError] = {}
    for number in range(manifest.group_count):
        key = group_key(ident, number, manifest.group_count)
        try:
            found[number] = _read_whole(store, key)
        except NotFoundError:
            problems[number] = CorruptError("group index is not in the store", code="missing", key=key)
        except CorruptError as error:
            error.context.setdefault("key", key)
            problems[number] = error
    if not problems and _is_committed(manifest, found):
        return _joined(manifest, found, {}), []
    made = _make_again(manifest, copies)
    for chosen in _choices(found, made, manifest.group_count):
        if _is_committed(manifest, chosen):
            damaged = {
                number: "groups-digest" for number in chosen if chosen[number] is not found.get(number)
            }
            damaged |= {number: problem.code for number, problem in problems.items()}
            return _joined(manifest, chosen, damaged), []
    left = list(problems.values()) or [
        CorruptError(
            "group indexes are not those that were committed", code="groups-digest", checkpoint=ident
        )
    ]
    for one in left:
        one.context.setdefault("repair", "no node that was asked has all segments of the group")
    return None, left


def read_all_groups(store: Store, manifest: disk_pb2.Manifest) -> Iterator[disk_pb2.SegmentIndex]:
    """Yield every segment index of a checkpoint. Raises CorruptError where one is damaged or gone."""
    ident = CheckpointId.from_proto(manifest.id)
    for number in range(manifest.group_count):
        key = group_key(ident, number, manifest.group_count)
        try:
            yield from _read_whole(store, key).indexes
        except NotFoundError as error:
            raise CorruptError("group index is not in the store", code="missing", key=key) from error


def _read_whole(store: Store, key: str) -> _Whole:
    return _parse_whole(store.get(key), key)


def _parse_whole(data: bytes, key: str) -> _Whole:
    group = parse_group_index(data, key=key)
    header = group.header
    named = group_key(CheckpointId.from_proto(header.id), header.group.index, header.group.count)
    if named != key:
        raise CorruptError("group index lies under a wrong key", code="identity", key=key, found=named)
    if group.nbytes != len(data):
        raise CorruptError(
            "group index has the wrong size",
            code="truncated",
            key=key,
            nbytes=len(data),
            expected=group.nbytes,
        )
    bodies = memoryview(data)[group.header_nbytes :]
    indexes = [
        open_segment_index(bodies[item.index_offset :][: item.index_nbytes], item, key=key)
        for item in header.segments
    ]
    return _Whole(group, data, indexes)


def _is_committed(manifest: disk_pb2.Manifest, groups: dict[int, _Whole]) -> bool:
    numbers = range(manifest.group_count)
    return all(number in groups for number in numbers) and (
        groups_digest(groups[number].group for number in numbers) == manifest.groups_digest
    )


def _joined(manifest: disk_pb2.Manifest, groups: dict[int, _Whole], damaged: dict[int, str]) -> Groups:
    joined = Groups()
    for number in range(manifest.group_count):
        one = groups[number]
        joined.data[one.group.key] = one.data
        joined.indexes += one.indexes
        joined.summaries += one.group.header.segments
        if number in damaged:
            joined.damaged[one.group.key] = damaged[number]
    return joined


def _choices(found: dict[int, _Whole], made: dict[int, _Whole], count: int) -> Iterator[dict[int, _Whole]]:
    """What the committed ones may be: those of the store with as few as possible replaced."""
    base = {**made, **found}  # the store's where it can be read
    if len(base) < count:
        return
    yield base
    others = [number for number in found if number in made and made[number].data != found[number].data]
    for number in others:
        yield {**base, number: made[number]}
    if len(others) > 1:
        yield {**found, **made}


def _make_again(manifest: disk_pb2.Manifest, copies: Copies) -> dict[int, _Whole]:
    """Every group index that the copies give."""
    ident = CheckpointId.from_proto(manifest.id)
    members: dict[int, dict[int, disk_pb2.SegmentIndex]] = {}
    for rank in range(manifest.world_size):
        index = _published(copies, ident, rank)
        if index is not None:
            members.setdefault(index.group.index, {})[rank] = index
    made = {}
    for number, segments in members.items():
        whole = _encode(ident, manifest.group_count, number, (segments[rank] for rank in sorted(segments)))
        if whole is not None:
            made[number] = whole
    return made


def _encode(
    ident: CheckpointId, count: int, number: int, segments: Iterable[disk_pb2.SegmentIndex]
) -> _Whole | None:
    listed = list(segments)
    try:
        data = encode_group_index(group_header(listed), listed)
        return _parse_whole(data, group_key(ident, number, count))
    except (InvalidInputError, CorruptError):  # not all ranks of the group, or segments that do not belong
        return None


def _published(copies: Copies, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex | None:
    """A sealed index with its chunk table as the store has it, as far as the copies tell."""
    for tier in copies.tiers(ident):
        index = tier.index(ident, rank)
        if index is None:
            continue
        record = copies.record(ident, rank)
        if record is not None and record.chunks.digests == index.chunks.digests:
            index.chunks.CopyFrom(record.chunks)
        else:  # the plain way: its own object, byte for byte
            del index.chunks.object_keys[:]
            index.chunks.object_keys.append(segment_key(ident, rank))
        return index
    return None
