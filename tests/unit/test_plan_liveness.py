"""Verdicts on ranks: pure, so every situation in one line."""

from __future__ import annotations

import pytest

from ckpt.errors import InvalidInputError
from ckpt.plan.liveness import LivenessPolicy, RankFacts, judge_ranks

POLICY = LivenessPolicy(floor_s=3.0, factor=3.0)
WHERE = "all_reduce (distributed_c10d.py:1) < step (train.py:7)"


def rank(number: int, **more: object) -> RankFacts:
    usual = {"rank": number, "world_size": 4, "step": 10, "phase": "train", "step_s": 0.5, "busy_s": 0.2}
    return RankFacts(**{**usual, **more})  # type: ignore[arg-type]


def waiting(number: int, **more: object) -> RankFacts:
    return rank(number, **{"still_s": 5.0, "waits": True, "where": WHERE, "collectives": 40, **more})


def states(*ranks: RankFacts, policy: LivenessPolicy = POLICY) -> list[str]:
    return [verdict.state for verdict in judge_ranks(ranks, policy)]


def reasons(*ranks: RankFacts) -> list[str]:
    return [verdict.reason for verdict in judge_ranks(ranks, POLICY)]


def test_moving_ranks_are_ok() -> None:
    assert states(rank(0), rank(1, still_s=2.9)) == ["ok", "ok"]


def test_stopped_process_is_named_at_once_and_alone() -> None:
    found = [waiting(0), rank(1, is_stopped=True, still_s=1.5), waiting(2), waiting(3, still_s=1.0)]
    assert states(*found) == ["waiting", "hung", "waiting", "ok"]
    assert "for rank 1" in reasons(*found)[0]


def test_rank_outside_collectives_is_named_even_if_it_computes() -> None:
    busy = rank(2, still_s=5.0, computes=True, phase="data", where="read (dataset.py:3)")
    assert states(waiting(0), waiting(1), busy, waiting(3)) == ["waiting", "waiting", "hung", "waiting"]
    assert "at read (dataset.py:3)" in reasons(waiting(0), busy)[1]


def test_patience_grows_with_the_steps() -> None:
    slow = [rank(i, step_s=4.0, still_s=10.0) for i in range(2)]
    assert states(*slow) == ["ok", "ok"]
    assert states(*[rank(i, step_s=4.0, still_s=13.0) for i in range(2)]) == ["hung", "hung"]


def test_before_the_first_step_patience_is_long() -> None:
    assert states(rank(0, step_s=0.0, still_s=100.0)) == ["ok"]
    assert states(rank(0, step_s=0.0, still_s=700.0)) == ["hung"]


def test_long_evaluation_on_all_ranks_is_no_hang() -> None:
    verdicts = judge_ranks([rank(i, still_s=60.0, computes=True) for i in range(4)], POLICY)
    assert [verdict.state for verdict in verdicts] == ["ok"] * 4
    assert "it computes" in verdicts[0].reason


def test_rank_behind_in_collectives_is_named() -> None:
    found = [waiting(0), waiting(1, collectives=39), waiting(2), waiting(3)]
    assert states(*found) == ["waiting", "hung", "waiting", "waiting"]
    assert "others are at collective 40" in reasons(*found)[1]


def test_rank_behind_in_steps_that_is_not_in_a_collective_any_longer_is_what_others_wait_for() -> None:
    found = [waiting(0), rank(1, step=9, still_s=0.5), waiting(2), waiting(3)]
    assert states(*found) == ["waiting", "ok", "waiting", "waiting"]
    assert "for rank 1" in reasons(*found)[0]


def test_rank_in_another_collective_is_named_by_majority() -> None:
    odd = waiting(3, where="recv (distributed_c10d.py:2) < step (train.py:9)")
    assert states(waiting(0), waiting(1), waiting(2), odd) == ["waiting", "waiting", "waiting", "hung"]
    assert states(waiting(0, world_size=2), waiting(1, world_size=2, where="recv (x)")) == ["hung", "hung"]


def test_ranks_of_one_node_that_all_wait_do_not_accuse_each_other() -> None:
    found = [waiting(0, world_size=8), waiting(1, world_size=8)]
    assert states(*found) == ["waiting", "waiting"]
    assert "another node" in reasons(*found)[0]


SYNCHRONIZE = "synchronize (__init__.py:1085) < train_step (train.py:52) < main (train.py:160)"
EVENT = "synchronize (streams.py:231) < logged_loss (train.py:61) < main (train.py:160)"


def test_ranks_whose_hosts_wait_for_the_device_wait_for_the_one_that_is_stuck_elsewhere() -> None:
    ranks = [
        rank(0, still_s=9.0, where=SYNCHRONIZE),
        rank(1, still_s=9.0, where="read (loader.py:7)"),
        rank(2, still_s=9.0, where=EVENT),
    ]
    found = judge_ranks(ranks, POLICY)
    assert [verdict.state for verdict in found] == ["waiting", "hung", "waiting"]
    assert "for rank 1" in found[0].reason


def test_hang_on_the_device_is_called_so_where_nobody_else_is_to_blame() -> None:
    found = judge_ranks([rank(n, still_s=9.0, where=SYNCHRONIZE) for n in range(2)], POLICY)
    assert [verdict.state for verdict in found] == ["hung", "hung"]
    assert all("waits for the device" in verdict.reason for verdict in found)
    # One whose kernel does not end, while the others wait in a collective on the host.
    others = [rank(n, still_s=9.0, waits=True, where="all_reduce (distributed_c10d.py:9)") for n in (0, 1)]
    found = judge_ranks([*others, rank(2, still_s=9.0, where=EVENT)], POLICY)
    assert [verdict.state for verdict in found] == ["waiting", "waiting", "hung"]
    # A function of that name elsewhere is the program's own affair.
    (mine,) = judge_ranks([rank(0, still_s=9.0, where="synchronize (my_cache.py:3)")], POLICY)
    assert "device" not in mine.reason


def test_dead_silent_and_ended() -> None:
    found = [waiting(0), rank(1, ended="died"), rank(2, age_s=30.0), rank(3, ended="closed")]
    assert states(*found) == ["waiting", "dead", "silent", "ended"]
    assert "for ranks 1, 2" in reasons(*found)[0]


def test_straggler_is_named_by_the_phase_it_is_slow_in() -> None:
    found = [rank(i, phase_s={"data": 0.4 if i == 2 else 0.1, "train": 0.3}) for i in range(4)]
    assert states(*found) == ["ok", "ok", "slow", "ok"]
    assert reasons(*found)[2] == "data takes 0.400 s per step, others 0.100 s"


def test_straggler_in_lock_step_is_named_by_what_is_its_own_work() -> None:
    found = [rank(i, busy_s=0.48 if i == 1 else 0.2, phase_s={"train": 0.5}) for i in range(4)]
    assert states(*found) == ["ok", "slow", "ok", "ok"]
    assert "own work" in reasons(*found)[1]


def test_ranks_that_do_other_work_are_not_compared() -> None:
    found = [rank(i, busy_s=0.48 if i < 2 else 0.2, cohort="ab"[i // 2]) for i in range(4)]
    assert states(*found) == ["ok"] * 4


def test_many_ranks_are_compared_with_the_median_of_all() -> None:
    found = [rank(i, world_size=200, busy_s=0.45 if i == 77 else 0.2) for i in range(200)]
    verdicts = judge_ranks(found, POLICY)
    assert [verdict.rank for verdict in verdicts if verdict.state == "slow"] == [77]


@pytest.mark.parametrize("wrong", [{"floor_s": 0.0}, {"factor": -1.0}, {"slow_ratio": 1.0}])
def test_nonsense_policies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        LivenessPolicy(**wrong)
