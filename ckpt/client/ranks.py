"""Pulses of ranks, as the wire has them, judged: what server and command share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt.plan.liveness import LivenessPolicy, RankFacts, RankState, RankVerdict, judge_ranks
from ckpt_proto.v1 import staging_pb2

__all__ = ["RANK_STATES", "judge_pulses", "newest_attempts"]

_Health = staging_pb2.RankHealth
_Pulse = staging_pb2.RankPulse

RANK_STATES: dict[RankState, staging_pb2.RankHealth.State] = {
    "ok": _Health.STATE_OK,
    "slow": _Health.STATE_SLOW,
    "waiting": _Health.STATE_WAITING,
    "hung": _Health.STATE_HUNG,
    "dead": _Health.STATE_DEAD,
    "silent": _Health.STATE_SILENT,
    "ended": _Health.STATE_ENDED,
}
_ENDED = {_Pulse.ENDED_CLOSED: "closed", _Pulse.ENDED_DIED: "died"}


def newest_attempts(
    pulses: Iterable[tuple[staging_pb2.RankPulse, float]],
) -> dict[str, list[tuple[staging_pb2.RankPulse, float]]]:
    """Group (pulse, age in seconds) by run; of each rank of a run's newest attempt, the freshest one."""
    by_run: dict[str, dict[int, tuple[staging_pb2.RankPulse, float]]] = {}
    newest: dict[str, int] = {}
    for pulse, age_s in pulses:
        run = pulse.run_key
        if pulse.attempt > newest.get(run, -1):
            newest[run], by_run[run] = pulse.attempt, {}
        if pulse.attempt == newest[run]:
            known = by_run[run].get(pulse.rank)
            if known is None or age_s < known[1]:
                by_run[run][pulse.rank] = (pulse, age_s)
    return {run: [ranks[rank] for rank in sorted(ranks)] for run, ranks in sorted(by_run.items())}


def judge_pulses(
    pulses: Sequence[tuple[staging_pb2.RankPulse, float]], policy: LivenessPolicy
) -> list[RankVerdict]:
    """Judge the ranks of one attempt of one run from (pulse, age in seconds)."""
    return judge_ranks([_facts(pulse, age_s) for pulse, age_s in pulses], policy)


def _facts(pulse: staging_pb2.RankPulse, age_s: float) -> RankFacts:
    ended = _ENDED.get(pulse.ended, "")
    return RankFacts(
        rank=pulse.rank,
        world_size=pulse.world_size,
        cohort=pulse.cohort,
        step=pulse.step,
        phase=pulse.phase,
        still_s=pulse.still_s,
        age_s=age_s,
        step_s=pulse.step_s,
        busy_s=pulse.busy_s,
        phase_s=dict(pulse.phase_s),
        collectives=pulse.collectives,
        waits=pulse.waits,
        computes=pulse.computes,
        is_stopped=pulse.is_stopped,
        ended=ended,
        where=pulse.where,
    )
