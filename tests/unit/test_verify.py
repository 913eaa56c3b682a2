"""Verify: every kind of damage to every kind of object is found and named; a hiccup is not damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt.digest import Buffer, digest
from ckpt.errors import CorruptError, NotFoundError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key, layout_key, manifest_key, segment_key
from ckpt.format.manifest import encode_group_index, encode_manifest, group_header
from ckpt.ops.catalog import load_checkpoint, read_manifest
from ckpt.ops.groups import put_layout
from ckpt.ops.verify import verify_deep, verify_quick
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import (
    Built,
    CountingStore,
    build_checkpoint,
    build_segment,
    memory_store,
    sample_layouts,
)

IDENT = CheckpointId(10, 1)
SEGMENT = segment_key(IDENT, 1)
GROUP = group_key(IDENT, 1, 2)


def build(codec: int = disk_pb2.CODEC_RAW) -> tuple[CountingStore, Built]:
    store = CountingStore(memory_store())
    return store, build_checkpoint(store, 10, chunk_nbytes=64 << 10, codec=codec)


def problems(store: Store, *, deep: bool) -> list[tuple[str, object]]:
    checkpoint = load_checkpoint(store, IDENT)
    found = verify_deep(checkpoint) if deep else verify_quick(checkpoint)
    return [(p.code, p.context.get("key") or p.context.get("where")) for p in found]


@pytest.mark.parametrize("codec", [disk_pb2.CODEC_RAW, disk_pb2.CODEC_ZSTD, disk_pb2.CODEC_ZSTD_BYTEGROUP2])
def test_a_whole_checkpoint_has_no_problems(codec: int) -> None:
    store, _ = build(codec)
    assert problems(store, deep=False) == []
    assert problems(store, deep=True) == []


def test_quick_reads_no_segment_and_deep_reads_every_byte_and_reports_progress() -> None:
    store, built = build()
    checkpoint = load_checkpoint(store, IDENT)
    store.reset()
    assert verify_quick(checkpoint) == []
    assert store.requests["head"] == 2
    assert store.read_bytes < 20_000
    total = sum(segment.nbytes for segment in built.segments.values())
    store.reset()
    seen: list[tuple[int, int]] = []
    assert verify_deep(checkpoint, progress=lambda done, of: seen.append((done, of))) == []
    assert store.read_bytes >= total
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {of for _, of in seen} == {total}
    assert len(seen) > 10


def truncate(data: bytes) -> bytes:
    return data[:-1]


def flip_middle(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def append(data: bytes) -> bytes:
    return data + b"\0"


def empty(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("change", [truncate, append, empty])
def test_quick_finds_a_segment_of_the_wrong_size(change: Callable[[bytes], bytes]) -> None:
    store, _ = build()
    store.put(SEGMENT, change(store.get(SEGMENT)))
    assert ("size", SEGMENT) in problems(store, deep=False)
    assert ("size", SEGMENT) in problems(store, deep=True)


def test_only_deep_finds_a_flipped_bit_and_says_where() -> None:
    """Case I124."""
    store, _ = build()
    store.put(SEGMENT, flip_middle(store.get(SEGMENT)))
    assert problems(store, deep=False) == []
    (problem,) = verify_deep(load_checkpoint(store, IDENT))
    assert problem.code == "digest"
    assert problem.context["key"] == SEGMENT
    assert problem.context["rank"] == 1
    assert problem.context["chunk"] == len(store.get(SEGMENT)) // 2 // (64 << 10)


def test_deep_finds_damage_in_compressed_chunks() -> None:
    store, _ = build(disk_pb2.CODEC_ZSTD)
    store.put(SEGMENT, flip_middle(store.get(SEGMENT)))
    assert {key for _, key in problems(store, deep=True)} == {SEGMENT}


def test_swapped_segments_are_found() -> None:
    store, _ = build()
    first, second = segment_key(IDENT, 0), segment_key(IDENT, 1)
    a, b = store.get(first), store.get(second)
    store.put(first, b)
    store.put(second, a)
    assert {key for _, key in problems(store, deep=True)} == {first, second}


def test_a_segment_of_the_same_layout_from_another_step_is_found() -> None:
    store, _ = build()
    build_checkpoint(store, 20)
    store.put(SEGMENT, store.get(segment_key(CheckpointId(20, 1), 1)))
    assert problems(store, deep=False) == []
    assert {key for _, key in problems(store, deep=True)} == {SEGMENT}


def test_all_problems_are_reported_not_the_first_only() -> None:
    store, _ = build()
    store.delete([SEGMENT])
    store.put(segment_key(IDENT, 0), flip_middle(store.get(segment_key(IDENT, 0))))
    heard: list[CorruptError] = []
    found = verify_deep(load_checkpoint(store, IDENT), on_problem=heard.append)
    assert heard == found
    assert {(p.code, p.context["key"]) for p in found} == {
        ("missing", SEGMENT),
        ("digest", segment_key(IDENT, 0)),
    }


@pytest.mark.parametrize("change", [truncate, flip_middle, append, empty])
def test_damaged_group_indexes_are_found(change: Callable[[bytes], bytes]) -> None:
    store, _ = build()
    store.put(GROUP, change(store.get(GROUP)))
    # A flip in the middle hits a segment index, which quick does not read.
    assert GROUP in {key for _, key in problems(store, deep=True)}
    if change is not flip_middle:
        assert GROUP in {key for _, key in problems(store, deep=False)}


def test_missing_group_index_and_layout_are_found() -> None:
    store, built = build()
    checkpoint = load_checkpoint(store, IDENT)
    store.delete([GROUP, layout_key(built.layouts.digest)])
    for found in (verify_quick(checkpoint), verify_deep(checkpoint)):
        assert ("missing", GROUP) in {(p.code, p.context.get("key")) for p in found}
        assert ("layout-missing", layout_key(built.layouts.digest)) in {
            (p.code, p.context.get("key")) for p in found
        }


def test_a_group_index_of_another_step_is_found() -> None:
    store, _ = build()
    build_checkpoint(store, 20)
    store.put(GROUP, store.get(group_key(CheckpointId(20, 1), 1, 2)))
    assert ("identity", GROUP) in problems(store, deep=False)


def test_replaced_group_indexes_no_longer_fit_the_manifest() -> None:
    store, _ = build()
    build_checkpoint(store, 10, seed=5, commit=False, chunk_nbytes=64 << 10)
    found = verify_quick(load_checkpoint(store, IDENT))
    assert [(p.code, p.context["field"]) for p in found] == [("manifest", "groups_digest")]


def test_a_manifest_with_wrong_claims_is_found() -> None:
    store, _ = build()
    manifest = read_manifest(store, IDENT)
    manifest.nbytes += 1
    manifest.tensor_count = 4
    store.put(manifest_key(IDENT), encode_manifest(manifest))
    found = verify_quick(load_checkpoint(store, IDENT))
    assert {p.context["field"] for p in found} == {"nbytes", "stored_nbytes", "tensor_count"}


def test_an_index_that_lists_other_arrays_than_the_layout_says_is_found() -> None:
    store, built = build()
    segment = built.segments[1]
    renamed = segment.tensors[0].name
    segment.tensors[0].name = "model.other"
    store.put(GROUP, encode_group_index(group_header([segment]), [segment]))
    found = [p for p in verify_deep(load_checkpoint(store, IDENT)) if p.code == "arrays"]
    assert len(found) == 2  # against the layout, and against the segment's own header
    assert found[0].context["tensor"] == min(renamed, "model.other")


def test_a_segment_written_under_another_layout_is_found() -> None:
    """All digests fit; only the arithmetic tells that rank 1 stored the wrong part."""
    store, built = build()
    manifest = read_manifest(store, IDENT)
    other = sample_layouts(3)
    segments = []
    for rank, segment in built.segments.items():
        data = build_segment(other, built.tensors, rank)
        if rank == 1:
            segment.nbytes = len(data)
            segment.chunks.digests = b"".join(
                digest(memoryview(data)[i : i + (64 << 10)]) for i in range(0, len(data), 64 << 10)
            )
            store.put(SEGMENT, data)
        key = group_key(IDENT, rank, 2)
        store.put(key, encode_group_index(group_header([segment]), [segment]))
        segments.append(segment)
    put_layout(store, built.layouts)
    manifest.nbytes = sum(segment.nbytes for segment in segments)
    store.put(manifest_key(IDENT), encode_manifest(manifest))
    assert ("arrays", SEGMENT) in problems(store, deep=True)


class Hiccup(CountingStore):
    """Cannot be reached for one kind of request."""

    refuse = ""

    def _count(self, name: str, nbytes: int = 0) -> None:
        if name == self.refuse:
            raise UnavailableError("503")
        super()._count(name, nbytes)

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        if self.refuse == "segments" and key.startswith("data/"):
            raise UnavailableError("503")
        return super().get_range(key, start, nbytes)


@pytest.mark.parametrize("refuse", ["head", "get_range", "list", "segments"])
def test_a_store_that_cannot_be_reached_is_not_damage(refuse: str) -> None:
    """Case I102."""
    store = Hiccup(memory_store())
    build_checkpoint(store, 10)
    checkpoint = load_checkpoint(store, IDENT)
    store.refuse = refuse
    with pytest.raises(UnavailableError):
        verify_deep(checkpoint)


def test_a_checkpoint_that_is_pruned_meanwhile_is_not_damaged_but_gone() -> None:
    store, _ = build()
    checkpoint = load_checkpoint(store, IDENT)
    store.delete([manifest_key(IDENT), GROUP])
    with pytest.raises(NotFoundError) as caught:
        verify_quick(checkpoint)
    assert caught.value.code == "no-checkpoint"
