"""Which trainers on this node count on an embedded server: it stays for as long as one of them lives.

``<staging>/trainers/<pid>`` holds the start time of that process. It is written by the embedded server
that the trainer started, also when another server owns the directory already: that one then stays for the
new trainer too, where it would have left after the old one's last upload. A trainer that is done before it
ends may delete its file.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt.storage.durable import write_durably
from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["announce", "living"]

_INIT = 1
_DEAD_STATES = frozenset("ZXx")


def announce(staging: StagingDir, pid: int) -> None:
    """Note that the process ``pid`` counts on a server of ``staging``. Nothing for one that is gone.

    A parent that is init is no trainer: the trainer died before this process looked.
    """
    started = _start_time(pid)
    if pid == _INIT or started is None:
        return
    folder = staging.trainers_path()
    with os_errors("the trainer cannot be noted", path=folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        write_durably(folder / str(pid), started.encode())


def living(staging: StagingDir) -> list[int]:
    """The announced trainers that still run; files of others are deleted. Raises UnavailableError."""
    folder = staging.trainers_path()
    found = []
    with os_errors("the trainers cannot be listed", path=folder):
        for path in list(folder.iterdir()) if folder.is_dir() else []:
            if not path.name.isdigit():
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.read_text() == _start_time(int(path.name)):
                    found.append(int(path.name))
                else:
                    path.unlink()
    return sorted(found)


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot when ``pid`` started, which tells it from a later process of that number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Source: proc(5). The name, field 2, is in parentheses and may hold anything; field 3 is the state,
    # field 22 the start time.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in _DEAD_STATES else fields[19]
