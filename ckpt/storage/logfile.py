"""Log files of processes that nobody watches: appended to, and bounded without a rotation service."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

__all__ = ["LOG_MOST_NBYTES", "open_log"]

LOG_MOST_NBYTES = 16 << 20


def open_log(path: Path) -> BinaryIO:
    """Open ``path`` for appending, unbuffered; one of more than 16 MiB is put aside first, as ``.1``.

    What was ``.1`` before goes. The two take about 32 MiB, plus what those write that have them open.

    Any number of processes may do so at once. The caller closes it; a child may have inherited it by then.

    Raises:
        OSError: it cannot be opened, or not be renamed.
    """
    while True:
        log = path.open("ab", buffering=0)
        try:
            if os.fstat(log.fileno()).st_size <= LOG_MOST_NBYTES:
                return log
            # Under the lock of the large file: a second process finds that the name is a new file's by now.
            fcntl.flock(log, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(log.fileno())):
                    path.replace(path.with_name(path.name + ".1"))
            fcntl.flock(log, fcntl.LOCK_UN)  # a child forked meanwhile would keep it
        except BaseException:
            log.close()
            raise
        log.close()
