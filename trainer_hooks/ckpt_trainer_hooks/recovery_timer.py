"""Times a start of the run on this rank: from the failure of the attempt before to this one's first step.

The phases follow each other without gaps, so they add up to the wall time:

detect       the attempt before stopped getting on, until the launcher began to end its other processes
decide       until the last of them had ended
reschedule   until this process began
re-init      until restore() was called: imports, process group, model
locate       until the checkpoint is chosen, and what this rank needs of it is known
read         bytes, verified, straight into the live tensors (boxes are cut on the way)
reshard      what comes after the bytes: optimizer state, random numbers, attempt number, arena
first step   until the first step is complete
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.clock import SystemClock
from ckpt.ops.recovery import RankRecovery
from ckpt.storage.lives import Life
from ckpt.storage.procfs import process_started_at
from ckpt_proto.v1 import common_pb2

__all__ = ["Ends", "RecoveryTimer", "ends_of"]

_HANG_LEAST_S = 5.0  # between the last progress and the first death, from which on it was a hang
_HANG_STEPS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """How the attempt before ended, as far as nodes saw it. Unix seconds.

    Attributes:
        cause: "crash", "hang" or "stop".
        failed_at: when it stopped getting on.
        reacted_at: when its second process ended, by itself or by the launcher.
        gone_at: when its last process ended.
        step: optimizer steps that it had completed.
    """

    cause: str
    failed_at: float
    reacted_at: float
    gone_at: float
    step: int


def summary_of(lives: Sequence[Life]) -> dict[str, float | int | bool] | None:
    """What a node tells the others of ``lives``; the same size however many ranks it has."""
    if not lives:
        return None
    ended = sorted(life.ended_at or life.seen_at for life in lives)
    return {
        "attempt": lives[0].attempt,
        "moved_at": max(life.moved_at for life in lives),
        "first": ended[0],
        "second": ended[1] if len(ended) > 1 else ended[0],
        "last": ended[-1],
        "count": len(ended),
        "step": max(life.step for life in lives),
        "step_s": max(life.step_s for life in lives),
        "closed": all(life.closed for life in lives),
    }


def ends_of(summaries: Sequence[Mapping[str, float | int | bool] | None]) -> Ends | None:
    """Put the nodes' summaries together; None where nothing is known of an attempt before."""
    known = [told for told in summaries if told is not None]
    newest = max((told["attempt"] for told in known), default=0)
    known = [told for told in known if told["attempt"] == newest]
    if not known:
        return None
    firsts = sorted(end for told in known for end in (told["first"], told["second"])[: int(told["count"])])
    first, gone_at = float(firsts[0]), float(max(told["last"] for told in known))
    moved_at = float(max(told["moved_at"] for told in known))
    patience = max(_HANG_LEAST_S, _HANG_STEPS * float(max(told["step_s"] for told in known)))
    if all(told["closed"] for told in known):
        cause, failed_at = "stop", first
    elif first - moved_at > patience:
        cause, failed_at = "hang", moved_at
    else:
        cause, failed_at = "crash", first
    reacted_at = float(firsts[1]) if len(firsts) > 1 and cause != "hang" else first
    step = int(max(told["step"] for told in known))
    return Ends(cause=cause, failed_at=failed_at, reacted_at=reacted_at, gone_at=gone_at, step=step)


class RecoveryTimer:
    """Used by the training thread. A phase lasts until the next one begins."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._started_at = process_started_at(os.getpid()) or self._clock.now()
        self._times: dict[str, float] = {}
        self._nbytes: dict[str, int] = {}
        self._phase = ""
        self._since = 0.0
        self._restore_at = 0.0
        self._ends: Ends | None = None
        self._pending: RankRecovery | None = None
        self._is_first = True  # a second restore() of this process is no start

    def begin(self) -> None:
        """restore() was called."""
        self._restore_at, self._since = self._clock.now(), time.monotonic()
        self._times, self._nbytes, self._phase, self._pending = {}, {}, "locate", None

    def enter(self, phase: str) -> None:
        """``phase`` begins, and the one before ends."""
        now = time.monotonic()
        if self._phase:
            self._times[self._phase] = self._times.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def count(self, nbytes: Mapping[str, int]) -> None:
        """Bytes were read, by tier."""
        for tier, count in nbytes.items():
            self._nbytes[tier] = self._nbytes.get(tier, 0) + count

    def restored(
        self,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        group: common_pb2.NodeGroup,
        checkpoint: str | None,
        step: int,
        ends: Ends | None,
    ) -> None:
        """restore() returns; the first step begins."""
        self.enter("first step")
        self._ends = ends if self._is_first else None
        self._pending = RankRecovery(
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            node=socket.gethostname(),
            group=group.index,
            group_count=group.count,
            group_ranks=list(group.ranks),
            cause=self._ends.cause if self._ends is not None else "start",
            failed_at=0.0,
            first_step_at=0.0,
            checkpoint=checkpoint,
            lost_steps=max(0, self._ends.step - step) if self._ends is not None else 0,
            phases={},
        )

    @property
    def is_waiting(self) -> bool:
        """Whether the first step is still to come."""
        return self._pending is not None

    def first_step(self) -> RankRecovery:
        """The first step is complete: return the record. Once, while :attr:`is_waiting`."""
        assert self._pending is not None
        self.enter("")
        before = self._before_restore()
        record = replace(
            self._pending,
            failed_at=self._restore_at - sum(before.values()),
            phases={**before, **self._times},
            first_step_at=self._restore_at + sum(self._times.values()),
            nbytes=dict(self._nbytes),
        )
        self._pending, self._is_first = None, False
        return record

    def _before_restore(self) -> dict[str, float]:
        """The phases before this rank's restore(), from clocks of several processes; none is negative."""
        if not self._is_first:
            return {}
        marks = {"re-init": self._restore_at - self._started_at}
        if self._ends is None:
            return marks
        ends = self._ends
        # A spare that began before the failure, or clocks that differ: no phase is negative.
        points = [ends.failed_at, ends.reacted_at, ends.gone_at, self._started_at, self._restore_at]
        for i in range(len(points)):
            points[i] = min(max(points[max(0, i - 1)], points[i]), self._restore_at)
        names = ("detect", "decide", "reschedule", "re-init")
        return {name: after - at for name, at, after in zip(names, points[:-1], points[1:], strict=True)}
