"""Commit: nothing exists before the manifest, everything after it, and only what is whole gets one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.digest import Buffer, digest
from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import MANIFESTS, group_key, layout_key, manifest_key, segment_key
from ckpt.format.layout import LayoutSet, Mesh, Shard, TensorLayout
from ckpt.format.manifest import encode_group_index, group_header
from ckpt.ops.catalog import exists, latest, list_checkpoints, load_checkpoint, read_manifest
from ckpt.ops.commit import CommitState, commit_delay_s, may_commit, try_commit
from ckpt.ops.groups import put_layout
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import (
    Built,
    CountingStore,
    FakeClock,
    build_checkpoint,
    build_group_indexes,
    claim,
    memory_store,
    sample_layouts,
)

IDENT = CheckpointId(10, 1)


def test_a_commit_waits_for_every_group_and_names_the_missing() -> None:
    """Case I01."""
    store = memory_store()
    result = try_commit(store, IDENT)
    assert (result.state, result.missing) == (CommitState.WAITING, ())
    build_checkpoint(store, 10, world_size=4, groups=[0, 2], commit=False)
    result = try_commit(store, IDENT)
    assert (result.state, result.missing) == (CommitState.WAITING, (1, 3))
    assert latest(store) is None
    build_checkpoint(store, 10, world_size=4, commit=False)
    assert try_commit(store, IDENT).state is CommitState.COMMITTED
    assert latest(store) == IDENT
    assert try_commit(store, IDENT).state is CommitState.ALREADY


def test_the_manifest_says_what_there_is() -> None:
    store = memory_store()
    built = build_checkpoint(
        store, 10, attempt=2, world_size=5, group_size=2, parent=CheckpointId(4, 1), commit=False
    )
    clock = FakeClock(77.0)
    assert (
        try_commit(store, built.ident, environment={"server": "1"}, clock=clock).state
        is CommitState.COMMITTED
    )
    manifest = read_manifest(store, built.ident)
    assert manifest.run == "run"
    assert (manifest.world_size, manifest.group_count, manifest.tensor_count) == (5, 3, 5)
    assert manifest.nbytes == sum(segment.nbytes for segment in built.segments.values())
    assert manifest.layout_digest == built.layouts.digest
    assert len(manifest.write_id) == 16
    assert manifest.committed_at == 77.0
    assert CheckpointId.from_proto(manifest.parent) == CheckpointId(4, 1)
    assert dict(manifest.environment) == {"ckpt": "test", "server": "1"}
    assert not manifest.has_explicit_boxes


def test_of_racing_committers_one_wins_and_the_others_learn_it() -> None:
    """Case I07."""
    store = memory_store()
    build_checkpoint(store, 10, world_size=4, commit=False)
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(lambda _: try_commit(store, IDENT).state, range(8)))
    assert states.count(CommitState.COMMITTED) == 1
    assert set(states) <= {CommitState.COMMITTED, CommitState.ALREADY}


class Flaky(CountingStore):
    """The first put of the manifest fails: before it arrives, or after."""

    arrives = True
    failed = False

    def put_new(self, key: str, data: Buffer) -> None:
        if self.failed or not key.startswith(MANIFESTS):
            super().put_new(key, data)
            return
        self.failed = True
        if self.arrives:
            super().put_new(key, data)
        raise UnavailableError("connection reset")


@pytest.mark.parametrize("arrives", [True, False])
def test_a_lost_reply_still_commits_once(arrives: bool) -> None:
    store = Flaky(memory_store())
    store.arrives = arrives
    build_checkpoint(store, 10, commit=False)
    assert try_commit(store, IDENT, clock=FakeClock()).state is CommitState.COMMITTED
    assert [info.ident for info in list_checkpoints(store)] == [IDENT]


class Overtaken(CountingStore):
    """A rival's manifest arrives just before ours."""

    def put_new(self, key: str, data: Buffer) -> None:
        if key.startswith(MANIFESTS) and not exists(self.inner, IDENT):
            assert try_commit(self.inner, IDENT).state is CommitState.COMMITTED
        super().put_new(key, data)


def test_losing_the_race_is_no_error_and_leaves_the_winners_manifest() -> None:
    store = Overtaken(memory_store())
    build_checkpoint(store, 10, commit=False)
    assert try_commit(store, IDENT, clock=FakeClock()).state is CommitState.ALREADY
    assert load_checkpoint(store, IDENT).groups()


def test_a_zombie_of_an_older_attempt_may_commit_and_hides_nothing() -> None:
    store = memory_store()
    claim(store)
    ten = build_checkpoint(store, 10).ident
    claim(store, parent=ten)
    twelve = build_checkpoint(store, 12, attempt=2, parent=ten).ident
    zombie = build_checkpoint(store, 50).ident
    assert exists(store, zombie)
    assert latest(store) == twelve


def test_a_late_commit_whose_segments_were_swept_is_refused() -> None:
    store = memory_store()
    late = build_checkpoint(store, 10, commit=False).ident
    build_checkpoint(store, 20)
    store.delete([segment_key(late, 1)])
    with pytest.raises(CorruptError) as caught:
        try_commit(store, late)
    assert (caught.value.code, caught.value.context["key"]) == ("missing", segment_key(late, 1))
    assert not exists(store, late)


def rewrite(store: Store, built: Built, change: Callable[[list[disk_pb2.SegmentIndex]], None]) -> None:
    """Put the one group index of ``built`` again with changed segments."""
    segments = [built.segments[rank] for rank in sorted(built.segments)]
    header = group_header(segments)
    change(segments)
    key = group_key(built.ident, header.group.index, header.group.count)
    changed = disk_pb2.GroupHeader.FromString(header.SerializeToString())
    del changed.segments[len(segments) :]
    for summary, segment in zip(changed.segments, segments, strict=True):
        summary.rank = segment.rank
        summary.object_key = segment_key(built.ident, segment.rank)
        summary.layout_digest = segment.layout_digest
    changed.world_size = segments[0].world_size
    changed.run = segments[0].run
    store.put(key, encode_group_index(changed, segments))


def set_world(segments: list[disk_pb2.SegmentIndex]) -> None:
    segments[0].world_size = 4


def drop_last(segments: list[disk_pb2.SegmentIndex]) -> None:
    del segments[-1]


def repeat_rank(segments: list[disk_pb2.SegmentIndex]) -> None:
    segments[1].rank = 0


def lose_layout(segments: list[disk_pb2.SegmentIndex]) -> None:
    segments[1].layout_digest = digest(b"nothing has this digest")


@pytest.mark.parametrize(
    ("change", "code"),
    [(set_world, "ranks"), (drop_last, "ranks"), (repeat_rank, "ranks"), (lose_layout, "layout-missing")],
)
def test_parts_that_do_not_make_a_whole_are_never_committed(
    change: Callable[[list[disk_pb2.SegmentIndex]], None], code: str
) -> None:
    """Case I02."""
    store = memory_store()
    built = build_checkpoint(store, 10, world_size=3, group_size=3, commit=False)
    rewrite(store, built, change)
    with pytest.raises(CorruptError) as caught:
        try_commit(store, IDENT)
    assert caught.value.code == code
    assert latest(store) is None


def test_groups_of_different_starts_are_not_mixed() -> None:
    """Case I03."""
    store = memory_store()
    build_checkpoint(
        store, 10, world_size=4, parent=CheckpointId(3, 1), attempt=2, groups=[0, 1, 2], commit=False
    )
    build_checkpoint(store, 10, world_size=4, attempt=2, groups=[3], commit=False)
    with pytest.raises(CorruptError) as caught:
        try_commit(store, CheckpointId(10, 2))
    assert (caught.value.code, caught.value.context["field"]) == ("group-identity", "parent")


def pipeline_layouts(rank: int) -> LayoutSet:
    """Two pipeline stages of two ranks each: every stage knows its own tensors only."""
    stage = rank // 2
    mesh = Mesh.from_ranks((2,), ("dp",), (2 * stage, 2 * stage + 1))
    return LayoutSet([TensorLayout(f"stage{stage}.w", "float32", (4, 4), mesh, (Shard(0),))])


def test_ranks_with_different_layouts_are_merged() -> None:
    store = memory_store()
    built = build_checkpoint(store, 10, world_size=4, layouts_of=pipeline_layouts)
    checkpoint = load_checkpoint(store, built.ident)
    assert list(checkpoint.layouts) == ["stage0.w", "stage1.w"]
    assert checkpoint.layouts == built.layouts


def test_a_rank_that_saved_under_a_layout_without_a_tensor_it_holds_leaves_a_hole() -> None:
    whole = sample_layouts(4)
    without = LayoutSet(item for name, item in whole.items() if name != "model.weight")
    store = memory_store()
    build_checkpoint(
        store, 10, world_size=4, layouts_of=lambda rank: without if rank == 2 else whole, commit=False
    )
    with pytest.raises(CorruptError) as caught:
        try_commit(store, IDENT)
    assert caught.value.code == "coverage"
    assert caught.value.context["tensor"] == "model.weight"
    assert caught.value.context["ranks"] == [2]


def test_a_mesh_with_ranks_beyond_the_world_leaves_a_hole() -> None:
    store = memory_store()
    build_checkpoint(store, 10, world_size=2, layouts=sample_layouts(3), commit=False)
    with pytest.raises(CorruptError) as caught:
        try_commit(store, IDENT)
    assert caught.value.code == "coverage"


def test_ranks_that_disagree_on_a_tensor_are_never_committed() -> None:
    def other_shape(rank: int) -> LayoutSet:
        mesh = Mesh.from_ranks((2,), (), (0, 1))
        return LayoutSet([TensorLayout("w", "float32", (4 + rank, 4), mesh, (Shard(0),))])

    store = memory_store()
    tensors = sample_layouts(2)
    built = build_checkpoint(store, 10, layouts=tensors, commit=False)
    for rank, segment in built.segments.items():
        segment.layout_digest = put_layout(store, other_shape(rank))
        store.put(group_key(IDENT, rank, 2), encode_group_index(group_header([segment]), [segment]))
    with pytest.raises(CorruptError) as caught:
        try_commit(store, IDENT)
    assert caught.value.code == "layout-mismatch"


def test_a_layout_that_is_another_than_its_key_says_is_refused() -> None:
    store = memory_store()
    built = build_checkpoint(store, 10, commit=False)
    other = put_layout(store, sample_layouts(3))
    store.put(layout_key(built.layouts.digest), store.get(layout_key(other)))
    with pytest.raises(CorruptError) as caught:
        try_commit(store, IDENT)
    assert caught.value.code == "identity"


def test_common_state_that_differs_between_ranks_is_named() -> None:
    store = memory_store()
    build_checkpoint(store, 10, world_size=4, state_of=lambda rank: {"lr": rank == 2}, commit=False)
    (warning,) = try_commit(store, IDENT).warnings
    assert warning.code == "state-differs"
    assert (warning.context["ranks"], warning.context["total"]) == ("2", 1)


def test_borrowed_chunks_of_a_checkpoint_that_is_gone_block_the_commit() -> None:
    def borrow(store: Store) -> Built:
        built = build_checkpoint(store, 30, world_size=1, commit=False)
        segment = built.segments[0]
        segment.chunks.object_keys[0] = segment_key(CheckpointId(10, 1), 0)
        store.put(group_key(built.ident, 0, 1), encode_group_index(group_header([segment]), [segment]))
        return built

    store = memory_store()
    build_checkpoint(store, 10, world_size=1, seed=1)
    built = borrow(store)
    store.delete([manifest_key(CheckpointId(10, 1))])
    with pytest.raises(CorruptError) as caught:
        try_commit(store, built.ident)
    assert caught.value.code == "reference-gone"
    build_checkpoint(store, 10, world_size=1, seed=1)
    assert try_commit(store, built.ident).state is CommitState.COMMITTED
    references = read_manifest(store, built.ident).references
    assert [CheckpointId.from_proto(other) for other in references] == [CheckpointId(10, 1)]


def test_only_the_server_of_rank_0_commits_at_once() -> None:
    assert may_commit(conditional=True, hosts_rank0=True, group_index=0, waited_s=0)
    assert may_commit(conditional=False, hosts_rank0=True, group_index=0, waited_s=0)
    delays = [commit_delay_s(conditional=True, hosts_rank0=False, group_index=i) for i in range(1, 600)]
    assert delays[0] > 0
    assert delays == sorted(delays)
    assert delays[-1] <= 60
    assert not may_commit(conditional=False, hosts_rank0=False, group_index=1, waited_s=299, settle_s=300)
    assert may_commit(conditional=False, hosts_rank0=False, group_index=1, waited_s=302, settle_s=300)


class IgnoresConditions(CountingStore):
    def put_new(self, key: str, data: Buffer) -> None:
        self.put(key, data)

    def probe_conditional(self) -> bool:
        return False


def test_without_conditional_put_an_existing_manifest_is_left_alone() -> None:
    store = IgnoresConditions(memory_store())
    build_checkpoint(store, 10, commit=False)
    assert try_commit(store, IDENT, clock=FakeClock()).state is CommitState.COMMITTED
    first = store.get(manifest_key(IDENT))
    assert try_commit(store, IDENT, clock=FakeClock()).state is CommitState.ALREADY
    assert store.get(manifest_key(IDENT)) == first


def simulate(world_size: int, group_size: int, tensors: int) -> tuple[CountingStore, CheckpointId, float]:
    """Commit a big job without any tensor data; return seconds that the commit took."""
    store = CountingStore(memory_store())
    ident = build_group_indexes(store, world_size=world_size, group_size=group_size, tensors=tensors)
    store.reset()
    started = time.perf_counter()
    assert try_commit(store, ident, clock=FakeClock()).state is CommitState.COMMITTED
    return store, ident, time.perf_counter() - started


def test_commit_of_4096_ranks_reads_headers_only_and_its_manifest_does_not_grow() -> None:
    """Case I115."""
    small, ident, _ = simulate(8, 8, 300)
    large, _, elapsed_s = simulate(4096, 8, 300)
    print(f"commit of 4096 ranks x 300 tensors: {elapsed_s:.3f} s")
    assert large.requests["get_range"] == 512
    assert large.requests["get"] == 1  # the one layout
    assert large.total <= 512 + 10
    assert large.read_bytes < 512 * (64 << 10) + (1 << 20)
    sizes = [len(store.get(manifest_key(ident))) for store in (small, large)]
    assert abs(sizes[0] - sizes[1]) <= 8
    assert sizes[1] < 200
