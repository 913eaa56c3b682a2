"""Watches the trainer for the flusher, tells the staging server, and keeps a record of how the trainer ended.

The record is for the next start of the run: it says when this one failed. It is a small file in the staging
directory, replaced every few seconds and at the trainer's end, and not fsynced: it need not survive a reboot.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from ckpt.clock import Clock
from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.flusher.remote import Remote
from ckpt.storage.lives import Life, write_life
from ckpt.storage.procfs import catches_signal, kernel_view, process_state
from ckpt.storage.pulse import STACKS_SIGNAL, PulseReader
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2

__all__ = ["Heartbeat"]

_LOOK_S = 0.5
_SEND_S = 1.0
_RECORD_S = 2.0
_SUSPECT_S = 1.5  # a trainer that stands still for so long, and for two of its steps, shows its stacks
_STACKS_WAIT_S = 1.0
_STACKS_MAX = 32 << 10
_TICKS_STALE_S = 2.0  # then its own thread does not run either
_LONGEST_WAIT_S = 5.0
_log = get_logger("flusher.heartbeat")
_Pulse = staging_pb2.RankPulse


class Heartbeat:
    """Two threads: ``ckpt-look`` looks at the trainer, ``ckpt-beat`` tells the server. Nobody waits for them.

    Args:
        pulse: of the trainer.
        stacks_fd: memfd that the trainer writes its stacks to; None where it does not.
        trainer_pid: of the trainer.
        run_key: of the run.
        staging: of the node.
        open_remote: makes a connection to the server; called in the thread, because it imports gRPC.
        clock: time.
    """

    def __init__(
        self,
        pulse: PulseReader,
        *,
        stacks_fd: int | None,
        trainer_pid: int,
        run_key: str,
        staging: StagingDir,
        open_remote: Callable[[], Remote],
        clock: Clock,
    ) -> None:
        self._pulse = pulse
        self._stacks_fd = stacks_fd
        self._pid = trainer_pid
        self._run_key = run_key
        self._staging = staging
        self._open_remote = open_remote
        self._clock = clock
        self._wake = threading.Condition()
        self._latest: staging_pb2.RankPulse | None = None  # guarded by self._wake
        self._ended = _Pulse.ENDED_UNSPECIFIED  # guarded by self._wake
        self._ended_at = 0.0  # guarded by self._wake
        self._stopping = False  # guarded by self._wake
        self._recorded_at = 0.0
        self._stacks: tuple[int, str] = (-1, "")  # taken when the trainer had made so many moves
        # Daemons: what they tell is of no use to anybody once the flusher is done.
        self._looker = threading.Thread(
            target=self._guarded, args=(self._look,), name="ckpt-look", daemon=True
        )
        self._teller = threading.Thread(
            target=self._guarded, args=(self._tell,), name="ckpt-beat", daemon=True
        )
        self._looker.start()
        self._teller.start()

    def trainer_ended(self, *, closed: bool) -> None:
        """The trainer has closed its manager, or is dead. The first word counts."""
        with self._wake:
            if self._ended == _Pulse.ENDED_UNSPECIFIED:
                self._ended = _Pulse.ENDED_CLOSED if closed else _Pulse.ENDED_DIED
                self._ended_at = self._clock.now()
            self._wake.notify_all()

    def stop(self) -> None:
        """End both threads; the last word to the server gets a moment."""
        self._looker.join(2 * _LOOK_S)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._teller.join(_SEND_S)

    # --- looking ---

    def _look(self) -> None:
        while True:
            pulse = self._see()
            with self._wake:
                if pulse.attempt:
                    self._latest = pulse
                    self._wake.notify_all()
                if pulse.ended or self._stopping:
                    return
                self._wake.wait_for(lambda: self._ended or self._stopping, timeout=_LOOK_S)

    def _see(self) -> staging_pb2.RankPulse:
        with self._wake:
            ended, ended_at = self._ended, self._ended_at
        details, ticked_ns = self._pulse.details()
        progress = self._pulse.progress()
        now_ns = time.monotonic_ns()
        pulse = staging_pb2.RankPulse()
        pulse.CopyFrom(details)
        pulse.ClearField("stacks")
        pulse.step, pulse.phase, pulse.ended = progress.step, progress.phase, ended
        pulse.still_s = max(0.0, (now_ns - progress.moved_ns) * 1e-9)
        pulse.is_stopped = not ended and process_state(self._pid) in ("T", "t")
        if not ended and (pulse.is_stopped or pulse.still_s > max(_SUSPECT_S, 2 * pulse.step_s)):
            stale_s = (now_ns - ticked_ns) * 1e-9
            pulse.kernel = kernel_view(self._pid)
            pulse.stacks = self._stacks_at(progress.moves, pulse.is_stopped, details.stacks)
            if stale_s > _TICKS_STALE_S:  # what its own thread said of it is of then, not of now
                pulse.where += f", as of {stale_s:.0f} s ago" if pulse.where else ""
                pulse.waits = pulse.waits and not pulse.is_stopped
        self._record(pulse, ended_at, ticked_s=(now_ns - ticked_ns) * 1e-9)
        return pulse

    def _stacks_at(self, moves: int, is_stopped: bool, last_known: str) -> str:
        """Stacks of all threads, asked for once per stand-still; of a stopped process the last known one."""
        if self._stacks[0] != moves and not is_stopped:
            self._stacks = (moves, self._ask_for_stacks())
        if self._stacks[0] == moves and self._stacks[1]:
            return self._stacks[1]
        return f"Training thread, as last seen:\n{last_known}" if last_known else ""

    def _ask_for_stacks(self) -> str:
        fd = self._stacks_fd
        if fd is None or not catches_signal(self._pid, STACKS_SIGNAL):  # else it would kill the trainer
            return ""
        try:
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)  # of the trainer too: one open file
            os.kill(self._pid, STACKS_SIGNAL)
        except OSError:
            return ""
        deadline, size = time.monotonic() + _STACKS_WAIT_S, 0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, size = size, os.fstat(fd).st_size
            if size and size == before:
                break
        return os.pread(fd, _STACKS_MAX, 0).decode(errors="replace")

    def _record(self, pulse: staging_pb2.RankPulse, ended_at: float, *, ticked_s: float) -> None:
        """Write the record where it is due; the trainer's own word is ``ticked_s`` old."""
        now = self._clock.now()
        if not pulse.attempt or (not pulse.ended and now - self._recorded_at < _RECORD_S):
            return
        self._recorded_at = now
        life = Life(
            attempt=pulse.attempt,
            rank=pulse.rank,
            world_size=pulse.world_size,
            node=pulse.node,
            step=pulse.step,
            phase=pulse.phase,
            moved_at=now - pulse.still_s,
            seen_at=now,
            ended_at=ended_at or None,
            closed=pulse.ended == _Pulse.ENDED_CLOSED,
            step_s=pulse.step_s,
            spent_s=dict(pulse.spent_s),
            spent_at=now - ticked_s,
        )
        try:
            write_life(self._staging, self._run_key, life)
        except CkptError as error:
            event(_log, logging.WARNING, "heartbeat.no_record", error=error)

    # --- telling ---

    def _tell(self) -> None:
        with self._wake:  # gRPC is imported when the trainer trains: it takes a sixth of a second of CPU
            self._wake.wait_for(lambda: self._latest is not None or self._stopping)
        remote = None
        pause = _LOOK_S
        while not self._is_over():
            try:
                remote = remote or self._open_remote()
                remote.heartbeat(self._pulses())
                pause = _LOOK_S
            except CkptError as error:
                event(_log, logging.DEBUG, "heartbeat.lost", error=error)
            with self._wake:
                self._wake.wait_for(lambda: self._stopping, timeout=pause)
            pause = min(2 * pause, _LONGEST_WAIT_S)
        if remote is not None:
            remote.close()

    def _pulses(self) -> Iterator[staging_pb2.RankPulse]:
        while True:
            with self._wake:
                pulse = self._latest
                ended = self._stopping or pulse is None or bool(pulse.ended)
            if pulse is None:
                return
            yield pulse
            if ended:
                return
            self._await_news(pulse)

    def _await_news(self, sent: staging_pb2.RankPulse) -> None:
        def is_new() -> bool:
            latest = self._latest
            return self._stopping or (
                latest is not None and (bool(latest.ended) or latest.is_stopped > sent.is_stopped)
            )

        with self._wake:
            self._wake.wait_for(is_new, timeout=_SEND_S)

    def _is_over(self) -> bool:
        with self._wake:
            return self._stopping or (self._latest is not None and bool(self._latest.ended))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # noqa: BLE001 -- thread border; liveness must not end the flusher
            _log.exception("heartbeat.crashed")
