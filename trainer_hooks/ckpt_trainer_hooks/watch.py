"""What accompanies training without being a save: the pulse, requests to stop, the timing of a start.

One thread per manager, a few looks per second; the training thread only stores a few words per step.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading

from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import run_key
from ckpt.ops.attempts import starts_from
from ckpt.ops.ends import Ends, ends_of, summary_of
from ckpt.ops.recovery import RankRecovery, write_rank_recovery
from ckpt.storage.lives import FAILED_PHASE, read_lives, sweep_lives
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_trainer_hooks.agree import Agreement
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.liveness import TICK_S, Pulse
from ckpt_trainer_hooks.recovery_timer import RecoveryTimer
from ckpt_trainer_hooks.session import Session
from ckpt_trainer_hooks.stop_agreement import StopAgreement
from ckpt_trainer_hooks.stop_options import StopOptions, StopReason
from ckpt_trainer_hooks.stopping import Stopper

__all__ = ["Watch"]

_log = get_logger("watch")


class Watch:
    """One rank's. Methods are for the training thread.

    Args:
        url: of the run.
        agreement: between the ranks.
        staging: of the node.
        options: how to stop.

    Attributes:
        timer: of the start that is under way.
        pulse: shown to the flusher.
    """

    def __init__(self, url: str, agreement: Agreement, staging: StagingDir, options: StopOptions) -> None:
        self.timer = RecoveryTimer()
        self.pulse = Pulse(run_key=run_key(url), rank=agreement.rank, world_size=agreement.world_size)
        self._agreement = agreement
        self._staging = staging
        self._run_key = run_key(url)
        self._stopper = Stopper(options, url)
        self._ends: Ends | None = None
        self._last: SaveHandle | None = None
        self._completed = 0
        self._unwritten: RankRecovery | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # --- restore ---

    def restore_begins(self) -> None:
        """restore() was called; nothing that follows is training."""
        self._stopper.disarm()
        self.timer.begin()
        self.pulse.enter("restore")

    def session_known(self, session: Session) -> None:
        """Learn from the nodes how the attempt before ended. Every rank must call it."""
        lives = read_lives(self._staging, self._run_key) if session.hosts_server else []
        self._ends = ends_of(self._agreement.gather("lives", summary_of(lives)))

    def check_progress(self, config: RunConfig, found: CheckpointId | None) -> None:
        """Raise StopTraining with code 93 where too many starts in a row have resumed here and saved nothing.

        Every rank must call it; the variable must be the same on all.
        """
        most = self._stopper.options.max_no_progress
        if most <= 0:
            return

        def on_rank_0() -> int:
            with contextlib.closing(open_store(config.url, config.store_options)) as store:
                return starts_from(store, found, most=most)

        if self._agreement.decide("progress", on_rank_0) >= most:
            text = f"the last {most} starts have resumed from {found or 'nothing'} and saved nothing"
            self._stopper.refuse(self._agreement.rank, self._agreement.world_size, text)

    def restore_ended(self, session: Session, attempt: int, found: CheckpointId | None) -> None:
        """Training begins: be ready for hangs and for requests to stop."""
        step = 0 if found is None else found.step
        rank, world_size = self._agreement.rank, self._agreement.world_size
        self.timer.restored(
            attempt=attempt,
            rank=rank,
            world_size=world_size,
            group=session.group,
            checkpoint=None if found is None else str(found),
            step=step,
            ends=self._ends,
        )
        self.pulse.begin(attempt, step, session.peers)
        self._last, self._completed = None, step
        folder = self._staging.run_dir(self._run_key) / "stop" / f"a{attempt:06d}"
        self._stopper.arm(
            StopAgreement(
                folder,
                rank=rank,
                group=session.group,
                store=self._agreement.own_store()
                if session.hosts_server and session.group.count > 1
                else None,
                prefix=f"ckpt/stop/{self._run_key}/{attempt}",
                died=lambda: {
                    life.rank
                    for life in read_lives(self._staging, self._run_key)
                    if life.attempt == attempt and life.ended_at is not None
                },
            ),
            folder=folder,
            rank=rank,
            world_size=world_size,
            attempt=attempt,
            leads=session.hosts_server,
            step=step,
        )
        if session.hosts_server:
            with contextlib.suppress(
                OSError
            ):  # the last ones stay, in case this attempt ends before it has any
                sweep_lives(self._staging, self._run_key, before=attempt - 1)
        if self._thread is None:
            self._thread = self._start()

    # --- training ---

    def saved(self, handle: SaveHandle) -> None:
        """A snapshot was handed over."""
        self._last = handle
        self._stopper.note_saved(handle)

    def step_completed(self, completed: int) -> bool:
        """``completed`` steps are complete; return whether to save and stop here.

        Raises:
            StopTraining: a stop was asked for and no common step can be had.
        """
        self._completed = completed
        self.pulse.completed(completed, "save")
        if self.timer.is_waiting:
            self._unwritten = self.timer.first_step()
        return self._stopper.is_due(completed)

    def check_stop(self) -> bool:
        """Whether to save and stop here, between two steps. Raises StopTraining as above."""
        return self._stopper.is_due(self._completed)

    def save_for_stop(self) -> SaveHandle | None:
        """The handle of a save of this very step that was made already, or None."""
        return self._last if self._last is not None and self._last.step == self._completed else None

    @property
    def completed(self) -> int:
        """Optimizer steps completed, as last told."""
        return self._completed

    def finish(self, handle: SaveHandle) -> None:
        """Wait for the last save within the grace time. Raises StopTraining unless ``on_stop`` is "flag"."""
        self.pulse.enter("stop")
        self._stopper.finish(handle)

    def step_over(self) -> None:
        """The next iteration begins."""
        self.pulse.enter("train")

    @property
    def stop_reason(self) -> StopReason | None:
        return self._stopper.reason

    def close(self) -> None:
        """End the thread; signals are as they were before."""
        self._stopper.disarm()
        # The error under which a `with` block is left, or the one that has ended the interpreter.
        if isinstance(sys.exc_info()[1] or getattr(sys, "last_value", None), Exception):
            self.pulse.enter(FAILED_PHASE)
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._write_recovery()
        self.pulse.tick()  # the last word, for the ledger
        self.pulse.close()

    # --- the thread ---

    def _start(self) -> threading.Thread:
        # A daemon: what it shows is of no use once the process ends.
        thread = threading.Thread(target=self._loop, name="ckpt-watch", daemon=True)
        thread.start()
        return thread

    def _loop(self) -> None:
        while not self._ended.wait(TICK_S):
            try:
                self.pulse.tick()
                self._stopper.tick()
                self._write_recovery()
            except Exception:  # noqa: BLE001 -- thread border; training must not depend on it
                _log.exception("watch.crashed")
                return

    def _write_recovery(self) -> None:
        record, self._unwritten = self._unwritten, None
        if record is None:
            return
        shown = {name.replace(" ", "_"): round(seconds, 3) for name, seconds in record.phases.items()}
        event(_log, logging.INFO, "recovery.done", cause=record.cause, checkpoint=record.checkpoint, **shown)
        try:
            write_rank_recovery(self._staging, self._run_key, record)
        except CkptError as error:
            event(_log, logging.WARNING, "recovery.no_record", error=error)
