"""Signals that ask for a stop: noticed at once, also where the training thread is blocked in C.

Python runs handlers on the main thread, between two byte codes; one that waits in a collective gets there
late or never. So the C-level handler also writes the number to a pipe (``signal.set_wakeup_fd``), which
another thread reads. Handlers that were installed before are called as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any

from ckpt.errors import InvalidInputError

__all__ = ["StopSignals", "parse_signals", "stop_signals"]


def parse_signals(names: Collection[str] | None, configured: str | None) -> tuple[signal.Signals, ...]:
    """The signals that ask for a stop: ``names``, else ``configured`` (names with commas; "": none).

    Raises:
        InvalidInputError: not a signal, or one that cannot be caught.
    """
    if names is None:
        names = ("SIGTERM", "SIGUSR1") if configured is None else configured.replace(",", " ").split()
    found = []
    for name in names:
        try:
            number = signal.Signals[name]
        except KeyError:
            raise InvalidInputError("not the name of a signal, such as SIGTERM", given=name) from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise InvalidInputError("this signal cannot be caught", given=name)
        found.append(number)
    return tuple(found)


class StopSignals:
    """The handlers of this process, shared by all managers of it. Install and remove on the main thread."""

    def __init__(self) -> None:
        self._users: dict[signal.Signals, int] = {}
        self._previous: dict[int, Any] = {}
        self._seen: dict[int, int] = {}  # how often; written by handlers and by poll()
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Lock()  # of the reading end

    def install(self, numbers: Sequence[signal.Signals]) -> Callable[[], None]:
        """Take ``numbers`` over, but not those that are ignored; returns what gives them back.

        Off the main thread nothing is installed: Python forbids it.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        taken = [number for number in numbers if self._take(number)]
        if taken and self._pipe is None:
            self._open_pipe()
        return lambda: self._give_back(taken)

    def count(self, number: int) -> int:
        """How often a signal has come since it was installed, as far as :meth:`poll` has heard."""
        return self._seen.get(number, 0)

    def is_handled_elsewhere(self, number: int) -> bool:
        """Whether the program has a handler of its own for it, which has been called too."""
        return (
            callable(self._previous.get(number)) and self._previous[number] is not signal.default_int_handler
        )

    def poll(self) -> None:
        """Look for signals that the main thread has not come to handle yet. From any thread."""
        if self._pipe is None:
            return
        with self._lock, contextlib.suppress(BlockingIOError):
            for number in os.read(self._pipe[0], 4096):
                if number in self._previous:
                    self._seen[number] = self._seen.get(number, 0) + 1

    def forget(self) -> None:
        """In a forked copy of the process (a loader's worker): signals do there what they did before, and
        nothing is written to the pipe, whose other end is the parent's.
        """
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            for fd in self._pipe:
                os.close(fd)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._pipe = None
        self._users, self._previous, self._seen = {}, {}, {}
        self._lock = threading.Lock()

    def _take(self, number: signal.Signals) -> bool:
        if self._users.get(number, 0) == 0:
            previous = signal.getsignal(number)
            if previous is None or previous == signal.SIG_IGN:
                return False  # somebody's C handler, or deaf on purpose (nohup)
            self._previous[number] = previous
            signal.signal(number, self._handle)
        self._users[number] = self._users.get(number, 0) + 1
        return True

    def _give_back(self, numbers: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            self._users[number] -= 1
            if self._users[number] == 0 and signal.getsignal(number) == self._handle:
                signal.signal(number, self._previous.pop(number))
        if not any(self._users.values()):
            self._close_pipe()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pipe is None:  # else the pipe has told
            self._seen[number] = self._seen.get(number, 0) + 1
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _open_pipe(self) -> None:
        pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        other = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        if other == -1:
            self._pipe = pipe
            return
        signal.set_wakeup_fd(other)  # an event loop's: then the handlers alone have to do
        for fd in pipe:
            os.close(fd)

    def _close_pipe(self) -> None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
            if pipe is None:
                return
            if (found := signal.set_wakeup_fd(-1)) not in (-1, pipe[1]):
                signal.set_wakeup_fd(found)  # somebody has put theirs in our place
            for fd in pipe:
                os.close(fd)


stop_signals = StopSignals()
os.register_at_fork(after_in_child=stop_signals.forget)
