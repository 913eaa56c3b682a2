"""How an attempt ended, put together from what the flushers of its ranks saw (:mod:`ckpt.storage.lives`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.storage.lives import FAILED_PHASE, Life

__all__ = ["Ends", "ends_of", "summary_of"]

_HANG_LEAST_S = 5.0  # between the last progress and the first death, from which on it was a hang
_HANG_STEPS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How the attempt before ended, as far as nodes saw it. Unix seconds.

    Attributes:
        attempt: which.
        cause: "crash", "hang" or "stop".
        failed_at: when it stopped getting on.
        reacted_at: when its second process ended, by itself or by the launcher.
        gone_at: when its last process ended.
        step: optimizer steps that it had completed.
    """

    attempt: int
    cause: str
    failed_at: float
    reacted_at: float
    gone_at: float
    step: int


def summary_of(lives: Sequence[Life]) -> dict[str, float | int | bool] | None:
    """What a node tells the others of ``lives``, of one attempt; the same size however many ranks it has."""
    if not lives:
        return None
    ended = sorted(life.ended_at or life.seen_at for life in lives)
    return {
        "attempt": lives[0].attempt,
        "world_size": lives[0].world_size,
        "moved_at": max(life.moved_at for life in lives),
        "first": ended[0],
        "second": ended[1] if len(ended) > 1 else ended[0],
        "last": ended[-1],
        "count": len(ended),
        "step": max(life.step for life in lives),
        "step_s": max(life.step_s for life in lives),
        "closed": all(life.closed and life.phase != FAILED_PHASE for life in lives),
    }


def ends_of(summaries: Sequence[Mapping[str, float | int | bool] | None]) -> Ends | None:
    """Put the nodes' summaries together; None where nothing is known of an attempt before.

    A stop is what every rank tells of: where the record of a rank is gone with its node, it was none.
    """
    known = [told for told in summaries if told is not None]
    newest = max((told["attempt"] for told in known), default=0)
    known = [told for told in known if told["attempt"] == newest]
    if not known:
        return None
    firsts = sorted(end for told in known for end in (told["first"], told["second"])[: int(told["count"])])
    first, gone_at = float(firsts[0]), float(max(told["last"] for told in known))
    moved_at = float(max(told["moved_at"] for told in known))
    patience = max(_HANG_LEAST_S, _HANG_STEPS * float(max(told["step_s"] for told in known)))
    is_complete = sum(told["count"] for told in known) >= known[0]["world_size"]
    if is_complete and all(told["closed"] for told in known):
        cause, failed_at = "stop", first
    elif first - moved_at > patience:
        cause, failed_at = "hang", moved_at
    else:
        cause, failed_at = "crash", first
    reacted_at = float(firsts[1]) if len(firsts) > 1 and cause != "hang" else first
    step = int(max(told["step"] for told in known))
    return Ends(
        attempt=int(newest),
        cause=cause,
        failed_at=failed_at,
        reacted_at=reacted_at,
        gone_at=gone_at,
        step=step,
    )
