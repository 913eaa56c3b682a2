"""The flusher's main loop: takes messages from the trainer, keeps the writer busy, decides when to leave."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import queue
import select
import socket
import threading
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ckpt.clock import Clock
from ckpt.errors import CkptError, InvalidInputError
from ckpt.events import event, get_logger
from ckpt.flusher.embedded import start_embedded_server
from ckpt.flusher.handover import Handover
from ckpt.flusher.heartbeat import Heartbeat
from ckpt.flusher.packets import Packet, receive
from ckpt.flusher.remote import Remote
from ckpt.flusher.report import error_info
from ckpt.flusher.write import seal_segment, sweep_debris
from ckpt.format.ids import CheckpointId
from ckpt.storage.pulse import PulseReader
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import flusher_pb2

__all__ = ["Flusher", "FlusherSettings"]

_PACKET_MAX = 64 << 10
_log = get_logger("flusher")
_Event = flusher_pb2.FlusherEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class FlusherSettings:
    """What the command line says.

    Attributes:
        staging: staging directory.
        run_key: the run all snapshots belong to.
        server: gRPC target.
        threads: chunks written at once.
        close_timeout_s: how long outcomes are awaited after Close(wait).
        orphan_timeout_s: how long a server that does not answer is tried when nobody waits for outcomes.
        trainer_pid: 0 if unknown.
        starts_server: start an embedded server whenever none answers.
        pulse_fd: shared memory that shows how the trainer is doing; None: nobody watches it.
        stacks_fd: file to which the trainer writes its stacks when asked.
    """

    staging: str
    run_key: str
    server: str
    threads: int
    close_timeout_s: float
    orphan_timeout_s: float
    trainer_pid: int
    starts_server: bool
    pulse_fd: int | None = None
    stacks_fd: int | None = None


class Flusher:
    """Runs in the main thread; the writer and the hand-over have threads of their own.

    Args:
        settings: see there.
        control: the socket to the trainer; closed by :meth:`run`.
        clock: time.
    """

    def __init__(self, settings: FlusherSettings, control: socket.socket, clock: Clock) -> None:
        self._settings = settings
        self._staging = StagingDir(settings.staging)
        self._control = control
        self._clock = clock
        self._arena: mmap.mmap | None = None
        self._jobs: queue.SimpleQueue[tuple[flusher_pb2.Flush, mmap.mmap | None] | None] = queue.SimpleQueue()
        self._unwritten = 0  # guarded by self._lock
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._trainer_gone = False
        self._close: flusher_pb2.Close | None = None
        self._leaving_at: float | None = None  # since when no more flushes can come
        self._writer = threading.Thread(target=self._write_all, name="ckpt-flush")
        self._handover = Handover(
            lambda: Remote(settings.server, self._staging, settings.run_key),
            emit=self._emit,
            on_change=self._wake,
            on_absent=self._start_server if settings.starts_server else None,
            clock=clock,
        )
        self._heartbeat = self._open_heartbeat()

    def run(self) -> None:
        """Serve until the trainer has closed or died and everything handed over is sealed and told."""
        self._writer.start()
        with contextlib.ExitStack() as stack:
            stack.callback(self._control.close)
            poller = select.poll()
            poller.register(self._wake_read, select.POLLIN)
            poller.register(self._control, select.POLLIN)
            trainer = self._open_trainer()
            if trainer is not None:
                stack.callback(os.close, trainer)
                poller.register(trainer, select.POLLIN)
            while not self._is_done():
                ready = {fd for fd, _ in poller.poll(self._poll_ms())}
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                # Received after the poll, so that what the trainer said before it died is not lost.
                if not self._trainer_gone and (not self._receive_all() or trainer in ready):
                    self._trainer_gone = True
                    self._leave()
                    event(_log, logging.INFO, "flusher.trainer_gone", unwritten=self._unwritten)
                    self._tell_end(closed=False)
                    for fd in (self._control.fileno(), trainer):
                        if fd is not None:
                            poller.unregister(fd)
            self._jobs.put(None)
            self._writer.join()
            self._handover.stop()
            if self._heartbeat is not None:
                self._heartbeat.stop()

    # --- when to leave ---

    def _leave(self) -> None:
        """No more flushes can come. What is not written yet has its arena; nothing else needs the memory, and
        the trainer that comes next on this node makes one of its own.
        """
        self._leaving_at = self._leaving_at or self._clock.monotonic()
        self._arena = None

    def _is_done(self) -> bool:
        if self._leaving_at is None:
            return False
        with self._lock:
            if self._unwritten:
                return False  # handed over means sealed, whatever happens meanwhile
        now = self._clock.monotonic()
        if self._waits_for_outcome():
            return self._handover.is_settled() or now - self._leaving_at > self._settings.close_timeout_s
        patience_from = max(self._leaving_at, self._handover.progress_at)
        return self._handover.is_told() or now - patience_from > self._settings.orphan_timeout_s

    def _waits_for_outcome(self) -> bool:
        return self._close is not None and self._close.wait and not self._trainer_gone

    def _poll_ms(self) -> int | None:
        return None if self._leaving_at is None else 500

    # --- the trainer ---

    def _open_trainer(self) -> int | None:
        """Watch the trainer itself: a data loader worker it forked may keep the socket open after it died."""
        if not self._settings.trainer_pid:
            return None
        try:
            fd = os.pidfd_open(self._settings.trainer_pid)
        except (AttributeError, OSError):
            return None
        if os.getppid() != self._settings.trainer_pid:
            # It died before; the number may be somebody else's by now. The end of the socket has to do.
            os.close(fd)
            return None
        return fd

    def _receive_all(self) -> bool:
        """Take every message that is there; return False at the end of the socket."""
        while True:
            try:
                packet = receive(self._control, _PACKET_MAX)
            except BlockingIOError:
                return True
            if packet is None:
                return False
            try:
                self._take(packet)
            finally:
                for fd in packet.fds:
                    os.close(fd)

    def _take(self, packet: Packet) -> None:
        try:
            message = flusher_pb2.TrainerMessage.FromString(packet.data)
            if not packet.whole:
                raise InvalidInputError("a message was cut short", nbytes=len(packet.data))
            kind = message.WhichOneof("kind")
            if kind == "arena":
                self._arena = _map_arena(message.arena.nbytes, packet.fds)
            elif kind == "flush":
                with self._lock:
                    self._unwritten += 1
                self._jobs.put((message.flush, self._arena))
            elif kind == "close":
                self._close = message.close
                self._leave()
                self._tell_end(closed=True)
        except (DecodeError, CkptError, OSError) as error:
            event(_log, logging.ERROR, "flusher.bad_message", error=error)
            self._arena = None if packet.fds else self._arena
            self._emit(_Event(state=_Event.STATE_WARNING, error=error_info(error)))

    def _emit(self, message: flusher_pb2.FlusherEvent) -> None:
        # Blocks when some thousand events were not read; the trainer's reader thread always reads.
        with contextlib.suppress(OSError):  # the trainer is gone; there is nobody to tell
            self._control.send(message.SerializeToString(), socket.MSG_NOSIGNAL)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake anyway
            os.write(self._wake_write, b"\0")

    def _start_server(self) -> None:
        pid = self._settings.trainer_pid or os.getpid()
        start_embedded_server(self._staging, trainer_pid=pid, environment=os.environ)

    def _open_heartbeat(self) -> Heartbeat | None:
        settings = self._settings
        if settings.pulse_fd is None:
            return None
        return Heartbeat(
            PulseReader(settings.pulse_fd),
            stacks_fd=settings.stacks_fd,
            trainer_pid=settings.trainer_pid,
            run_key=settings.run_key,
            staging=self._staging,
            open_remote=lambda: Remote(settings.server, self._staging, settings.run_key),
            clock=self._clock,
        )

    def _tell_end(self, *, closed: bool) -> None:
        if self._heartbeat is not None:
            self._heartbeat.trainer_ended(closed=closed)

    # --- the writer ---

    def _write_all(self) -> None:
        try:
            self._staging.ensure()
            sweep_debris(self._staging, self._settings.run_key)
        except CkptError as error:
            event(_log, logging.WARNING, "flusher.start_trouble", error=error)
        while (job := self._jobs.get()) is not None:
            self._write_one(*job)
            del job  # else the old arena would stay mapped until the next snapshot
            with self._lock:
                self._unwritten -= 1
            self._wake()

    def _write_one(self, flush: flusher_pb2.Flush, arena: mmap.mmap | None) -> None:
        began = self._clock.monotonic()
        reply = _Event(sequence=flush.sequence, id=flush.id)
        try:
            if arena is None:
                raise InvalidInputError("flush without an arena; announce one first")
            sealed = seal_segment(
                self._staging,
                self._settings.run_key,
                flush,
                memoryview(arena),
                threads=self._settings.threads,
            )
        except Exception as error:  # noqa: BLE001 -- thread border: the trainer gets it, the writer goes on
            _log.warning("flusher.failed sequence=%d", flush.sequence, exc_info=True)
            reply.state = _Event.STATE_FAILED
            reply.error.CopyFrom(error_info(error))
        else:
            reply.state = _Event.STATE_SEALED
            event(
                _log,
                logging.INFO,
                "flusher.sealed",
                id=sealed.ident,
                rank=sealed.rank,
                nbytes=sealed.nbytes,
                direct=sealed.direct,
                elapsed_s=self._clock.monotonic() - began,
            )
        reply.seconds = self._clock.monotonic() - began
        self._emit(reply)
        if reply.state == _Event.STATE_SEALED:  # after the event, which must come before "committed"
            self._handover.sealed(flush.sequence, CheckpointId.from_proto(flush.id), flush.rank)


def _map_arena(nbytes: int, fds: list[int]) -> mmap.mmap:
    """Map the memfd in ``fds``; the descriptor stays the caller's.

    Raises:
        InvalidInputError: it is not one descriptor, too small, or could still shrink, which would turn
            reading it into SIGBUS.
    """
    if len(fds) != 1:
        raise InvalidInputError("an arena needs exactly one descriptor", found=len(fds))
    if os.fstat(fds[0]).st_size < nbytes or not nbytes:
        raise InvalidInputError("the arena is smaller than announced", nbytes=nbytes)
    if not fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise InvalidInputError("the arena is not sealed against shrinking")
    return mmap.mmap(fds[0], nbytes, prot=mmap.PROT_READ)
