"""Arithmetic of the goodput ledger, and what of it a node puts when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.errors import CorruptError
from ckpt.ops.attempts import claim_attempt
from ckpt.ops.ledger import _spent, ledger_to_publish, load_ledger, put_ledger
from ckpt.plan.goodput import CLASSES, Ledger, Start, account
from ckpt.storage.lives import Life, sweep_lives, write_life
from ckpt.storage.staging import StagingDir
from tests.support.builders import FakeClock, memory_store

RUN = "run-1"
LIFE = Life(
    attempt=1,
    rank=0,
    world_size=2,
    node="n",
    step=11,
    phase="train",
    moved_at=0.0,
    seen_at=0.0,
    ended_at=None,
    closed=False,
    step_s=1.0,
)


def start(attempt: int, *, began: float, first: float, end: float, step: int, **more: object) -> Start:
    """As :class:`Start`, with short names."""
    usual = {"cause": "crash" if attempt > 1 else "start", "began_at": began, "first_step_at": first}
    return Start(attempt=attempt, ended_at=end, step=step, **{**usual, **more})  # type: ignore[arg-type]


def check(found: Ledger, wall_s: float) -> None:
    assert found.wall_s == pytest.approx(wall_s)
    assert sum(found.seconds.values()) == pytest.approx(wall_s)
    for row in found.rows:
        assert set(row.seconds) == set(CLASSES)
        assert all(seconds >= 0 for seconds in row.seconds.values())


def test_every_second_is_in_one_class() -> None:
    found = account(
        [
            start(1, began=0, first=10, end=110, step=101, save_s=5, data_s=15, partial_s=1),
            # 101 steps were made, 81 restored: 20 of them, and the partial one, are made again.
            start(2, began=110, first=130, end=230, step=181, from_step=81, is_running=True),
        ]
    )
    check(found, 230)
    first, second = found.rows
    per_step = (100 - 5 - 15 - 1) / 100
    assert first.seconds["lost"] == pytest.approx(1 + 20 * per_step)
    assert first.seconds["productive"] == pytest.approx(80 * per_step)
    assert (first.seconds["save"], first.seconds["data"], first.seconds["restart"]) == (5, 15, 10)
    assert (first.steps, first.lost_steps, second.steps, second.lost_steps) == (101, 20, 100, 0)
    assert (second.seconds["restart"], second.seconds["productive"]) == (20, 100)
    assert found.effective_ratio == pytest.approx((80 * per_step + 100) / 230)


def test_a_restart_that_goes_back_further_makes_steps_of_several_starts_lost() -> None:
    starts = [
        start(1, began=0, first=0, end=10, step=11),
        start(2, began=10, first=10, end=20, step=21, from_step=11),
        start(3, began=20, first=20, end=30, step=6, from_step=5),
    ]
    found = account(starts)
    check(found, 30)
    assert [row.lost_steps for row in found.rows] == [6, 10, 0]
    assert [row.seconds["lost"] for row in found.rows] == [pytest.approx(6), pytest.approx(10), 0]


def test_time_that_nobody_knows_of_is_told_apart() -> None:
    found = account(
        [
            start(1, began=0, first=10, end=50, step=41),
            # A start on new nodes: nothing is known of the end of the one before, but when it was seen last.
            start(2, began=70, first=80, end=90, step=51, from_step=41, cause="start"),
            # All records of its ranks are gone: only the next start knows when it ended.
            Start(attempt=3, from_step=51, cause="crash", began_at=90, first_step_at=95),
            start(4, began=120, first=130, end=140, step=62, from_step=51),
        ]
    )
    check(found, 140)
    assert found.seconds["down"] == 20
    assert found.seconds["unknown"] == 25
    assert found.rows[2].steps is None


def test_starts_that_leave_no_more_than_their_claim_are_restarts() -> None:
    found = account(
        [
            Start(attempt=1, claimed_at=5),
            Start(attempt=2, claimed_at=12),
            start(3, began=2, first=20, end=40, step=21, cause="start", claimed_at=18),
            Start(attempt=4, from_step=21, claimed_at=50),
            # What it knows of before is of attempt 3: the one before it has left nothing.
            start(5, began=40, first=60, end=70, step=31, from_step=21, claimed_at=58),
            Start(attempt=6, from_step=31, claimed_at=75),
        ]
    )
    check(found, 70)
    assert [row.attempt for row in found.rows] == [1, 2, 3, 4, 5, 6]
    assert [row.seconds["restart"] for row in found.rows] == [0, 7, 8, 10, 10, 5]
    assert (found.seconds["productive"], found.seconds["down"], found.seconds["unknown"]) == (30, 0, 0)


def test_starts_that_fail_before_their_first_step_are_restarts_and_traceless_ones_cost_no_row() -> None:
    found = account(
        [
            start(1, began=0, first=10, end=50, step=41),
            Start(attempt=2, from_step=41),
            Start(attempt=3, from_step=41, ended_at=80, step=41, partial_s=2),
            start(4, began=80, first=95, end=100, step=46, from_step=41),
        ]
    )
    check(found, 100)
    assert [row.attempt for row in found.rows] == [1, 3, 4]
    assert found.seconds["restart"] == 10 + 30 + 15


def test_clocks_that_differ_make_nothing_negative() -> None:
    found = account(
        [
            start(1, began=0, first=10, end=50, step=41, save_s=90, data_s=3),
            start(2, began=45, first=44, end=43, step=41, from_step=41),
        ]
    )
    check(found, 45)
    assert account([]).effective_ratio == 0


# --- records ---


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    found = StagingDir(tmp_path / "staging").ensure()
    found.run_dir(RUN).mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("moved_at", "ended_at", "expected"),
    [
        (98.0, 103.0, 7.0),  # in the same save as when it told last
        (101.0, 103.0, 6.0),  # in a later one
        (95.0, 95.0, 0.0),  # a hang in it: the attempt ended when it began
        (98.0, 99.0, 3.0),
    ],
)
def test_what_came_after_the_last_word_counts(moved_at: float, ended_at: float, expected: float) -> None:
    """By the last word, at 100, 4 s (5 s where it began at 95) had gone into saves."""
    spent = 5.0 if moved_at == 95.0 else 4.0
    life = replace(LIFE, phase="save", moved_at=moved_at, spent_at=100.0, spent_s={"save": spent})
    assert _spent(life, ("save", "stop"), ended_at) == pytest.approx(expected)


def note(
    staging: StagingDir, attempt: int, rank: int, *, seen_at: float, ended_at: float | None = None
) -> None:
    life = replace(LIFE, attempt=attempt, rank=rank, moved_at=seen_at, seen_at=seen_at, ended_at=ended_at)
    write_life(staging, RUN, life)


def test_a_node_puts_what_has_ended_once_and_the_rest_every_five_minutes(staging: StagingDir) -> None:
    clock, store = FakeClock(1000.0), memory_store()

    def put() -> list[tuple[int, int]]:
        lives = ledger_to_publish(staging, RUN, clock)
        if lives:
            put_ledger(store, staging, RUN, lives, clock=clock)
        return [(life.attempt, life.rank) for life in lives]

    assert put() == []
    for rank in range(2):
        note(staging, 1, rank, seen_at=1000.0)
    assert put() == [(1, 0), (1, 1)]  # the first word
    note(staging, 1, 0, seen_at=1100.0, ended_at=1100.0)
    clock.time = 1100.0
    assert put() == []  # one rank still runs
    clock.time = 1300.0
    assert put() == [(1, 0), (1, 1)]
    note(staging, 1, 1, seen_at=1301.0, ended_at=1301.0)
    assert put() == [(1, 0), (1, 1)]  # all have ended
    assert put() == []
    note(staging, 2, 0, seen_at=1400.0)
    assert put() == [(2, 0)]
    note(staging, 2, 0, seen_at=1402.0)
    note(staging, 3, 0, seen_at=1403.0)
    assert put() == [(2, 0)]  # its end was not seen, but a newer start has followed
    assert put() == [(3, 0)]
    sweep_lives(staging, RUN, before=3)
    assert sorted(path.name[:7] for path in (staging.run_dir(RUN) / "lives").iterdir()) == ["a000003"] * 2

    for _ in range(3):
        claim_attempt(store, parent=None, world_size=2, host="h", clock=clock)
    found = load_ledger(store, StagingDir(staging.path / "elsewhere"), RUN)
    # No rank has told of a first step, so all that is known of is restarts.
    assert [row.attempt for row in found.rows] == [1, 2, 3]
    assert found.seconds["restart"] == found.wall_s > 0
    key = next(info.key for info in store.list_keys("ledger/"))
    store.put(key, b'{"ranks": [{}]}')
    with pytest.raises(CorruptError):
        load_ledger(store, staging, RUN)
