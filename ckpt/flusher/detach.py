"""Makes this process independent of the trainer that started it."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["detach"]

# What launchers, terminals and batch systems send to a whole job when it is to end. The flusher ends
# by itself, when everything that was handed over is sealed; SIGKILL still works.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGXFSZ")
_NICENESS = 5


def detach(*, keep_fds: set[int]) -> None:
    """Leave the trainer's session, signals, directory, descriptors and priority behind.

    Args:
        keep_fds: descriptors to keep besides stdin, stdout and stderr.
    """
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(PermissionError):  # leads a session already
        os.setsid()
    os.chdir("/")  # a staging directory on a mount that is to be unmounted is enough of a hold
    _close_others(keep_fds)
    # The training step comes first. Linux derives the priority of disk access from the same number.
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)


def _close_others(keep: set[int]) -> None:
    # A descriptor of the trainer that lives on here would keep a pipe, a port or a device busy.
    previous = 2
    for fd in sorted({*keep, 1 << 20}):
        os.closerange(previous + 1, fd)
        previous = max(previous, fd)
