"""Starts, talks to and watches the flusher child of this trainer."""

from __future__ import annotations

import array
import contextlib
import importlib.util
import logging
import os
import select
import site
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from google.protobuf.message import DecodeError

from ckpt.errors import InvalidInputError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.flusher.packets import receive
from ckpt.storage.logfile import open_log
from ckpt.storage.staging import StagingDir, os_errors
from ckpt.storage.standard_fds import fill_standard_fds
from ckpt_proto.v1 import flusher_pb2
from ckpt_trainer_hooks.arena import Arena

__all__ = ["FlusherProcess", "python_path"]

_PACKET_MAX = 256 << 10  # bytes of one event; the kernel drops what is longer
_NEEDED_MODULES = ("ckpt", "ckpt_proto", "ckpt_server", "google.protobuf", "grpc", "xxhash")
_log = get_logger("flusher.process")
_live: weakref.WeakSet[FlusherProcess] = weakref.WeakSet()


class FlusherProcess:
    """One flusher child. The constructor does not wait for it to be up; what is sent before is queued.

    The child has its own session and outlives this process until what was handed over is sealed.

    Args:
        staging: the staging directory; created if missing.
        run_key: of a run whose ``run.json`` is (or will be, before the first flush is sealed) there.
        server: gRPC target of the staging server, e.g. ``unix:/path``; it need not exist yet.
        on_event: called from the thread ``ckpt-events`` with every event; must not block for long.
        on_death: called once from that thread with the exit code (negative: the signal that killed it)
            if the flusher ends although nobody called :meth:`close`. Snapshots it had not sealed are lost
            unless they are still in the arena; start a new FlusherProcess and flush again.
        threads: chunks written at once; with four the device stays busy while some are digested.
        close_timeout_s: how long the child waits for the server after ``close(wait=True)``.
        orphan_timeout_s: how long the child tries a server that does not answer after this process died,
            or after ``close(wait=False)``.
        starts_server: the child starts an embedded server whenever none answers.
        environment: added to the child's environment.
        pulse: descriptors (pulse, stacks) that show it how this process is doing; see
            :class:`ckpt_trainer_hooks.liveness.Pulse`.

    Raises:
        UnavailableError: the process cannot be started, or the staging directory cannot be created.
    """

    def __init__(
        self,
        *,
        staging: str | os.PathLike[str],
        run_key: str,
        server: str,
        on_event: Callable[[flusher_pb2.FlusherEvent], None],
        on_death: Callable[[int], None],
        threads: int = 4,
        close_timeout_s: float = 3600.0,
        orphan_timeout_s: float = 20.0,
        starts_server: bool = False,
        environment: Mapping[str, str] | None = None,
        pulse: tuple[int, int | None] | None = None,
    ) -> None:
        self._on_event = on_event
        self._on_death = on_death
        self._owner = os.getpid()
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._exit_code: int | None = None
        fill_standard_fds()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        options = ["--staging", str(Path(staging).absolute()), "--run-key", run_key, "--server", server]
        options += ["--threads", str(threads), "--close-timeout", str(close_timeout_s)]
        options += ["--orphan-timeout", str(orphan_timeout_s)]
        options += ["--start-server"] if starts_server else []
        try:
            shared = [fd for fd in pulse or () if fd is not None]
            options += [f"--{name}-fd={fd}" for name, fd in zip(("pulse", "stacks"), shared, strict=False)]
            self._process = _start(StagingDir(staging), theirs, shared, options, environment or {})
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        _live.add(self)
        # Daemon: all it does is inform a trainer, and one that exits needs no informing. It lives as
        # long as the child, so the child is always reaped.
        self._reader = threading.Thread(target=self._read_events, name="ckpt-events", daemon=True)
        self._reader.start()

    def __enter__(self) -> FlusherProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the child runs; else its exit code, negative for the signal that killed it."""
        return self._exit_code

    def send_arena(self, arena: Arena) -> None:
        """Announce ``arena``; it replaces the one before for the flushes that follow. Does not block.

        Raises:
            UnavailableError: code "flusher-dead".
        """
        message = flusher_pb2.TrainerMessage(arena=flusher_pb2.Arena(nbytes=arena.nbytes))
        self._send(message, [arena.fd])

    def flush(self, flush: flusher_pb2.Flush) -> None:
        """Hand over the snapshot in the arena. Does not block.

        The arena must not change until the event SEALED or FAILED with this sequence. From here on the
        flusher finishes the snapshot even if this process dies.

        Raises:
            UnavailableError: code "flusher-dead".
        """
        self._send(flusher_pb2.TrainerMessage(flush=flush), [])

    def close(self, *, wait: bool = True, timeout_s: float | None = None) -> int | None:
        """Announce that no more flushes come; return the exit code, or None if the child still runs.

        Args:
            wait: the child stays until the server has said how every step ended, and this call waits for
                it. False: the child seals what it has, tells the server and leaves; the call returns at once.
            timeout_s: how long this call waits; None waits as long as the child (its ``close_timeout_s``).

        A second call only waits. In a forked copy of the trainer it does nothing.
        """
        if os.getpid() != self._owner:
            return None
        if not self._closing.is_set():
            self._closing.set()
            with contextlib.suppress(UnavailableError):
                self._send(flusher_pb2.TrainerMessage(close=flusher_pb2.Close(wait=wait)), [])
        if wait:
            self._ended.wait(timeout_s)
        return self._exit_code

    # --- inside ---

    def _send(self, message: flusher_pb2.TrainerMessage, fds: list[int]) -> None:
        if os.getpid() != self._owner:
            raise InvalidInputError("the flusher belongs to the parent of this forked process")
        try:
            if self._ended.is_set():
                raise BrokenPipeError
            # Not socket.send_fds: it drops the flags it is given.
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._socket.sendmsg(
                [message.SerializeToString()], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
            )
        except OSError as error:
            raise UnavailableError(
                "the flusher does not take messages; it has died or hangs",
                code="flusher-dead",
                pid=self.pid,
                exit_code=self._exit_code,
            ) from error

    def _read_events(self) -> None:
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            # The end of the socket alone would not do: a process forked between socketpair() and the
            # start of the child holds a copy of the child's end.
            death = _open_pidfd(self.pid)
            if death is not None:
                poller.register(death, select.POLLIN)
            with contextlib.ExitStack() as stack:
                if death is not None:
                    stack.callback(os.close, death)
                while True:
                    ready = {fd for fd, _ in poller.poll()}
                    # Received after the poll, so that what it said before it died is not lost.
                    if not self._receive() or death in ready:
                        break
        finally:
            self._finish()

    def _receive(self) -> bool:
        """Deliver the events that are there; return whether more may come."""
        while True:
            try:
                packet = receive(self._socket, _PACKET_MAX)
            except BlockingIOError:
                return True
            if packet is None:
                return False
            self._deliver(packet.data)

    def _deliver(self, packet: bytes) -> None:
        try:
            self._on_event(flusher_pb2.FlusherEvent.FromString(packet))
        except DecodeError:
            event(_log, logging.ERROR, "flusher.event_unreadable", nbytes=len(packet))
        except Exception:  # noqa: BLE001 -- thread border: a bug in a callback must not stop the events
            _log.exception("flusher.callback_failed")

    def _finish(self) -> None:
        code = self._process.wait()
        self._exit_code = code
        self._ended.set()
        _live.discard(self)
        self._socket.close()
        if self._closing.is_set():
            event(_log, logging.DEBUG, "flusher.left", pid=self.pid, exit_code=code)
            return
        event(_log, logging.WARNING, "flusher.died", pid=self.pid, exit_code=code)
        try:
            self._on_death(code)
        except Exception:  # noqa: BLE001 -- thread border
            _log.exception("flusher.callback_failed")

    def _forget(self) -> None:
        # A forked child must not keep the line open: the flusher would not notice that the trainer died.
        self._socket.close()


def _forget_all() -> None:
    for process in list(_live):
        process._forget()


os.register_at_fork(after_in_child=_forget_all)


def _start(
    staging: StagingDir,
    theirs: socket.socket,
    shared: list[int],
    options: list[str],
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start the child. Takes some milliseconds: no disk is waited for, and nothing of it is awaited."""
    with os_errors("the flusher cannot be started", staging=staging.path):
        staging.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Not the trainer's stdout or stderr: launchers wait until the last holder of the pipe is gone.
        with open_log(staging.path / "flusher.log") as log:
            own = ["--control-fd", str(theirs.fileno()), "--trainer-pid", str(os.getpid())]
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "ckpt.flusher", *own, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno(), *shared],
                start_new_session=True,  # Ctrl-C and the launcher's killpg must not reach it
                cwd="/",
                env={**os.environ, **python_path(), **environment},
            )


def python_path() -> dict[str, str]:
    """Let the child import what this process imported, also from a checkout that is not installed.

    Site directories are left out: the child has them anyway, and in front of the standard library
    they could shadow it.
    """
    known = {Path(path) for path in [*site.getsitepackages(), site.getusersitepackages()]}
    roots: list[str] = []
    for name in _NEEDED_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parents[name.count(".") + 1]
        if root not in known and str(root) not in roots:
            roots.append(str(root))
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*roots, *([inherited] if inherited else [])])} if roots else {}


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or older than 5.3: the end of the socket has to do
        return None
