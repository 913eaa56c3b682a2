"""The ranks whose flushers tell how they do: the latest pulse of each, judged, and told in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc

from ckpt.client.ranks import RANK_STATES, judge_pulses, newest_attempts
from ckpt.clock import Clock
from ckpt.errors import BusyError
from ckpt.events import event, get_logger
from ckpt.plan.liveness import LivenessPolicy, RankVerdict
from ckpt_proto.v1 import staging_pb2

__all__ = ["MAX_HEARTS", "Liveness"]

_log = get_logger("server.liveness")

# Ranks of one node that may tell at once; each holds a thread of the server.
MAX_HEARTS = 128
_FORGET_S = 600.0  # a rank that ended or fell silent so long ago is no news
_BAD = frozenset({"hung", "dead", "silent", "slow"})


class Liveness:
    """Thread-safe.

    Args:
        policy: when a rank counts as hung or slow.
        clock: time.
    """

    def __init__(self, policy: LivenessPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._pulses: dict[tuple[str, int], tuple[staging_pb2.RankPulse, float]] = {}  # guarded by self._lock
        self._told: dict[tuple[str, int, int], str] = {}  # state by run, attempt, rank; only in :meth:`look`
        self._hearts = threading.BoundedSemaphore(MAX_HEARTS)

    def follow(self, pulses: Iterator[staging_pb2.RankPulse], context: grpc.ServicerContext) -> None:
        """Take the pulses of one rank until its flusher has no more to say. Blocks for that long.

        Raises:
            BusyError: too many ranks tell at once.
        """
        if not self._hearts.acquire(blocking=False):
            raise BusyError("too many heartbeats", code="heartbeats", most=MAX_HEARTS)
        try:
            for pulse in pulses:
                self.take(pulse)
        except grpc.RpcError:  # the flusher was killed; the silence speaks for itself
            pass
        finally:
            self._hearts.release()

    def take(self, pulse: staging_pb2.RankPulse) -> None:
        """Note the latest pulse of a rank."""
        key = (pulse.run_key, pulse.rank)
        with self._lock:
            known = self._pulses.get(key)
            if known is None or pulse.attempt >= known[0].attempt:  # else an old flusher that lives on
                self._pulses[key] = (pulse, self._clock.monotonic())

    def health(self, run_key: str = "") -> list[staging_pb2.RankHealth]:
        """Every rank of the newest attempts (of one run), judged now; by run and rank."""
        found = []
        for run, ranks in newest_attempts(self._aged()).items():
            if run_key not in ("", run):
                continue
            for (pulse, age_s), verdict in zip(ranks, judge_pulses(ranks, self._policy), strict=True):
                found.append(
                    staging_pb2.RankHealth(
                        pulse=pulse, age_s=age_s, state=RANK_STATES[verdict.state], reason=verdict.reason
                    )
                )
        return found

    def look(self) -> None:
        """Judge all ranks and log what has changed. Called by one thread, now and then."""
        for run, ranks in newest_attempts(self._aged()).items():
            for (pulse, _), verdict in zip(ranks, judge_pulses(ranks, self._policy), strict=True):
                key = (run, pulse.attempt, pulse.rank)
                before = self._told.get(key, "ok")
                self._told[key] = verdict.state
                if verdict.state != before:
                    _tell(run, pulse, verdict, before)
        self._forget()

    def _aged(self) -> list[tuple[staging_pb2.RankPulse, float]]:
        now = self._clock.monotonic()
        with self._lock:
            return [(pulse, now - at) for pulse, at in self._pulses.values()]

    def _forget(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            old = [key for key, (_, at) in self._pulses.items() if now - at > _FORGET_S]
            for key in old:
                pulse, _ = self._pulses.pop(key)
                self._told.pop((pulse.run_key, pulse.attempt, pulse.rank), None)


def _tell(run: str, pulse: staging_pb2.RankPulse, verdict: RankVerdict, before: str) -> None:
    facts = {
        "run": run,
        "attempt": pulse.attempt,
        "rank": pulse.rank,
        "step": pulse.step,
        "phase": pulse.phase,
    }
    if verdict.state in _BAD:
        event(
            _log,
            logging.WARNING,
            "rank.trouble",
            state=verdict.state,
            **facts,
            still_s=pulse.still_s,
            reason=verdict.reason,
            kernel=pulse.kernel or "-",
            pid=pulse.pid,
            node=pulse.node,
        )
        if verdict.state == "hung" and pulse.stacks:
            event(_log, logging.WARNING, "rank.stacks", rank=pulse.rank, stacks=f"\n{pulse.stacks}")
    elif before in _BAD:
        event(_log, logging.INFO, "rank.recovered", was=before, state=verdict.state, **facts)
    else:
        event(_log, logging.INFO, "rank.state", state=verdict.state, **facts, reason=verdict.reason or "-")
