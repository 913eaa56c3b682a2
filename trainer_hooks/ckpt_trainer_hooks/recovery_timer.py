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
from collections.abc import Mapping
from dataclasses import replace

from ckpt.clock import SystemClock
from ckpt.ops.ends import Ends
from ckpt.ops.recovery import RankRecovery
from ckpt.storage.procfs import process_started_at
from ckpt_proto.v1 import common_pb2

__all__ = ["RecoveryTimer"]


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
            cause=self._cause(),
            failed_at=0.0,
            first_step_at=0.0,
            checkpoint=checkpoint,
            lost_steps=max(0, self._ends.step - step) if self._ends is not None else 0,
            phases={},
        )

    def _cause(self) -> str:
        if not self._is_first:
            return "restore"
        return self._ends.cause if self._ends is not None else "start"

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
