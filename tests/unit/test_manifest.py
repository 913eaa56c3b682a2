"""Group indexes and manifests: bytes, partial reads and what damage is noticed."""

from __future__ import annotations

import pytest

from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key, segment_key
from ckpt.format.manifest import (
    encode_group_index,
    encode_manifest,
    group_header,
    groups_digest,
    open_manifest,
    open_segment_index,
    parse_group_index,
    reference_ids,
)
from ckpt.ops.groups import list_groups, read_group_header, read_segment_index
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import Built, CountingStore, build_checkpoint, memory_store

IDENT = CheckpointId(10, 1)


def segments_of(built: Built) -> list[disk_pb2.SegmentIndex]:
    return [built.segments[rank] for rank in sorted(built.segments)]


def build_group(world_size: int = 3) -> tuple[CountingStore, Built, str]:
    store = CountingStore(memory_store())
    built = build_checkpoint(store, 10, world_size=world_size, group_size=world_size)
    store.reset()
    return store, built, group_key(built.ident, 0, 1)


def test_the_same_segments_give_the_same_bytes() -> None:
    _, built, _ = build_group()
    first = encode_group_index(group_header(segments_of(built)), segments_of(built))
    copies = [disk_pb2.SegmentIndex.FromString(s.SerializeToString()) for s in segments_of(built)]
    assert encode_group_index(group_header(copies), copies) == first


def test_a_header_is_read_alone_and_each_index_by_its_range() -> None:
    store, built, key = build_group()
    group = read_group_header(store, key)
    assert dict(store.requests) == {"head": 1, "get_range": 1}
    assert read_segment_index(store, group, 2) == built.segments[2]
    assert store.requests["get_range"] == 2
    assert group.nbytes == store.head(key).nbytes
    assert [segment.object_key for segment in group.header.segments] == [
        segment_key(built.ident, rank) for rank in range(3)
    ]


def test_a_header_longer_than_the_first_read_takes_one_more() -> None:
    store, built, key = build_group()
    segments = segments_of(built)
    for segment in segments:
        segment.environment["note"] = "x" * 100_000
    store.put(key, encode_group_index(group_header(segments), segments))
    store.reset()
    group = read_group_header(store, key, nbytes=store.inner.head(key).nbytes)
    assert dict(store.requests) == {"get_range": 2}
    assert read_segment_index(store, group, 1) == segments[1]


def test_segments_that_do_not_make_a_group_are_refused() -> None:
    _, built, _ = build_group()
    _, stranger, _ = build_group(world_size=4)
    whole = segments_of(built)
    for wrong in ([], whole[:2], whole[::-1], [whole[0], whole[1], stranger.segments[2]]):
        with pytest.raises(InvalidInputError) as caught:
            group_header(wrong)
        assert caught.value.code == "group"


def test_references_are_the_other_checkpoints_whose_objects_are_used() -> None:
    older, oldest = CheckpointId(5, 1), CheckpointId(7, 1)
    keys = [segment_key(ident, 0) for ident in (IDENT, oldest, older, older)]
    table = disk_pb2.ChunkTable(object_keys=keys)
    assert reference_ids(table, IDENT) == [older, oldest]
    with pytest.raises(CorruptError) as caught:
        reference_ids(disk_pb2.ChunkTable(object_keys=["../elsewhere"]), IDENT)
    assert caught.value.code == "object-key"


def read_all(store: CountingStore, key: str) -> list[disk_pb2.SegmentIndex]:
    group = read_group_header(store, key)
    return [read_segment_index(store, group, segment.rank) for segment in group.header.segments]


def test_every_flipped_byte_of_a_group_index_is_noticed_by_whoever_reads_it() -> None:
    store, _, key = build_group(world_size=2)
    good = store.get(key)
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 0x20
        store.put(key, bad)
        with pytest.raises(CorruptError):
            read_all(store, key)


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 100, -1])
def test_a_cut_or_grown_group_index_is_noticed_without_reading_its_end(cut: int) -> None:
    store, _, key = build_group()
    good = store.get(key)
    for bad in (good[:cut], good + b"tail"):
        store.put(key, bad)
        with pytest.raises(CorruptError) as caught:
            read_group_header(store, key)
        assert caught.value.code == "truncated"


def test_swapped_segment_indexes_are_noticed() -> None:
    _, built, _ = build_group()
    segments = segments_of(built)
    header = group_header(segments)
    data = encode_group_index(header, segments)
    group = parse_group_index(data, key="k")
    first, second = group.header.segments[0], group.header.segments[1]
    body = second.SerializeToString()
    with pytest.raises(CorruptError):
        open_segment_index(body, first, key="k")
    disguised = disk_pb2.SegmentSummary.FromString(first.SerializeToString())
    start = group.header_nbytes + second.index_offset
    disguised.index_digest = second.index_digest
    with pytest.raises(CorruptError) as caught:
        open_segment_index(data[start : start + second.index_nbytes], disguised, key="k")
    assert caught.value.code == "identity"


def test_group_indexes_that_disagree_on_their_number_are_corrupt() -> None:
    store, built, key = build_group()
    store.put(group_key(built.ident, 1, 2), store.get(key))
    with pytest.raises(CorruptError) as caught:
        list_groups(store, built.ident)
    assert caught.value.code == "groups"


def test_a_listing_knows_what_is_missing() -> None:
    store = memory_store()
    assert list_groups(store, IDENT).missing == ()
    assert not list_groups(store, IDENT).is_complete
    build_checkpoint(store, 10, world_size=4, group_size=1, groups=[0, 2], commit=False)
    store.put("index/000000000010.a000001/notes", b"")
    listing = list_groups(store, IDENT)
    assert (listing.missing, listing.count, listing.is_complete) == ((1, 3), 4, False)


def test_the_groups_digest_depends_on_every_group_and_their_order() -> None:
    store = memory_store()
    built = build_checkpoint(store, 10, world_size=3, group_size=1)
    groups = [read_group_header(store, group_key(built.ident, i, 3)) for i in range(3)]
    digests = {groups_digest(groups), groups_digest(groups[::-1]), groups_digest(groups[:2])}
    assert len(digests) == 3


def test_a_manifest_opens_only_as_the_one_it_is() -> None:
    data = encode_manifest(disk_pb2.Manifest(id=IDENT.to_proto(), write_id=b"w" * 16))
    assert open_manifest(data, IDENT, key="m").write_id == b"w" * 16
    with pytest.raises(CorruptError) as caught:
        open_manifest(data, CheckpointId(10, 2), key="m")
    assert caught.value.code == "identity"
    for position in range(len(data)):
        bad = bytearray(data)
        bad[position] ^= 1
        with pytest.raises(CorruptError):
            open_manifest(bad, IDENT, key="m")
