"""Tells the staging server what is sealed, and the trainer how each step ended.

Nothing here is needed for safety: what is sealed is on disk, and a server finds it there when it
comes up. So every failure is waited out, and the trainer is only warned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.clock import Clock
from ckpt.errors import CkptError, CorruptError, InvalidInputError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.flusher.remote import Remote
from ckpt.flusher.report import error_info
from ckpt.format.ids import CheckpointId
from ckpt_proto.v1 import common_pb2, flusher_pb2, staging_pb2

__all__ = ["Handover"]

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_START_EVERY_S = 15.0  # a server needs a second or two; one that cannot start must not be tried in a loop
_MOST_AWAITED = 64  # committed steps whose replicas are still waited for
_START_AGAIN_S = 2.0  # the same after one that did answer, and has died since
_log = get_logger("flusher.handover")
_State = staging_pb2.StepStatus
_Event = flusher_pb2.FlusherEvent
_ENDS = {
    _State.STATE_COMMITTED: _Event.STATE_COMMITTED,
    _State.STATE_FAILED: _Event.STATE_FAILED,
    _State.STATE_ABANDONED: _Event.STATE_FAILED,
}


@dataclass(slots=True)
class _Step:
    """One sealed segment on its way.

    Attributes:
        sequence: of its flush.
        ident: checkpoint.
        rank: whose segment.
        sealed_at: monotonic seconds.
        is_told: the server has accepted it.
        end: how it ended, as the trainer was told; None while it is open.
        awaits_replicas: other nodes are to hold replicas, and not enough of them do yet.
        is_replicated: the trainer was told that they do.
    """

    sequence: int
    ident: CheckpointId
    rank: int
    sealed_at: float
    is_told: bool = False
    end: flusher_pb2.FlusherEvent.State | None = None
    awaits_replicas: bool = False
    is_replicated: bool = False


class Handover:
    """Two threads: ``ckpt-tell`` hands over, ``ckpt-watch`` listens. Methods never block on the server.

    Args:
        open_remote: makes the connection; called in the thread, because it imports gRPC.
        emit: delivers an event to the trainer; called from both threads.
        on_change: called after anything that :meth:`is_told`, :meth:`is_settled` or ``progress_at`` tells.
        on_absent: called when no server answers, now and then; may start one.
        clock: time.
    """

    def __init__(
        self,
        open_remote: Callable[[], Remote],
        *,
        emit: Callable[[flusher_pb2.FlusherEvent], None],
        on_change: Callable[[], None],
        on_absent: Callable[[], None] | None = None,
        clock: Clock,
    ) -> None:
        self._open_remote = open_remote
        self._emit = emit
        self._on_change = on_change
        self._on_absent = on_absent
        # When on_absent may be called again, unless a server answers / once one has answered. Only ckpt-tell.
        self._absent_after = self._start_again_after = self._worry_after = clock.monotonic()
        self._clock = clock
        self._steps: dict[CheckpointId, _Step] = {}  # guarded by self._wake
        self._wake = threading.Condition()
        self._stopping = False  # guarded by self._wake
        self._remote: Remote | None = None  # set once by ckpt-tell before ckpt-watch starts
        self._progress_at = clock.monotonic()
        self._warned: str | None = None
        # Daemons: a call that hangs must not keep a finished flusher alive; what is sealed is on disk.
        self._teller = threading.Thread(
            target=self._guarded, args=(self._tell,), name="ckpt-tell", daemon=True
        )
        self._watcher = threading.Thread(
            target=self._guarded, args=(self._watch,), name="ckpt-watch", daemon=True
        )
        self._teller.start()

    def sealed(self, sequence: int, ident: CheckpointId, rank: int) -> None:
        """Take on a sealed segment."""
        with self._wake:
            self._drop_committed()
            self._steps[ident] = _Step(sequence, ident, rank, self._clock.monotonic())
            self._wake.notify_all()

    def is_told(self) -> bool:
        """Return whether the server has accepted (or refused) everything that was sealed."""
        with self._wake:
            return all(step.is_told for step in self._steps.values())

    def is_settled(self) -> bool:
        """Return whether every step has ended: committed, failed or abandoned."""
        with self._wake:
            return all(step.end is not None for step in self._steps.values())

    @property
    def progress_at(self) -> float:
        """Monotonic seconds of the last sign that the server is taking what it is told."""
        return self._progress_at

    def stop(self) -> None:
        """Stop both threads as far as they can be stopped. Does not wait for a call in flight."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._remote is not None:
            self._remote.close()

    # --- telling ---

    def _tell(self) -> None:
        pause = _FIRST_WAIT_S
        while (step := self._next_untold()) is not None:
            try:
                remote = self._connect()
                remote.seal(step.ident, step.rank, self._note_progress)
            except (InvalidInputError, CorruptError) as error:
                self._refused(step, error)
            except CkptError as error:
                if self._hiccup(error):
                    pause = _FIRST_WAIT_S
                self._sleep(pause)
                pause = min(pause * 2, _LONGEST_WAIT_S)
                continue
            else:
                self._accepted(step)
            pause = _FIRST_WAIT_S

    def _next_untold(self) -> _Step | None:
        """Wait for a step that the server does not know of; None when it is time to stop."""

        def pending() -> _Step | None:
            return next((step for step in self._steps.values() if not step.is_told), None)

        with self._wake:
            self._wake.wait_for(lambda: self._stopping or pending() is not None)
            return None if self._stopping else pending()

    def _connect(self) -> Remote:
        if self._remote is None:
            self._remote = self._open_remote()
        return self._remote

    def _accepted(self, step: _Step) -> None:
        with self._wake:
            step.is_told = True
            self._warned = None
        self._absent_after = min(self._absent_after, self._start_again_after)
        event(_log, logging.INFO, "handover.accepted", id=step.ident, rank=step.rank)
        if self._watcher.ident is None:
            self._watcher.start()
        self._note_progress()

    def _refused(self, step: _Step, error: CkptError) -> None:
        """The server can do nothing with it, now or later; the trainer has to know."""
        with self._wake:
            step.is_told = True
        self._end(step, _Event.STATE_FAILED, error_info(error))

    def _hiccup(self, error: CkptError) -> bool:
        """Take note that the server did not take a step; return whether a new one is on its way."""
        if self._remote is not None:
            self._remote.forget()
        if isinstance(error, UnavailableError) and self._bring_server():
            return True
        if error.code == self._warned or self._clock.monotonic() < self._worry_after:
            return False
        self._warned = error.code  # once per reason: an absent server is tried every few seconds
        event(_log, logging.WARNING, "handover.waiting", error=error)
        self._emit(_Event(state=_Event.STATE_WARNING, error=error_info(error)))
        return False

    def _bring_server(self) -> bool:
        """Have a server started; False where that is not our business, or was done a moment ago."""
        if self._on_absent is None or self._clock.monotonic() < self._absent_after:
            return False
        self._absent_after = self._clock.monotonic() + _START_EVERY_S
        self._start_again_after = self._clock.monotonic() + _START_AGAIN_S
        self._worry_after = self._clock.monotonic() + _START_EVERY_S / 2  # it is on its way
        try:
            self._on_absent()
        except CkptError as error:
            event(_log, logging.WARNING, "handover.no_server", error=error)
            return False
        return True

    # --- listening ---

    def _watch(self) -> None:
        remote = self._connect()
        pause = _FIRST_WAIT_S
        while not self._stopping:
            try:
                for status in remote.watch():
                    pause = _FIRST_WAIT_S
                    self._apply(status)
            except CkptError as error:
                event(_log, logging.INFO, "handover.watch_lost", error=error)
            self._sleep(pause)
            pause = min(pause * 2, _LONGEST_WAIT_S)
            self._tell_again()

    def _apply(self, status: staging_pb2.StepStatus) -> None:
        end = _ENDS.get(status.state)
        with self._wake:
            step = self._steps.get(CheckpointId.from_proto(status.id))
        if step is None:
            return
        self._note_replicas(step, status)
        if end is None or step.end == end:
            return
        if step.rank == min(status.group.ranks, default=step.rank):  # one of the node's ranks says it
            for warning in status.warnings:
                self._emit(_Event(state=_Event.STATE_WARNING, id=status.id, error=warning))
        info = status.error if status.HasField("error") else None
        if status.state == _State.STATE_ABANDONED and info is None:
            info = common_pb2.ErrorInfo(
                kind="CkptError", code="abandoned", message="the step can never be committed and was given up"
            )
        self._end(step, end, info)

    def _note_replicas(self, step: _Step, status: staging_pb2.StepStatus) -> None:
        if not status.replicas_wanted:
            return
        held = next((len(one.nodes) for one in status.replicas if one.rank == step.rank), 0)
        with self._wake:
            step.awaits_replicas = held < status.replicas_wanted and not step.is_replicated
        if held >= status.replicas_wanted and not step.is_replicated:
            step.is_replicated = True
            self._emit(
                _Event(state=_Event.STATE_REPLICATED, sequence=step.sequence, id=step.ident.to_proto())
            )

    def _end(
        self, step: _Step, end: flusher_pb2.FlusherEvent.State, info: common_pb2.ErrorInfo | None
    ) -> None:
        with self._wake:
            step.end = end
        seconds = self._clock.monotonic() - step.sealed_at
        event(_log, logging.INFO, "handover.ended", id=step.ident, state=_Event.State.Name(end))
        message = _Event(state=end, sequence=step.sequence, id=step.ident.to_proto(), seconds=seconds)
        if info is not None:
            message.error.CopyFrom(info)
        self._emit(message)
        self._note_progress()

    def _tell_again(self) -> None:
        """After the line was lost: the server may be a new one, which must hear of what is open."""
        with self._wake:
            if self._remote is not None:
                self._remote.forget()
            for step in self._steps.values():
                if step.end is None:
                    step.is_told = False
            self._drop_committed()
            self._wake.notify_all()

    # --- inside ---

    def _drop_committed(self) -> None:
        # Called with self._wake held. A failed step stays: a server may try it again and succeed.
        late = [i for i, step in self._steps.items() if step.awaits_replicas][-_MOST_AWAITED:]
        self._steps = {
            i: step for i, step in self._steps.items() if step.end != _Event.STATE_COMMITTED or i in late
        }

    def _note_progress(self) -> None:
        self._progress_at = self._clock.monotonic()
        self._on_change()

    def _sleep(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping, timeout=seconds)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 -- thread border
            _log.exception("handover.crashed")
