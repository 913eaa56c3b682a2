"""Who stands still, and because of whom. Pure: facts of all ranks in, one verdict per rank out.

In lock-step training one rank that hangs soon makes all others wait in a collective. Named is the one that is
behind, never those that wait for it. These tell them apart, in this order: a process that the kernel has
stopped; a training thread that is not in a collective while others wait in one; where all are in collectives,
the one whose step or number of collectives is below that of the others, or that is in another function.

On GPUs the host often waits for the device, where a collective or a kernel does not end. That is told by the
function it is in (``torch.cuda.synchronize``, a stream's or an event's); whether the device computes or waits
for other ranks cannot be told from outside. So such a rank is named only where nobody else is to blame.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ckpt.errors import InvalidInputError

__all__ = ["LivenessPolicy", "RankFacts", "RankState", "RankVerdict", "judge_ranks"]

RankState = Literal["ok", "slow", "waiting", "hung", "dead", "silent", "ended"]

_SLOW_LEAST_S = 0.02  # differences below this are noise of a scheduler
_MOST_NAMED = 8
# Source: torch/cuda/__init__.py, torch/cuda/streams.py, torch/accelerator/__init__.py of torch 2.13.
_ON_DEVICE = re.compile(r"synchronize \((__init__|streams)\.py:\d+\)", re.ASCII)
_MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessPolicy:
    """When patience ends.

    Attributes:
        floor_s: a rank that stands still for less is never called hung.
        factor: nor one that stands still for less than this many median steps.
        first_s: the same while no rank has completed steps to measure by (compilation, first batches).
        silent_s: nothing was heard of a rank for so long.
        slow_ratio: a phase that takes so many times the median of the cohort's other ranks is slow.
    """

    floor_s: float = 3.0
    factor: float = 3.0
    first_s: float = 600.0
    silent_s: float = 6.0
    slow_ratio: float = 1.5

    def __post_init__(self) -> None:
        if min(self.floor_s, self.factor, self.first_s, self.silent_s) <= 0 or self.slow_ratio <= 1:
            raise InvalidInputError("times and factors of liveness must be above 0, slow_ratio above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What is known of a rank now.

    Attributes:
        world_size: number of ranks of the job.
        cohort: ranks of one cohort do the same work.
        step: optimizer steps completed.
        still_s: seconds since the training thread changed its phase or completed a step.
        age_s: seconds since the rank was heard of.
        step_s: median duration of its steps; 0: not known.
        busy_s: of that, outside collectives.
        phase_s: median seconds per step, by phase.
        collectives: sequence number of the process group; 0: not known.
        waits: the training thread is in a collective.
        computes: the training thread uses the CPU.
        is_stopped: SIGSTOP, or a debugger.
        ended: "", "closed" or "died".
        where: for the reason.
    """

    rank: int
    world_size: int = 1
    cohort: str = ""
    step: int = 0
    phase: str = ""
    still_s: float = 0.0
    age_s: float = 0.0
    step_s: float = 0.0
    busy_s: float = 0.0
    phase_s: Mapping[str, float] = field(default_factory=dict)
    collectives: int = 0
    waits: bool = False
    computes: bool = False
    is_stopped: bool = False
    ended: str = ""
    where: str = ""

    @property
    def call(self) -> str:
        """The function that the training thread is in."""
        return self.where.partition(" ")[0]

    @property
    def waits_for_device(self) -> bool:
        """Whether the host waits for the GPU, by the innermost function of the training thread."""
        return _ON_DEVICE.match(self.where) is not None

    @property
    def place(self) -> tuple[int, int]:
        """How far it is, for comparison."""
        return self.step, self.collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVerdict:
    """``reason`` is for people; empty where the state says it all."""

    rank: int
    state: RankState
    reason: str = ""


def judge_ranks(ranks: Sequence[RankFacts], policy: LivenessPolicy) -> list[RankVerdict]:
    """Return a verdict for each of ``ranks`` (of one attempt, each once), in their order."""
    found: dict[int, RankVerdict] = {}
    for facts in ranks:
        if (verdict := _by_itself(facts, policy)) is not None:
            found[facts.rank] = verdict
    running = [facts for facts in ranks if facts.rank not in found]
    still = [facts for facts in running if facts.still_s > _patience(ranks, policy)]
    for verdict in _judge_still(still, running, list(found.values()), ranks):
        found[verdict.rank] = verdict
    slow = _slow_ranks([facts for facts in running if facts.rank not in found], policy)
    return [
        found.get(facts.rank)
        or RankVerdict(
            rank=facts.rank, state="slow" if facts.rank in slow else "ok", reason=slow.get(facts.rank, "")
        )
        for facts in ranks
    ]


def _patience(ranks: Sequence[RankFacts], policy: LivenessPolicy) -> float:
    known = [facts.step_s for facts in ranks if facts.step_s > 0]
    return max(policy.floor_s, policy.factor * median(known)) if known else policy.first_s


def _by_itself(facts: RankFacts, policy: LivenessPolicy) -> RankVerdict | None:
    """What needs no comparison."""
    if facts.ended:
        state: RankState = "ended" if facts.ended == "closed" else "dead"
        reason = "" if state == "ended" else f"the process died in phase {facts.phase} of step {facts.step}"
        return RankVerdict(rank=facts.rank, state=state, reason=reason)
    if facts.age_s > policy.silent_s:
        reason = f"nothing heard for {facts.age_s:.0f} s: its flusher or its node is gone"
        return RankVerdict(rank=facts.rank, state="silent", reason=reason)
    if facts.is_stopped and facts.still_s > min(1.0, policy.floor_s):
        reason = f"the process is stopped (SIGSTOP or a debugger) in phase {facts.phase}"
        return RankVerdict(rank=facts.rank, state="hung", reason=reason)
    return None


def _judge_still(
    still: Sequence[RankFacts],
    running: Sequence[RankFacts],
    known: Sequence[RankVerdict],
    ranks: Sequence[RankFacts],
) -> list[RankVerdict]:
    if not still:
        return []
    culprits = sorted(v.rank for v in known if v.state in ("hung", "dead", "silent"))
    waiting = [facts for facts in still if facts.waits]
    on_device = [facts for facts in still if not facts.waits and facts.waits_for_device]
    others = [facts for facts in still if not facts.waits and not facts.waits_for_device]
    if others or culprits:
        waiting += on_device
    else:
        others = on_device
    verdicts = [_judge_outside(facts, bool(waiting or culprits)) for facts in others]
    culprits += [verdict.rank for verdict in verdicts if verdict.state == "hung"]
    late = [facts for facts in running if facts not in still and waiting and facts.place < waiting[0].place]
    if culprits or late:
        named = sorted(culprits or [facts.rank for facts in late])
        return verdicts + [_waits_for(facts, f"for {_names(named)}") for facts in waiting]
    return verdicts + _judge_all_waiting(waiting, ranks)


def _judge_outside(facts: RankFacts, is_waited_for: bool) -> RankVerdict:
    """One that stands still outside collectives: hung, unless it just computes for long and nobody waits."""
    what = f"no progress for {facts.still_s:.1f} s in phase {facts.phase}"
    where = f", at {facts.where}" if facts.where else ""
    if facts.waits_for_device:
        why = "waits for the device, where a kernel or a collective does not end"
        return RankVerdict(rank=facts.rank, state="hung", reason=f"{what}: {why}{where}")
    if is_waited_for or not facts.computes:
        return RankVerdict(rank=facts.rank, state="hung", reason=f"{what}{where}")
    return RankVerdict(rank=facts.rank, state="ok", reason=f"{what}, but it computes{where}")


def _judge_all_waiting(waiting: Sequence[RankFacts], ranks: Sequence[RankFacts]) -> list[RankVerdict]:
    """All that stand still are in collectives: somebody is behind, or elsewhere, or they do not match."""
    if not waiting:
        return []
    furthest = max(facts.place for facts in waiting)
    behind = [facts for facts in waiting if facts.place < furthest]
    if behind:
        return _name_some(
            waiting, behind, f"others are at collective {furthest[1]} of step {furthest[0]}, it is at %s"
        )
    if len(ranks) < waiting[0].world_size:
        return [_waits_for(facts, "for a rank of another node") for facts in waiting]
    if len(waiting) < len(ranks):
        return [_waits_for(facts, "for a rank that still moves") for facts in waiting]
    calls = Counter(facts.call for facts in waiting)
    usual, count = calls.most_common(1)[0]
    if 2 * count > len(waiting) > count:
        odd = [facts for facts in waiting if facts.call != usual]
        return _name_some(waiting, odd, f"others wait in {usual}, it is at %s")
    return [
        RankVerdict(
            rank=facts.rank,
            state="hung",
            reason=f"all ranks wait in collectives and none is behind: they do not match; at {facts.where}",
        )
        for facts in waiting
    ]


def _name_some(waiting: Sequence[RankFacts], hung: Sequence[RankFacts], reason: str) -> list[RankVerdict]:
    named = _names([facts.rank for facts in hung])
    return [
        RankVerdict(
            rank=facts.rank,
            state="hung",
            reason=reason % f"{facts.collectives} of step {facts.step}, in {facts.where}",
        )
        if facts in hung
        else _waits_for(facts, f"for {named}")
        for facts in waiting
    ]


def _waits_for(facts: RankFacts, whom: str) -> RankVerdict:
    return RankVerdict(rank=facts.rank, state="waiting", reason=f"waits {whom}; at {facts.where}")


def _slow_ranks(ranks: Sequence[RankFacts], policy: LivenessPolicy) -> dict[int, str]:
    """Those that take longer than the others of their cohort, with the worst reason."""
    found: dict[int, tuple[float, str]] = {}
    for cohort in {facts.cohort for facts in ranks}:
        members = [facts for facts in ranks if facts.cohort == cohort and facts.step_s > 0]
        for name in sorted({name for facts in members for name in _durations(facts)}):
            durations = [_durations(facts).get(name, 0.0) for facts in members]
            for facts, mine, usual in zip(members, durations, _usual(durations), strict=True):
                excess = mine - usual
                if mine > policy.slow_ratio * usual and excess > max(_SLOW_LEAST_S, 0.05 * facts.step_s):
                    text = f"{name} takes {mine:.3f} s per step, others {usual:.3f} s"
                    found[facts.rank] = max(found.get(facts.rank, (0.0, "")), (excess, text))
    return {rank: text for rank, (_, text) in found.items()}


def _usual(durations: Sequence[float]) -> list[float]:
    """For each duration the median of the others; of many, that of all, which hardly differs."""
    if len(durations) > _MANY:
        return [median(durations)] * len(durations)
    others = [[*durations[:i], *durations[i + 1 :]] for i in range(len(durations))]
    return [median(rest) if rest else mine for rest, mine in zip(others, durations, strict=True)]


def _durations(facts: RankFacts) -> dict[str, float]:
    """Comparable durations: "train" holds the waiting for others, so its busy part stands for it."""
    return {**{name: s for name, s in facts.phase_s.items() if name != "train"}, "own work": facts.busy_s}


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
