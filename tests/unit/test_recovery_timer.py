"""Arithmetic of a recovery's phases."""

from __future__ import annotations

import pytest

from ckpt.errors import CorruptError, NotFoundError
from ckpt.ops.ends import Ends, ends_of, summary_of
from ckpt.ops.recovery import RankRecovery, load_recovery, summarize
from ckpt.storage.lives import Life
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.recovery_timer import RecoveryTimer
from tests.support.builders import memory_store

GROUP = common_pb2.NodeGroup(index=0, count=1, ranks=[0])


def life(rank: int, *, ended_at: float | None, moved_at: float, **more: object) -> Life:
    usual = {"attempt": 2, "world_size": 4, "node": "n", "step": 9, "phase": "train", "step_s": 0.5}
    rest = {"seen_at": moved_at, "closed": False, **usual, **more}
    return Life(rank=rank, ended_at=ended_at, moved_at=moved_at, **rest)  # type: ignore[arg-type]


def test_crash_begins_with_the_first_death() -> None:
    a = summary_of([life(0, ended_at=103.0, moved_at=100.0), life(1, ended_at=100.2, moved_at=100.0)])
    b = summary_of(
        [life(2, ended_at=102.5, moved_at=100.1, step=10), life(3, ended_at=104.0, moved_at=100.1)]
    )
    found = ends_of([a, None, b])
    assert found == Ends(attempt=2, cause="crash", failed_at=100.2, reacted_at=102.5, gone_at=104.0, step=10)


def test_hang_begins_with_the_last_progress() -> None:
    found = ends_of([summary_of([life(r, ended_at=160.0 + r, moved_at=100.0 + r) for r in range(3)])])
    assert found == Ends(attempt=2, cause="hang", failed_at=102.0, reacted_at=160.0, gone_at=162.0, step=9)


def test_slow_steps_are_no_hang() -> None:
    found = ends_of([summary_of([life(0, ended_at=120.0, moved_at=100.0, step_s=10.0)])])
    assert found is not None
    assert found.cause == "crash"


def test_stop_begins_when_managers_were_closed_and_older_attempts_do_not_count() -> None:
    old = summary_of([life(5, ended_at=50.0, moved_at=50.0, attempt=1)])
    closed = [life(r, ended_at=100.0 + r, moved_at=99.0, closed=True) for r in range(4)]
    found = ends_of([old, summary_of(closed[:2]), summary_of(closed[2:])])
    assert found == Ends(attempt=2, cause="stop", failed_at=100.0, reacted_at=101.0, gone_at=103.0, step=9)


@pytest.mark.parametrize(
    "lives",
    [
        [
            life(r, ended_at=100.0, moved_at=99.0, closed=True) for r in range(3)
        ],  # a node is lost with its disk
        [life(r, ended_at=100.0, moved_at=99.0, closed=True, phase="failed") for r in range(4)],
    ],
    ids=["one of four is gone", "closed because of an error"],
)
def test_managers_that_close_because_of_a_failure_are_no_stop(lives: list[Life]) -> None:
    found = ends_of([summary_of(lives)])
    assert found is not None
    assert (found.cause, found.failed_at) == ("crash", 100.0)


def test_nothing_known_of_before() -> None:
    assert ends_of([None, summary_of([])]) is None


def test_rank_whose_end_nobody_saw_counts_as_of_when_it_was_seen() -> None:
    found = ends_of([summary_of([life(0, ended_at=None, moved_at=100.0)])])
    assert found is not None
    assert found.failed_at == 100.0


def timed(ends: Ends | None, *, started_at: float, restore_at: float, step: int = 5) -> RankRecovery:
    timer = RecoveryTimer()
    timer.begin()
    timer._started_at, timer._restore_at = started_at, restore_at
    for phase in (
        "locate",
        "read",
        "reshard",
        "locate",
        "read",
        "reshard",
    ):  # a damaged checkpoint, then one more
        timer.enter(phase)
    timer.count({"local": 5})
    timer.count({"local": 5, "remote": 1})
    timer.restored(attempt=3, rank=0, world_size=1, group=GROUP, checkpoint="x", step=step, ends=ends)
    assert timer.is_waiting
    record = timer.first_step()
    assert not timer.is_waiting
    return record


ENDS = Ends(attempt=2, cause="crash", failed_at=100.0, reacted_at=102.0, gone_at=103.0, step=9)


def test_phases_follow_each_other_without_gap() -> None:
    record = timed(ENDS, started_at=110.0, restore_at=118.0)
    assert record.failed_at == pytest.approx(100.0)
    named = {name: record.phases[name] for name in ("detect", "decide", "reschedule", "re-init")}
    assert named == pytest.approx({"detect": 2.0, "decide": 1.0, "reschedule": 7.0, "re-init": 8.0})
    assert sum(record.phases.values()) == pytest.approx(record.first_step_at - record.failed_at)
    assert (record.lost_steps, record.nbytes) == (4, {"local": 10, "remote": 1})


@pytest.mark.parametrize(
    ("ends", "started_at"),
    [
        (ENDS, 90.0),  # a warm spare
        (ENDS, 101.0),  # began before the launcher was done with the others
        (
            Ends(attempt=2, cause="crash", failed_at=130.0, reacted_at=131.0, gone_at=132.0, step=9),
            110.0,
        ),  # a clock is ahead
    ],
)
def test_no_phase_is_negative_and_the_sum_holds(ends: Ends, started_at: float) -> None:
    record = timed(ends, started_at=started_at, restore_at=118.0)
    assert all(seconds >= 0 for seconds in record.phases.values())
    assert sum(record.phases.values()) == pytest.approx(record.first_step_at - record.failed_at)
    assert record.failed_at == pytest.approx(min(ends.failed_at, 118.0))


def test_second_restore_of_a_process_is_timed_from_its_call() -> None:
    timer = RecoveryTimer()
    for attempt in (1, 2):
        timer.begin()
        timer.restored(attempt=attempt, rank=0, world_size=1, group=GROUP, checkpoint=None, step=0, ends=ENDS)
        record = timer.first_step()
    assert record.cause == "restore"
    assert set(record.phases) == {"locate", "first step"}


def record(rank: int, **phases: float) -> RankRecovery:
    return RankRecovery(
        attempt=3,
        rank=rank,
        world_size=2,
        node="n",
        group=0,
        group_count=1,
        group_ranks=[0, 1],
        cause="crash",
        failed_at=100.0,
        first_step_at=100.0 + sum(phases.values()),
        checkpoint=None,
        lost_steps=rank,
        phases=phases,
        nbytes={"local": 3},
    )


def test_summary_has_maximum_spread_and_the_critical_rank() -> None:
    found = summarize([record(0, detect=1.0, read=5.0), record(1, detect=1.0, read=2.0, locate=3.5)])
    assert (found.critical_rank, found.wall_s, found.lost_steps) == (1, pytest.approx(6.5), 1)
    by_name = {phase.name: phase for phase in found.phases}
    assert (by_name["read"].max_s, by_name["read"].spread_s, by_name["read"].rank) == (5.0, 3.0, 0)
    assert sum(phase.critical_s for phase in found.phases) == pytest.approx(found.wall_s)
    assert found.nbytes == {"local": 6}
    with pytest.raises(NotFoundError):
        summarize([])


def test_damaged_record_in_the_store_is_an_error_and_foreign_keys_are_none() -> None:
    store = memory_store()
    store.put("recovery/notes.txt", b"")
    with pytest.raises(NotFoundError):
        load_recovery(store)
    store.put("recovery/999996.000003/group-00000-of-00001.json", b"{")
    with pytest.raises(CorruptError):
        load_recovery(store)
