"""Commits of very many ranks: groups plus a constant of requests, later a listing; manifests do not grow.

What a shortcut over marks commits must be what the whole proof commits, in every case.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt.errors import CorruptError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key, index_prefix, manifest_key, segment_key
from ckpt.format.layout import LayoutSet, Mesh, Shard, TensorLayout
from ckpt.format.manifest import encode_group_index, group_header
from ckpt.format.marks import MARKS_FROM, mark_prefix, parse_mark_names
from ckpt.ops.catalog import exists, read_manifest
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.groups import put_group_index, put_layout
from ckpt.ops.known_groups import KnownGroups
from ckpt.ops.prune import execute_prune, plan_deletion
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import (
    Built,
    CountingStore,
    FakeClock,
    build_checkpoint,
    build_group_indexes,
    memory_store,
    swept,
)

WORLD = 2 * MARKS_FROM


def commit(store: Store, ident: CheckpointId, known: KnownGroups | None = None) -> disk_pb2.Manifest:
    """Commit and return the manifest without what differs from one try to the next."""
    assert try_commit(store, ident, known=known, clock=FakeClock()).state is CommitState.COMMITTED
    manifest = read_manifest(store, ident)
    manifest.ClearField("write_id")
    return manifest


def simulate(
    world_size: int, *, known: KnownGroups | None = None, state: Callable[[int], object] = lambda _: None
) -> tuple[CountingStore, list[int], list[int]]:
    """Commit two steps of a job; return the requests of each commit and the sizes of the manifests."""
    store = CountingStore(memory_store())
    requests, sizes = [], []
    for step in (1000, 1001):
        ident = build_group_indexes(
            store, world_size=world_size, group_size=8, tensors=3, step=step, state_of=state
        )
        store.reset()
        commit(store, ident, known)
        requests.append(store.total - 1)  # the test's own look at the manifest
        sizes.append(len(store.get(manifest_key(ident))))
    return store, requests, sizes


def test_requests_are_groups_plus_a_constant_and_manifests_do_not_grow_from_1000_to_10000_ranks() -> None:
    """Case I115."""
    _, small, small_sizes = simulate(1000)
    _, large, large_sizes = simulate(10_000)
    pages = 10_000 // 8 // 1000  # a listing asks once more for every 1000 keys
    assert [more - 1250 - pages for more in large] == [fewer - 125 for fewer in small]
    assert set(large_sizes) == {large_sizes[0]}
    assert abs(large_sizes[0] - small_sizes[0]) <= 4  # longer varints


def test_later_commits_of_10000_ranks_take_a_listing() -> None:
    _, first_only, _ = simulate(10_000)
    store, requests, _ = simulate(10_000, known=KnownGroups())
    assert requests[0] == first_only[0]
    assert requests[1] <= 10  # two pages of marks, group 0, what is newer, the manifest
    assert store.requests["get_range"] == 1


def test_few_groups_have_no_marks() -> None:
    store = memory_store()
    ident = build_group_indexes(store, world_size=MARKS_FROM - 4, group_size=1, tensors=1)
    assert list(store.list_keys(mark_prefix(ident))) == []


def stage_layouts(rank: int) -> LayoutSet:
    """Four pipeline stages, interleaved over the ranks."""
    stage = rank % 4
    mesh = Mesh.from_ranks((WORLD // 4,), ("dp",), range(stage, WORLD, 4))
    return LayoutSet([TensorLayout(f"stage{stage}.w", "float32", (WORLD, 2), mesh, (Shard(0),))])


def staged(store: Store, step: int, **options: object) -> Built:
    options = {"group_size": 1, "state_of": lambda rank: {"step": step, "stage": rank % 4}} | options
    return build_checkpoint(  # type: ignore[arg-type]
        store, step, world_size=WORLD, layouts_of=stage_layouts, commit=False, **options
    )


@pytest.mark.parametrize("group_size", [1, 2])
def test_the_shortcut_commits_the_same_manifest_as_the_whole_proof(group_size: int) -> None:
    manifests = []
    for known in (KnownGroups(), None):
        store = CountingStore(memory_store())
        commit(store, staged(store, 10, group_size=group_size).ident, known)
        second = staged(store, 20, group_size=group_size)
        store.reset()
        manifests.append(commit(store, second.ident, known))
        if known is not None:
            assert store.requests["get_range"] == 4 // group_size  # one group of each kind
    assert manifests[0] == manifests[1]
    assert list(manifests[0].state_ranks) == [0, 1, 2, 3]
    assert manifests[0].groups_digest != b""


def test_the_shortcut_knows_what_compressed_segments_take() -> None:
    manifests = []
    for known in (KnownGroups(), None):
        store = CountingStore(memory_store())
        commit(store, staged(store, 10).ident, known)  # raw: what is stored is no claim
        second = staged(store, 20, codec=disk_pb2.CODEC_ZSTD_BYTEGROUP4)
        store.reset()
        manifests.append(commit(store, second.ident, known))
        if known is not None:
            assert store.requests["get_range"] == 4  # one group of each kind
    assert manifests[0] == manifests[1]
    assert 0 < manifests[0].stored_nbytes < manifests[0].nbytes


def test_a_mark_that_lies_about_what_is_stored_is_not_believed() -> None:
    def change(store: Store, built: Built) -> None:
        (key,) = [key for key in marks_of(store, built.ident) if "/mark-00000-" in key]
        store.delete([key])
        store.put(f"{key}.{1:016x}", b"")

    recommit(change)


def recommit(change: Callable[[Store, Built], None], *, error: str = "") -> None:
    """Prove step 10, spoil step 20; a committer that knows step 10 does what one does that does not."""
    outcomes = []
    for known in (KnownGroups(), None):
        store = memory_store()
        commit(store, staged(store, 10).ident, known)
        second = staged(store, 20)
        change(store, second)
        if not error:
            outcomes.append(commit(store, second.ident, known).SerializeToString(deterministic=True))
            continue
        with pytest.raises(CorruptError) as caught:
            try_commit(store, second.ident, known=known, clock=FakeClock())
        assert caught.value.code == error
        assert not exists(store, second.ident)
    assert len(set(outcomes)) <= 1


def marks_of(store: Store, ident: CheckpointId) -> list[str]:
    return [info.key for info in store.list_keys(mark_prefix(ident))]


def republish(store: Store, segment: disk_pb2.SegmentIndex) -> None:
    """Put the group of one rank again, with its mark in place of the old one."""
    ident = CheckpointId.from_proto(segment.id)
    store.delete([key for key in marks_of(store, ident) if f"/mark-{segment.group.index:05d}-" in key])
    put_group_index(store, [segment])


def test_a_missing_mark_only_costs_requests() -> None:
    recommit(lambda store, built: store.delete([marks_of(store, built.ident)[5]]))


def test_a_second_mark_of_a_group_only_costs_requests() -> None:
    def add(store: Store, built: Built) -> None:
        key = marks_of(store, built.ident)[5]
        store.put(key[:-1] + ("0" if key[-1] != "0" else "1"), b"")

    recommit(add)


def test_a_changed_size_is_seen() -> None:
    def change(store: Store, built: Built) -> None:
        built.segments[7].nbytes += 4096
        republish(store, built.segments[7])

    recommit(change)


def test_a_group_that_was_saved_under_another_layout_is_refused() -> None:
    def change(store: Store, built: Built) -> None:
        mesh = Mesh.from_ranks((1,), (), (7,))
        other = LayoutSet([TensorLayout("w", "float32", (4,), mesh, (Shard(0),))])
        built.segments[7].layout_digest = put_layout(store, other)
        republish(store, built.segments[7])

    recommit(change, error="coverage")


def test_a_group_of_another_parent_is_refused() -> None:
    def change(store: Store, built: Built) -> None:
        built.segments[7].parent.CopyFrom(disk_pb2.SegmentIndex(id=CheckpointId(3, 1).to_proto()).id)
        republish(store, built.segments[7])

    recommit(change, error="group-identity")


def test_a_state_that_differs_between_replicas_is_warned_about() -> None:
    store = memory_store()
    known = KnownGroups()
    commit(store, staged(store, 10).ident, known)
    odd = staged(store, 20, state_of=lambda rank: {"stage": rank % 4, "odd": rank == 9})
    (warning,) = try_commit(store, odd.ident, known=known, clock=FakeClock()).warnings
    assert (warning.code, warning.context["ranks"]) == ("state-differs", "9")


def test_a_mark_that_lies_about_its_group_is_not_believed() -> None:
    def change(store: Store, built: Built) -> None:
        segment = built.segments[0]  # group 0 stands for its kind; its mark stays as it was
        segment.environment["changed"] = "yes"
        store.put(group_key(built.ident, 0, WORLD), encode_group_index(group_header([segment]), [segment]))

    recommit(change)


def test_a_late_commit_looks_at_the_segments_all_the_same() -> None:
    def change(store: Store, built: Built) -> None:
        build_checkpoint(store, 30)
        store.delete([segment_key(built.ident, 7)])

    recommit(change, error="missing")


def test_audited_snapshots_have_no_marks() -> None:
    store = memory_store()
    built = staged(store, 10)
    segment = built.segments[3]
    segment.audit.shift = 0
    store.delete(marks_of(store, built.ident))
    put_group_index(store, [segment])
    assert marks_of(store, built.ident) == []


def test_prune_deletes_marks_before_group_indexes() -> None:
    class Watched(CountingStore):
        deleted: list[str]

        def delete(self, keys: object) -> None:
            self.deleted += (taken := list(keys))  # type: ignore[call-overload]
            super().delete(taken)

    store = Watched(memory_store())
    store.deleted = []
    old = staged(store, 10)
    commit(store, old.ident)
    commit(store, staged(store, 20).ident)
    execute_prune(store, plan_deletion(store, [old.ident]))
    kinds = [key[len(index_prefix(old.ident)) :][:4] for key in store.deleted if key.startswith("index/")]
    assert kinds == ["mark"] * WORLD + ["grou"] * WORLD + ["cond"]
    assert list(store.list_keys(index_prefix(old.ident))) == []


def test_sweep_deletes_marks() -> None:
    store = memory_store()
    lost = staged(store, 10)
    commit(store, staged(store, 20).ident)
    swept(store, older_than_s=0.0)
    assert list(store.list_keys(index_prefix(lost.ident))) == []


def test_foreign_names_are_passed_over() -> None:
    store = memory_store()
    names = [key.rpartition("/")[2] for key in marks_of(store, staged(store, 10).ident)]
    marks = parse_mark_names(["mark-notes", *names, f"{names[0]}.tmp"])
    assert marks is not None
    assert len(marks) == WORLD
    assert parse_mark_names(names[1:]) is None
    assert parse_mark_names([]) is None
