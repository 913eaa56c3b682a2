"""Stop on request (a signal, a notice file): save once more at a step that all ranks agree on, and leave.

A thread looks for requests a few times per second. The training thread looks at one attribute per step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from signal import Signals

from ckpt.clock import SystemClock
from ckpt.events import event, get_logger
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.signals import stop_signals
from ckpt_trainer_hooks.stop_agreement import Decision, Request, StopAgreement
from ckpt_trainer_hooks.stop_options import (
    EXIT_DO_NOT_RESTART,
    EXIT_NOT_SAVED,
    EXIT_SAVED,
    SAVED,
    Achieved,
    StopOptions,
    StopReason,
    StopTraining,
    write_reason,
)

__all__ = ["Stopper"]

_MARGIN_S = 1.0  # of the grace time, for writing the reason and leaving
_POLL_S = 0.05
# For the training thread to come by: in an evaluation that calls check_stop() it is held then, and the job
# can stop at once instead of after one more step. One that waits for held ranks does not come.
_HOLD_WAIT_S = 1.0
_ABORT_WAIT_S = 1.0  # for the training thread to come and raise the exit itself
_log = get_logger("stop")


class Stopper:
    """One rank's stop. :meth:`tick` is for another thread, everything else for the training thread.

    Args:
        options: see there.
        url: of the run, for the reason file.
    """

    def __init__(self, options: StopOptions, url: str) -> None:
        self._options = options
        self._url = url
        self._agreement: StopAgreement | None = None
        self._release: Callable[[], None] = lambda: None
        self._heard: dict[int, int] = {}
        self._lock = threading.Condition()
        self._request: Request | None = None  # guarded by self._lock, like what follows
        self._deadline = self._heard_at = 0.0
        self._decision: Decision | None = None
        self._completed = 0
        self._is_held = False
        self._last: SaveHandle | None = None
        self._abort_at: float | None = None
        self._reason: StopReason | None = None
        self._ranks = (0, 1, 0)  # rank, world size, attempt
        self._folder: Path | None = None
        self._leads = True

    def arm(
        self,
        agreement: StopAgreement,
        *,
        folder: Path,
        rank: int,
        world_size: int,
        attempt: int,
        leads: bool,
        step: int,
    ) -> None:
        """Begin to listen, for a new attempt that starts at ``step``."""
        self.disarm()
        with self._lock:
            self._request = self._decision = self._reason = self._last = self._abort_at = None
            self._completed, self._is_held = step, False
            self._ranks, self._folder, self._leads = (rank, world_size, attempt), folder, leads
        self._release = stop_signals.install(self._options.signals)
        self._heard = {number: stop_signals.count(number) for number in self._options.signals}
        agreement.clean()
        self._agreement = agreement

    def disarm(self) -> None:
        """Stop listening; handlers are as they were before."""
        self._agreement = None
        self._release()
        self._release = lambda: None

    @property
    def options(self) -> StopOptions:
        return self._options

    def refuse(self, rank: int, world_size: int, message: str) -> None:
        """End, for good: a restart would only fail again. Raises StopTraining with code 93."""
        self._ranks, self._request = (rank, world_size, 0), Request(cause="no-progress", rank=0, grace_s=0.0)
        self._leads = rank == 0
        raise StopTraining(self._write_reason("nothing", None, (), message, code=EXIT_DO_NOT_RESTART))

    @property
    def reason(self) -> StopReason | None:
        """How the stop ended; None where there was none, or it is under way."""
        return self._reason

    # --- the training thread ---

    def note_saved(self, handle: SaveHandle) -> None:
        """A snapshot was handed over."""
        self._last = handle

    def is_due(self, completed: int) -> bool:
        """``completed`` steps are complete; return whether to save and stop here, on all ranks alike.

        Returns at once unless a stop was asked for; then it waits for the decision, some seconds at most.

        Raises:
            StopTraining: ranks did not answer, so that there is no common step; what was saved before counts.
        """
        self._completed = completed
        if self._request is None:
            return False
        with self._lock:
            if self._reason is not None:  # on_stop="flag", and the loop goes on
                return False
            self._is_held = True
            self._lock.wait_for(lambda: self._decision is not None, max(0.0, self._left_s()))
            decision = self._decision
            self._is_held = False
        if decision is not None and decision.step is not None and completed < decision.step:
            return False
        if decision is not None and decision.step == completed:
            return True
        absent = decision.absent if decision is not None else ()
        text = "some ranks did not answer" if absent else "the agreed step cannot be reached"
        self._conclude("nothing", None, absent, f"no common step: {text}; what was saved before counts")
        return False

    def finish(self, handle: SaveHandle) -> None:
        """Wait for ``handle``, the save of the agreed step, within the grace time, and end.

        Raises:
            StopTraining: unless ``on_stop`` is "flag".
        """
        error = ""
        try:
            while self._left_s() > 0 and not handle.upload_completion.done():
                with contextlib.suppress(TimeoutError):
                    handle.upload_completion.exception(min(_POLL_S, max(0.01, self._left_s())))
            failed = handle.upload_completion.exception(0) if handle.upload_completion.done() else None
            error = f"; {failed}" if failed is not None else ""
        except TimeoutError:
            pass
        achieved = _achieved(handle)
        self._conclude(achieved, handle.step, (), f"step {handle.step} is {achieved}{error}")

    def _left_s(self) -> float:
        """Seconds of the grace time that may still be used for saving."""
        return self._deadline - _margin(self._options.grace_s) - time.monotonic()

    def _conclude(self, achieved: Achieved, step: int | None, absent: tuple[int, ...], message: str) -> None:
        reason = self._write_reason(achieved, step, absent, message)
        if self._options.on_stop == "exit":
            raise StopTraining(reason)

    # --- another thread ---

    def tick(self) -> None:
        """Look for requests, answer them, and see to it that the process ends in time."""
        agreement = self._agreement
        if agreement is None or self._reason is not None:
            return
        if self._request is None:
            cause = self._cause()
            found = agreement.request()
            if cause is not None and found is None:
                found = agreement.ask(
                    Request(cause=cause, rank=self._ranks[0], grace_s=self._options.grace_s)
                )
            if found is None:
                return
            self._heard_at = time.monotonic()
            self._deadline = self._heard_at + found.grace_s
            self._request = found  # from here on the training thread is held at the end of its step
        if self._decision is None:
            with self._lock:
                is_held, completed = self._is_held, self._completed
            if is_held or time.monotonic() - self._heard_at > _HOLD_WAIT_S:
                agreement.answer(completed if is_held else completed + 1)
            decision = agreement.decision()
            if decision is not None:
                event(
                    _log,
                    logging.WARNING,
                    "stop.decided",
                    step=decision.step,
                    absent_ranks=list(decision.absent),
                )
                with self._lock:
                    self._decision = decision
                    self._lock.notify_all()
        self._end_if_late()

    def _cause(self) -> str | None:
        """What asks this rank to stop, or None."""
        stop_signals.poll()
        for number in self._options.signals:
            if stop_signals.count(number) > self._heard[number]:
                return number.name
        notice = self._options.notice_file
        return "notice" if notice is not None and notice.exists() else None

    def _end_if_late(self) -> None:
        """End the process where the training thread cannot: it hangs, or does not come back in time.

        Only where a signal would have ended it without us, and only instead of it: a program with a handler
        of its own knows what it does, and a notice is only a notice.
        """
        now = time.monotonic()
        decision, request = self._decision, self._request
        is_aborted = decision is not None and decision.step is None
        if is_aborted and self._abort_at is None:
            self._abort_at = now + _ABORT_WAIT_S
        is_late = now > self._deadline or (self._abort_at is not None and now > self._abort_at)
        if not is_late or request is None or self._options.on_stop != "exit":
            return
        absent = decision.absent if decision is not None else ()
        text = "ranks did not answer" if absent else "the training thread did not come to the end of its step"
        last = self._last
        if last is not None and last.step == self._completed:  # then nothing but a part of a step is lost
            reason = self._write_reason(_achieved(last), last.step, absent, f"{text}; it was saved before")
        else:
            reason = self._write_reason("nothing", None, absent, f"{text}; what was saved before counts")
        number = getattr(Signals, request.cause, None)
        if number is None or stop_signals.is_handled_elsewhere(number):
            return
        event(_log, logging.ERROR, "stop.forced", reason=text, exit_code=reason.exit_code)
        logging.shutdown()
        os._exit(reason.exit_code)

    # --- the reason ---

    def _write_reason(
        self,
        achieved: Achieved,
        step: int | None,
        absent: tuple[int, ...],
        message: str,
        *,
        code: int | None = None,
    ) -> StopReason:
        rank, world_size, attempt = self._ranks
        assert self._request is not None
        reason = StopReason(
            cause=self._request.cause,
            asked_by_rank=self._request.rank,
            rank=rank,
            world_size=world_size,
            attempt=attempt,
            achieved=achieved,
            step=step,
            last_saved=self._last.step if self._last is not None else None,
            absent=absent,
            exit_code=code or (EXIT_SAVED if achieved in SAVED else EXIT_NOT_SAVED),
            url=self._url,
            node=socket.gethostname(),
            at=SystemClock().now(),
            message=message,
        )
        event(_log, logging.WARNING, "stop.done", achieved=achieved, step=step, exit_code=reason.exit_code)
        paths = [self._folder / f"reason-{rank:05d}.json"] if self._folder is not None else []
        if self._options.reason_file is not None and (self._leads or absent):
            paths.append(self._options.reason_file)
        for path in paths:
            try:
                write_reason(path, reason)
            except OSError as error:
                event(_log, logging.ERROR, "stop.no_reason_file", path=path, error=error)
        self._reason = reason
        return reason


def _margin(grace_s: float) -> float:
    return min(_MARGIN_S, grace_s / 4)


def _achieved(handle: SaveHandle) -> Achieved:
    if _is_well(handle.upload_completion):
        return "committed"
    if _is_well(handle.local_completion):
        replicas = handle.peer_completion
        return "replicated" if replicas is not None and _is_well(replicas) else "sealed"
    is_lost = handle.local_completion.done()  # and not well: a full disk, a flusher that died
    return "copied" if _is_well(handle.staging_completion) and not is_lost else "nothing"


def _is_well(future: Future[None]) -> bool:
    return future.done() and future.exception() is None
