"""Standard descriptors that are closed, as some launchers leave them.

What is opened next takes their numbers: a socket becomes "stdin", and a child that is started with another
stdin does not get the socket that its command line names.
"""

from __future__ import annotations

import os

__all__ = ["fill_standard_fds"]


def fill_standard_fds() -> None:
    """Open /dev/null in place of stdin, stdout and stderr where they are closed. Idempotent.

    To be called before the first descriptor that matters is opened.
    """
    while True:
        fd = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if fd > 2:
            os.close(fd)
            return
        os.set_inheritable(fd, True)
