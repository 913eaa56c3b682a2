"""Prune, sweep and pins: order of deletes, what is refused, what a crash leaves (cases I67-I73)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, RefusedError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    PINS,
    PROBE,
    group_key,
    held_key,
    index_prefix,
    layout_key,
    manifest_key,
    pin_key,
    segment_key,
    temporary_pin_key,
)
from ckpt.format.manifest import encode_manifest
from ckpt.ops.catalog import exists, latest, list_checkpoints, load_checkpoint, read_manifest
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.condemn import STALE_S
from ckpt.ops.pins import is_pinned, list_pins, pin, unpin
from ckpt.ops.prune import execute_prune, plan_deletion, plan_retention
from ckpt.ops.verify import verify_deep
from ckpt.storage.base import ObjectInfo, Store
from tests.support.builders import (
    CountingStore,
    FakeClock,
    borrow,
    build_checkpoint,
    claim,
    memory_store,
    swept,
)


def ident(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(step, attempt)


def steps(store: Store) -> list[int]:
    return [info.ident.step for info in list_checkpoints(store)]


def keys_of(store: Store, one: CheckpointId) -> list[str]:
    """Every key of a checkpoint that is left."""
    return [info.key for info in store.list_keys("") if str(one) in info.key]


def filled(*numbers: int, attempt: int = 1) -> CountingStore:
    store = CountingStore(memory_store())
    claim(store)
    for step in numbers:
        build_checkpoint(store, step, attempt)
    return store


def prune(store: Store, keep_last: int, keep_every: int = 0) -> int:
    verdicts = plan_retention(store, keep_last=keep_last, keep_every=keep_every)
    return execute_prune(store, verdicts).deleted_objects


def test_the_oldest_go_and_everything_of_them_goes() -> None:
    store = filled(9, 10, 99, 100, 1000)
    deleted = prune(store, keep_last=2)
    assert steps(store) == [1000, 100]
    assert deleted == 3 * (1 + 2 + 2)
    for step in (9, 10, 99):
        assert keys_of(store, ident(step)) == []
    for step in (100, 1000):
        assert verify_deep(load_checkpoint(store, ident(step))) == []


def test_a_dry_run_says_exactly_what_would_go_and_deletes_nothing() -> None:
    store = filled(10, 20, 30)
    before = [info.key for info in store.list_keys("")]
    verdicts = plan_retention(store, keep_last=1)
    dry = execute_prune(store, verdicts, dry_run=True)
    assert [info.key for info in store.list_keys("")] == before
    assert execute_prune(store, verdicts) == dry
    assert dry.deleted == (ident(20), ident(10))
    assert dry.deleted_objects == len(before) - len(list(store.list_keys("")))


def test_many_that_go_cost_two_requests_each_and_time_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 1000
    store = filled(count)
    manifest = read_manifest(store, ident(count))
    for step in range(1, count):
        manifest.id.CopyFrom(ident(step).to_proto())
        store.put(manifest_key(ident(step)), encode_manifest(manifest))
    verdicts = plan_retention(store, keep_last=5)
    compared = 0
    equal = CheckpointId.__eq__

    def counted(one: CheckpointId, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(CheckpointId, "__eq__", counted)
    store.reset()
    execute_prune(store, verdicts, dry_run=True)
    assert compared < 20 * count  # a list searched for each: half a million
    assert store.total < 2 * count + 50


def test_what_belongs_to_those_that_go_is_asked_several_at_a_time() -> None:
    class Meeting(CountingStore):
        """Answers a listing of one checkpoint's indexes only while another is asked for, too."""

        both = threading.Barrier(2)

        def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
            if prefix in going:
                self.both.wait(20)
            return super().list_keys(prefix, limit=limit)

    going = {index_prefix(ident(step)) for step in (10, 20, 30, 40)}
    store = Meeting(filled(10, 20, 30, 40, 50).inner)
    assert prune(store, keep_last=1) > 0
    assert steps(store) == [50]


def test_after_going_back_the_two_last_of_the_current_line_stay() -> None:
    """Case I69."""
    store = filled(20, 30)
    claim(store, parent=ident(20))
    build_checkpoint(store, 25, 2, parent=ident(20))
    prune(store, keep_last=2)
    assert steps(store) == [25, 20]


def test_what_a_new_attempt_resumed_from_stays_though_higher_steps_exist() -> None:
    store = filled(10, 20, 30)
    claim(store, parent=ident(10))
    prune(store, keep_last=1)
    assert steps(store) == [10]
    assert latest(store) == ident(10)


def test_unfinished_saves_do_not_count_and_are_left_alone() -> None:
    """Case I68."""
    store = filled(10)
    build_checkpoint(store, 20, commit=False)
    build_checkpoint(store, 30, groups=[0], commit=False)
    prune(store, keep_last=1)
    assert steps(store) == [10]
    assert try_commit(store, ident(20)).state is CommitState.COMMITTED


@pytest.mark.parametrize("keep_last", [0, -1])
def test_a_bad_policy_is_refused_before_any_request(keep_last: int) -> None:
    """Case I72."""
    store = filled(10, 20)
    store.reset()
    with pytest.raises(InvalidInputError):
        plan_retention(store, keep_last=keep_last)
    assert store.total == 0


def test_deleting_the_last_good_one_by_name_is_refused() -> None:
    store = filled(10, 20)
    with pytest.raises(RefusedError) as caught:
        plan_deletion(store, [ident(20), ident(10)])
    assert caught.value.code == "last-good"
    claim(store, parent=ident(10))
    with pytest.raises(RefusedError):
        plan_deletion(store, [ident(10)])
    execute_prune(store, plan_deletion(store, [ident(20)]))
    assert steps(store) == [10]


def test_the_newest_is_protected_also_while_a_fresh_attempt_has_committed_nothing() -> None:
    store = filled(10, 20)
    claim(store)
    assert latest(store) is None
    with pytest.raises(RefusedError) as caught:
        plan_deletion(store, [ident(20)])
    assert caught.value.code == "last-good"
    prune(store, keep_last=1)
    assert steps(store) == [20]


def test_deleting_what_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFoundError) as caught:
        plan_deletion(filled(10), [ident(5)])
    assert caught.value.code == "no-checkpoint"


def test_a_plan_that_was_overtaken_by_a_new_start_is_refused() -> None:
    store = filled(10, 20)
    verdicts = plan_retention(store, keep_last=1)
    claim(store, parent=ident(10))
    with pytest.raises(RefusedError) as caught:
        execute_prune(store, verdicts)
    assert caught.value.code == "last-good"
    assert steps(store) == [20, 10]


def test_nothing_is_deleted_while_the_latest_is_not_whole() -> None:
    """Case I67."""
    for damage in (segment_key(ident(20), 1), group_key(ident(20), 0, 2)):
        store = filled(10, 20)
        store.delete([damage])
        with pytest.raises(RefusedError) as caught:
            prune(store, keep_last=1)
        assert caught.value.code == "latest-damaged"
        assert damage in str(caught.value)
        assert steps(store) == [20, 10]
    store = filled(10, 20)
    store.put(manifest_key(ident(20)), b"junk")
    with pytest.raises(RefusedError):
        prune(store, keep_last=1)


def test_pinned_checkpoints_stay_and_cannot_be_deleted_by_name() -> None:
    """Case I70."""
    store = filled(10, 20, 30)
    pin(store, ident(10))
    pin(store, ident(10))
    assert list_pins(store) == {ident(10)}
    assert is_pinned(store, ident(10))
    prune(store, keep_last=1)
    assert steps(store) == [30, 10]
    with pytest.raises(RefusedError) as caught:
        plan_deletion(store, [ident(10)])
    assert caught.value.code == "pinned"
    unpin(store, ident(10))
    unpin(store, ident(10))
    assert not is_pinned(store, ident(10))
    prune(store, keep_last=1)
    assert steps(store) == [30]


def test_a_pin_set_after_the_plan_is_honoured() -> None:
    store = filled(10, 20)
    verdicts = plan_retention(store, keep_last=1)
    pin(store, ident(10))
    with pytest.raises(RefusedError) as caught:
        execute_prune(store, verdicts)
    assert caught.value.code == "pinned"


def test_what_does_not_exist_cannot_be_pinned() -> None:
    store = filled(10)
    with pytest.raises(NotFoundError):
        pin(store, ident(5))
    assert list_pins(store) == frozenset()


class DiesWhileDeleting(CountingStore):
    """Fails at the n-th key it is asked to delete."""

    left = 1_000_000

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self.left == 0:
                raise UnavailableError("killed")
            self.left -= 1
            self.inner.delete([key])


@pytest.mark.parametrize("at", range(5))  # manifest, two group indexes, two segments
def test_a_prune_cut_short_leaves_nothing_half_deleted_on_offer_and_the_sweep_finishes_it(at: int) -> None:
    """Case I73."""
    store = DiesWhileDeleting(memory_store())
    claim(store)
    for step in (10, 20):
        build_checkpoint(store, step)
    store.left = at
    with pytest.raises(UnavailableError):
        prune(store, keep_last=1)
    assert steps(store) == ([20, 10] if at == 0 else [20])
    for one in list_checkpoints(store):
        assert verify_deep(load_checkpoint(store, one.ident)) == []
    store.left = 1_000_000
    prune(store, keep_last=1)
    swept(store, older_than_s=0, clock=FakeClock(4e9))
    assert keys_of(store, ident(10)) == []
    assert verify_deep(load_checkpoint(store, ident(20))) == []


def test_segments_that_a_kept_checkpoint_needs_stay_until_it_goes() -> None:
    store = filled(10)
    borrower = borrow(store, 20, ident(10))
    verdicts = plan_retention(store, keep_last=1)
    report = execute_prune(store, verdicts)
    assert (report.deleted, report.held) == ((ident(10),), (ident(10),))
    kept = [*sorted(segment_key(ident(10), rank) for rank in (0, 1)), held_key(ident(10))]
    assert keys_of(store, ident(10)) == kept
    swept(store, older_than_s=0, clock=FakeClock(4e9))
    assert verify_deep(load_checkpoint(store, borrower)) == []
    build_checkpoint(store, 30)
    verdicts = plan_retention(store, keep_last=1)
    dry = execute_prune(store, verdicts, dry_run=True)
    assert dry.freed == (ident(10),)
    before = len(list(store.list_keys("")))
    report = execute_prune(store, verdicts)
    assert report == dry
    assert report.deleted_objects == before - len(list(store.list_keys("")))
    assert keys_of(store, ident(10)) == keys_of(store, ident(20)) == []


def test_the_sweep_takes_only_what_is_old_overtaken_and_needed_by_nobody() -> None:
    """Case I100."""
    store = filled(20)
    overtaken = build_checkpoint(store, 10, commit=False).ident
    pending = build_checkpoint(store, 30, commit=False).ident
    later = FakeClock(4e9)
    assert swept(store, older_than_s=3e9, clock=later) == 0  # too young
    assert swept(store, older_than_s=1e6, dry_run=True, clock=later) == 4
    assert keys_of(store, overtaken)
    assert swept(store, older_than_s=1e6, clock=later) == 4
    assert keys_of(store, overtaken) == []
    assert try_commit(store, pending).state is CommitState.COMMITTED
    abandoned = build_checkpoint(store, 40, commit=False).ident
    assert swept(store, older_than_s=1e6, clock=later) == 0  # may still be committed
    claim(store, parent=pending)
    assert swept(store, older_than_s=1e6, clock=later) == 4
    assert keys_of(store, abandoned) == []
    assert steps(store) == [30, 20]
    with pytest.raises(InvalidInputError):
        swept(store, older_than_s=-1)


def test_the_sweep_spares_what_the_newest_attempt_resumed_from_before_its_commit() -> None:
    """Case I100."""
    store = memory_store()
    claim(store)
    build_checkpoint(store, 20)
    sealed = build_checkpoint(store, 30, commit=False)  # resumed from by its sealed copies
    claim(store, parent=sealed.ident)
    late = FakeClock(4e9)
    assert swept(store, older_than_s=1e6, clock=late) == 0
    assert try_commit(store, sealed.ident).state is CommitState.COMMITTED
    other = build_checkpoint(store, 35, commit=False)
    claim(store, parent=other.ident)
    build_checkpoint(store, 40, attempt=3)  # from here on nobody needs 35
    assert swept(store, older_than_s=1e6, clock=late) > 0


def test_an_unreadable_manifest_stops_the_sweep_and_the_prune() -> None:
    """Case I102."""
    store = filled(10, 20, 30)
    left = build_checkpoint(store, 15, commit=False).ident
    store.put(manifest_key(ident(20)), b"junk")
    with pytest.raises(CorruptError):
        swept(store, older_than_s=0, clock=FakeClock(4e9))
    with pytest.raises(CorruptError):
        execute_prune(store, plan_deletion(store, [ident(10)]))
    assert exists(store, ident(10))
    assert keys_of(store, left)


def test_a_sweep_that_finds_nothing_reads_no_manifest() -> None:
    requests = []
    for count in (3, 30):
        store = filled(*range(10, 10 + count))
        store.reset()
        assert swept(store, older_than_s=0, clock=FakeClock(4e9)) == 0
        requests.append(store.total)
    assert requests == [5, 5]  # manifests, index, data, pins, probes: a page each


def test_what_the_dead_held_for_a_moment_protects_for_an_hour_and_is_then_swept() -> None:
    store = filled(10, 20)
    left = temporary_pin_key(ident(10), "0123456789abcdef")
    store.put(left, b"")
    store.put(f"{PROBE}0123", b"")
    pin(store, ident(20))
    put_at = store.head(left).modified_at
    assert prune(store, keep_last=1) == 0
    hour, young = FakeClock(put_at + STALE_S + 60), FakeClock(put_at + STALE_S - 60)
    assert swept(store, older_than_s=0, clock=young) == 0  # whoever holds it may live, whatever the grace
    assert swept(store, older_than_s=0, dry_run=True, clock=hour) == 1
    assert left in keys_of(store, ident(10))
    assert swept(store, older_than_s=0, clock=hour) == 1
    assert [info.key for prefix in (PINS, PROBE) for info in store.list_keys(prefix)] == [pin_key(ident(20))]
    assert prune(store, keep_last=1) > 0
    assert steps(store) == [20]


def test_a_damaged_checkpoint_can_itself_be_deleted() -> None:
    store = filled(10, 20)
    store.put(manifest_key(ident(10)), b"junk")
    execute_prune(store, plan_deletion(store, [ident(10)]))
    assert steps(store) == [20]
    assert list(store.list_keys(index_prefix(ident(10)))) == []
    swept(store, older_than_s=0, clock=FakeClock(4e9))
    assert keys_of(store, ident(10)) == []
    assert list(store.list_keys(layout_key(b"")[: len("layouts/")]))
