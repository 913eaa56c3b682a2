"""Retention: examples from the case collection (I11, I69, I70, I72)."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.errors import InvalidInputError
from ckpt.format.ids import CheckpointId
from ckpt.plan.retention import Verdict, newest_first, plan_prune


def idents(attempt: int, *steps: int) -> list[CheckpointId]:
    return [CheckpointId(step, attempt) for step in steps]


def kept(verdicts: list[Verdict]) -> list[int]:
    return [verdict.ident.step for verdict in verdicts if verdict.keep]


def test_order_is_by_number_across_digits() -> None:
    """Case I11."""
    all_ = idents(1, 9, 10, 99, 100, 1000, 20)
    verdicts = plan_prune(all_, line=newest_first(all_), keep_last=2)
    assert [v.ident.step for v in verdicts] == [1000, 100, 99, 20, 10, 9]
    assert kept(verdicts) == [1000, 100]


def test_the_last_are_counted_along_the_current_line() -> None:
    """Case I69."""
    old, new = idents(1, 10, 20, 30), idents(2, 25)
    verdicts = plan_prune(old + new, line=[new[0], old[1], old[0]], keep_last=2)
    assert kept(verdicts) == [25, 20]
    assert {v.ident.step: v.reason for v in verdicts} == {
        25: "latest",
        30: "on an abandoned branch",
        20: "among the last 2",
        10: "no rule keeps it",
    }


def test_the_parent_of_an_attempt_without_checkpoints_is_latest_and_stays() -> None:
    all_ = idents(1, 10, 20, 30)
    assert kept(plan_prune(all_, line=[all_[1], all_[0]], keep_last=1)) == [20]


def test_a_short_line_is_filled_up_from_other_branches() -> None:
    old, new = idents(1, 10, 20, 30), idents(2, 5)
    assert kept(plan_prune(old + new, line=new, keep_last=3)) == [5, 30, 20]


def test_a_fresh_attempt_without_checkpoints_still_leaves_the_newest() -> None:
    assert kept(plan_prune(idents(1, 10, 20, 30), line=[], keep_last=1)) == [30]


def test_keep_every_prefers_the_line_where_two_branches_have_the_step() -> None:
    old, new = idents(1, 10, 20, 30, 40), idents(2, 30, 35)
    verdicts = plan_prune(old + new, line=[new[1], new[0], old[1], old[0]], keep_last=1, keep_every=10)
    assert [str(v.ident) for v in verdicts if v.keep] == [
        "000000000035.a000002",
        "000000000030.a000002",
        "000000000040.a000001",
        "000000000020.a000001",
        "000000000010.a000001",
    ]


def test_pins_hold_beside_the_policy() -> None:
    """Case I70."""
    all_ = idents(1, 10, 20, 30, 40)
    verdicts = plan_prune(all_, line=newest_first(all_), keep_last=2, pinned=[all_[0], CheckpointId(7, 1)])
    assert kept(verdicts) == [40, 30, 10]


@pytest.mark.parametrize(
    "bad",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": "all"},
        {"keep_last": None},
        {"keep_last": True},
        {"keep_last": 1, "keep_every": -1},
    ],
)
def test_values_that_could_be_read_as_keep_nothing_or_keep_all_are_refused(bad: dict[str, Any]) -> None:
    """Case I72."""
    with pytest.raises(InvalidInputError) as caught:
        plan_prune(idents(1, 10), line=[], **bad)
    assert caught.value.code == "retention"


def test_huge_numbers_keep_all() -> None:
    """Case I72."""
    all_ = idents(1, 10, 20)
    assert kept(plan_prune(all_, line=newest_first(all_), keep_last=10**30)) == [20, 10]
