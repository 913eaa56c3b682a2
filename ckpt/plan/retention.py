"""Which checkpoints a retention policy keeps, with the reason for each. Pure; deletes nothing.

The branch rule. A run that went back (restored 20 although 30 existed) has branches. The *current line* is
what ``latest`` names and, going back from it, everything it was trained from: the lower steps of its
attempt, then the checkpoint that attempt resumed from, the lower steps of *its* attempt, and so on. Of

    attempt 1: 10 20 30        attempt 2, resumed from 20: 25

the current line is 25, 20, 10; 30 lies on an abandoned branch. "The last n" are the first n of the line. Only
where the line is shorter than n, newest checkpoints of other branches fill the number up, so that never
fewer than min(n, all) remain. "Every m steps" keeps a step of an abandoned branch only where the line has no
checkpoint of that step itself. A pin holds wherever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ckpt.errors import InvalidInputError
from ckpt.format.ids import CheckpointId

__all__ = ["Verdict", "newest_first", "plan_prune"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one checkpoint, and why."""

    ident: CheckpointId
    keep: bool
    reason: str


def newest_first(idents: Iterable[CheckpointId]) -> list[CheckpointId]:
    """Return ``idents`` without repeats in the order of every listing: attempt, then step, descending."""
    return sorted(set(idents), key=lambda ident: (ident.attempt, ident.step), reverse=True)


def plan_prune(
    candidates: Iterable[CheckpointId],
    *,
    line: Sequence[CheckpointId],
    keep_last: int,
    keep_every: int = 0,
    pinned: Collection[CheckpointId] = (),
) -> list[Verdict]:
    """Return one verdict per candidate, newest first.

    Args:
        candidates: every committed checkpoint of one run, in any order.
        line: the current line, newest first; its first is what ``latest`` resolves to. Empty where ``latest``
            resolves to nothing (a fresh attempt that has committed nothing yet). What is not among the
            candidates is left out.
        keep_last: number of newest checkpoints to keep; at least 1, so that no policy can delete the only
            checkpoint a run could resume from. There is no value that means "all": do not call this then.
        keep_every: also keep steps divisible by this; 0 switches the rule off.
        pinned: kept whatever the policy says; they do not count towards ``keep_last``'s number unless they
            are among the last anyway.

    Raises:
        InvalidInputError: ``keep_last`` is below 1 or ``keep_every`` is negative, or either is no integer.
    """
    _check_policy(keep_last, keep_every)
    ordered = newest_first(candidates)
    present = set(ordered)
    current = [ident for ident in line if ident in present]
    on_line = set(current)
    line_steps = {ident.step for ident in current}
    rest = [ident for ident in ordered if ident not in on_line]
    last = set((current + rest)[:keep_last])
    pins = set(pinned)

    def judge(ident: CheckpointId) -> Verdict:
        if current and ident == current[0]:
            return Verdict(ident, keep=True, reason="latest")
        if ident in pins:
            return Verdict(ident, keep=True, reason="pinned")
        if ident in last:
            return Verdict(ident, keep=True, reason=f"among the last {keep_last}")
        hidden = ident not in on_line and ident.step in line_steps
        if keep_every and ident.step % keep_every == 0 and not hidden:
            return Verdict(ident, keep=True, reason=f"multiple of {keep_every}")
        if ident not in on_line and current:
            return Verdict(ident, keep=False, reason="on an abandoned branch")
        return Verdict(ident, keep=False, reason="no rule keeps it")

    return [judge(ident) for ident in ordered]


def _check_policy(keep_last: object, keep_every: object) -> None:
    for name, value, least in (("keep_last", keep_last, 1), ("keep_every", keep_every, 0)):
        if type(value) is not int or value < least:
            raise InvalidInputError(
                "bad retention policy", code="retention", option=name, value=value, least=least
            )
