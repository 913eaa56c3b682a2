"""What exists, and which checkpoint is the latest (cases I01-I15)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ckpt.clock import SystemClock
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import attempt_key, group_key, layout_key, manifest_key
from ckpt.ops.catalog import (
    awaited_parents,
    candidates,
    exists,
    is_on_line,
    latest,
    list_checkpoints,
    list_runs,
    load_checkpoint,
    read_manifest,
    resolve,
)
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from tests.support.builders import CountingStore, build_checkpoint, claim, memory_store


def ident(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(step, attempt)


def publish(store: Store, *idents: CheckpointId) -> None:
    """Put manifests that are there and that nobody opens: listing and choosing read keys only."""
    for one in idents:
        store.put(manifest_key(one), b"never read by listing")


def steps(store: Store) -> list[tuple[int, int]]:
    return [(one.step, one.attempt) for one in candidates(store)]


def test_an_empty_run_has_no_latest() -> None:
    store = memory_store()
    assert latest(store) is None
    assert list(list_checkpoints(store)) == []
    assert list(candidates(store)) == []
    claim(store)
    assert latest(store) is None


def test_listing_is_newest_first_by_number_and_passes_foreign_keys_over() -> None:
    """Case I11."""
    store = memory_store()
    publish(store, *(ident(step) for step in (9, 10, 99, 100, 1000, 20)), ident(5, 2))
    store.put("manifests/.marker", b"")
    store.put("manifests/000000000000000000.junk.pb", b"")
    assert [(i.ident.step, i.ident.attempt) for i in list_checkpoints(store)] == [
        (5, 2),
        (1000, 1),
        (100, 1),
        (99, 1),
        (20, 1),
        (10, 1),
        (9, 1),
    ]
    assert latest(store) == ident(5, 2)


def test_the_times_of_objects_mean_nothing(tmp_path: Path) -> None:
    """Case I12."""
    store = open_store(f"file://{tmp_path}/run")
    claim(store)
    for step in (10, 20, 30):
        build_checkpoint(store, step)
    copied_at = SystemClock().now()
    for age, step in enumerate((10, 20, 30)):  # a copy has turned the order round, and 30 is of the future
        at = copied_at - 1000 * age if step < 30 else copied_at + 3600
        os.utime(tmp_path / "run" / manifest_key(ident(step)), (at, at))
    assert latest(store) == ident(30)
    os.utime(tmp_path / "run" / manifest_key(ident(30)), (0, 0))
    assert latest(store) == ident(30)
    assert [info.ident.step for info in list_checkpoints(store)] == [30, 20, 10]
    execute_prune(store, plan_retention(store, keep_last=1))
    assert steps(store) == [(30, 1)]
    store.close()


def test_a_newer_attempt_hides_higher_steps_of_older_ones() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10), ident(20), ident(30))
    claim(store, parent=ident(20))
    assert latest(store) == ident(20)  # nothing committed yet: what it resumed from
    publish(store, ident(40))  # a zombie of attempt 1
    assert latest(store) == ident(20)
    publish(store, ident(25, 2))
    assert latest(store) == ident(25, 2)
    assert steps(store) == [(25, 2), (20, 1), (10, 1)]  # 30 and 40 lie on the abandoned branch


def test_attempts_that_committed_nothing_are_followed_to_where_they_came_from() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10), ident(20))
    claim(store, parent=ident(20))
    claim(store, parent=ident(20))
    claim(store, parent=ident(10))
    assert latest(store) == ident(10)
    assert steps(store) == [(10, 1)]


def test_a_parent_that_was_pruned_gives_way_to_the_step_before_it() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10), ident(30))
    claim(store, parent=ident(20))
    assert latest(store) == ident(10)
    store.delete([manifest_key(ident(10))])
    assert latest(store) is None  # 30 is of the branch that attempt 2 left


def test_a_pruned_parent_of_an_empty_attempt_is_followed_further_back() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10))
    claim(store, parent=ident(10))
    claim(store, parent=ident(20, 2))  # all of attempt 2 was pruned since
    assert latest(store) == ident(10)


def test_a_fresh_attempt_has_no_latest_until_it_commits() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10))
    claim(store)
    assert latest(store) is None
    publish(store, ident(1, 2))
    assert steps(store) == [(1, 2)]


def test_a_parent_that_is_not_committed_yet_gives_way_until_it_is() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10), ident(20))
    claim(store, parent=ident(30))  # resumed from what was sealed on the nodes
    assert latest(store) == ident(20)
    assert awaited_parents(store) == [ident(30)]
    claim(store, parent=ident(30))
    assert steps(store) == [(20, 1), (10, 1)]
    publish(store, ident(30))  # its servers were slower than the restart
    assert steps(store) == [(30, 1), (20, 1), (10, 1)]
    assert awaited_parents(store) == []
    publish(store, ident(40, 3))
    assert steps(store) == [(40, 3), (30, 1), (20, 1), (10, 1)]


def test_parents_are_awaited_back_to_an_attempt_that_committed() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(20))
    claim(store, parent=ident(30))
    claim(store, parent=ident(40, 2))
    assert awaited_parents(store) == [ident(40, 2), ident(30)]
    publish(store, ident(50, 3))
    assert awaited_parents(store) == []


def test_staged_steps_count_where_the_run_would_have_gone_on_from_them() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10), ident(20))
    staged = [ident(30), ident(15)]
    assert list(candidates(store, staged)) == [ident(30), ident(20), ident(15), ident(10)]
    assert latest(store) == ident(20)
    claim(store, parent=ident(20))  # 30 was not to be had then, and is an abandoned branch since
    assert list(candidates(store, staged)) == [ident(20), ident(15), ident(10)]
    staged.append(ident(25, 2))
    assert latest(store, staged) == ident(25, 2)
    assert resolve(store, "25", staged) == ident(25, 2)
    assert [is_on_line(store, one) for one in (ident(30), ident(20), ident(25, 2))] == [False, True, True]
    with pytest.raises(NotFoundError):
        resolve(store, "25")


def test_a_staged_step_that_is_committed_too_comes_once() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10), ident(20))
    assert list(candidates(store, [ident(20), ident(10)])) == [ident(20), ident(10)]


def test_what_a_deleted_run_left_on_the_nodes_is_not_resumed_from() -> None:
    """Case I14."""
    store = memory_store()
    assert latest(store, [ident(30, 4)]) is None
    claim(store)
    assert latest(store, [ident(30, 4)]) is None


def test_without_attempt_records_the_newest_manifest_is_latest() -> None:
    """Case I06."""
    store = memory_store()
    build_checkpoint(store, 10, 1)
    build_checkpoint(store, 20, 2, parent=ident(10))
    assert latest(store) == ident(20, 2)
    assert steps(store) == [(20, 2), (10, 1)]  # the manifest names the parent as well


def test_a_lost_record_that_is_needed_is_an_error_not_a_guess() -> None:
    store = memory_store()
    claim(store)
    publish(store, ident(10))
    claim(store, parent=ident(10))
    claim(store, parent=ident(20, 2))
    store.delete([attempt_key(2)])
    with pytest.raises(CorruptError) as caught:
        resolve(store, "latest")
    assert caught.value.code == "attempt-missing"


def test_nothing_is_remembered_between_calls() -> None:
    """Cases I09, I91."""
    store = memory_store()
    publish(store, ident(5))
    seen = [latest(store)]
    publish(store, ident(10))
    seen.append(latest(store))
    store.delete([manifest_key(ident(10))])
    seen.append(latest(store))
    assert seen == [ident(5), ident(10), ident(5)]


def test_latest_costs_the_same_requests_with_ten_thousand_checkpoints() -> None:
    """Case I113."""
    costs = []
    for count in (10, 10_000):
        store = CountingStore(memory_store())
        claim(store)
        publish(store.inner, *(ident(step * 10) for step in range(1, count + 1)))
        store.reset()
        assert latest(store) == ident(count * 10)
        committed = store.total
        claim(store, parent=ident(50))
        store.reset()
        assert latest(store) == ident(50)
        costs.append((committed, store.total))
    assert costs == [(2, 4), (2, 4)]


def test_listing_ten_thousand_takes_ten_requests_and_reads_no_object() -> None:
    """Case I101."""
    store = CountingStore(memory_store())
    publish(store.inner, *(ident(step) for step in range(10_000)))
    started = time.perf_counter()
    assert sum(1 for _ in list_checkpoints(store)) == 10_000
    assert time.perf_counter() - started < 2.0
    assert dict(store.requests) == {"list": 10}


def test_resolve_by_latest_step_and_id() -> None:
    store = memory_store()
    publish(store, ident(20, 1), ident(20, 2), ident(30, 1))
    assert resolve(store, "latest") == ident(20, 2)
    assert resolve(store, "20") == ident(20, 2)
    assert resolve(store, "30") == ident(30, 1)
    assert resolve(store, "000000000020.a000001") == ident(20, 1)
    for missing in ("7", "000000000007.a000001"):
        with pytest.raises(NotFoundError) as caught:
            resolve(store, missing)
        assert caught.value.code == "no-checkpoint"
    for wrong in ("newest", "", "-5", "20.a1"):
        with pytest.raises(InvalidInputError):
            resolve(store, wrong)
    with pytest.raises(NotFoundError):
        resolve(memory_store(), "latest")


def test_a_loaded_checkpoint_knows_every_segment() -> None:
    store = CountingStore(memory_store())
    built = build_checkpoint(store, 10, world_size=5, group_size=2, parent=None)
    store.reset()
    checkpoint = load_checkpoint(store, built.ident)
    assert store.total == 2
    assert checkpoint.layouts == built.layouts
    assert checkpoint.manifest.world_size == 5
    assert checkpoint.segment_index(3) == built.segments[3]
    again = store.total
    assert checkpoint.segment_index(3) == built.segments[3]
    assert store.total == again
    assert [summary.rank for summary in checkpoint.summaries()] == [0, 1, 2, 3, 4]
    assert checkpoint.summary(4).nbytes == built.segments[4].nbytes
    with pytest.raises(NotFoundError):
        checkpoint.segment_index(5)


def test_a_loaded_checkpoint_may_be_used_from_threads() -> None:
    store = memory_store()
    built = build_checkpoint(store, 10, world_size=8, group_size=2)
    checkpoint = load_checkpoint(store, built.ident)
    found: list[int] = []

    def read(rank: int) -> None:
        found.append(checkpoint.segment_index(rank).rank)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))


def test_the_objects_of_another_checkpoint_are_not_taken_for_this_ones() -> None:
    store = memory_store()
    ten, twenty = build_checkpoint(store, 10).ident, build_checkpoint(store, 20).ident
    store.put(manifest_key(twenty), store.get(manifest_key(ten)))
    with pytest.raises(CorruptError) as caught:
        read_manifest(store, twenty)
    assert caught.value.code == "identity"
    other = build_checkpoint(store, 30).ident
    for number in range(2):
        store.put(group_key(other, number, 2), store.get(group_key(ten, number, 2)))
    with pytest.raises(CorruptError) as caught:
        load_checkpoint(store, other).segment_index(0)
    assert caught.value.code == "identity"


def test_a_group_index_that_was_replaced_after_the_commit_is_noticed() -> None:
    store = memory_store()
    built = build_checkpoint(store, 10)
    build_checkpoint(store, 10, seed=99, commit=False)
    with pytest.raises(CorruptError) as caught:
        load_checkpoint(store, built.ident).groups()
    assert caught.value.code == "groups-digest"


def test_missing_pieces_of_a_committed_checkpoint_are_corruption() -> None:
    """Case I02."""
    store = memory_store()
    built = build_checkpoint(store, 10)
    store.delete([group_key(built.ident, 1, 2)])
    checkpoint = load_checkpoint(store, built.ident)
    assert checkpoint.segment_index(0).rank == 0
    for read in (lambda: checkpoint.segment_index(1), checkpoint.groups):
        with pytest.raises(CorruptError) as caught:
            read()
        assert caught.value.code == "missing"
    store.delete([layout_key(checkpoint.manifest.layout_digest)])
    with pytest.raises(CorruptError) as caught:
        load_checkpoint(store, built.ident)
    assert caught.value.code == "layout-missing"


class Throttled(CountingStore):
    """Refuses requests of one kind."""

    refuse = ""

    def _count(self, name: str, nbytes: int = 0) -> None:
        if name == self.refuse:
            raise UnavailableError("503 slow down")
        super()._count(name, nbytes)


@pytest.mark.parametrize("kind", ["list", "head", "get"])
def test_a_throttled_store_is_an_error_never_an_empty_run(kind: str) -> None:
    """Cases I102, I113."""
    store = Throttled(memory_store())
    claim(store)
    publish(store, ident(10))
    claim(store, parent=ident(10))
    store.refuse = kind
    with pytest.raises(UnavailableError):
        latest(store)
    if kind == "list":
        with pytest.raises(UnavailableError):
            list(list_checkpoints(store))
    if kind == "head":
        with pytest.raises(UnavailableError):
            exists(store, ident(10))


def test_runs_below_a_root_are_found_without_reading_their_keys() -> None:
    root = CountingStore(memory_store())
    root.put("run/a/data", b"")  # no run: what it holds is none of ours
    root.put("manifests", b"")
    for name in ("old", "new"):
        for number in range(1500):
            root.put(f"{name}/data/{number}", b"")
    root.put(f"old/{manifest_key(ident(3))}", b"")
    root.put(f"new/{attempt_key(1)}", b"")
    root.reset()
    assert list_runs(root) == ["new", "old"]
    assert root.total == 1 + 3
