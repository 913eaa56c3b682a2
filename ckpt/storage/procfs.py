"""What the kernel says about a process. Source of all fields: proc(5). Nothing is raised: a process may end
at any moment, and what cannot be read (rights, another kernel) is left out.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt.clock import SystemClock

__all__ = ["catches_signal", "kernel_view", "process_started_at", "process_state", "thread_cpu_ticks"]

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
_FIELDS_BEFORE_STATE = 2


def process_state(pid: int) -> str:
    """The letter of its state ("R", "S", "D", "T", "t", "Z", ...); empty where there is no such process."""
    fields = _stat(f"/proc/{pid}/stat")
    return fields[0] if fields else ""


def kernel_view(pid: int) -> str:
    """Its state, where it sleeps in the kernel and in which system call, as one line; as far as visible."""
    state = process_state(pid)
    if not state:
        return ""
    parts = [f"state {state} ({_STATES.get(state, 'unknown')})"]
    if (channel := _read(f"/proc/{pid}/wchan")) not in ("", "0"):
        parts.append(f"wchan {channel}")
    if call := _read(f"/proc/{pid}/syscall"):
        parts.append(f"syscall {call.split()[0]}")
    if stack := _read(f"/proc/{pid}/stack"):  # of the kernel; root only
        names = [line.split()[-1].partition("+")[0] for line in stack.splitlines()[:4]]
        parts.append(f"kernel stack {' < '.join(names)}")
    return ", ".join(parts)


def process_started_at(pid: int) -> float | None:
    """Unix seconds when it began, to a hundredth; None where there is no such process."""
    fields = _stat(f"/proc/{pid}/stat")
    uptime = _read("/proc/uptime").split()
    if not fields or not uptime:
        return None
    age_s = float(uptime[0]) - int(fields[21 - _FIELDS_BEFORE_STATE]) / os.sysconf("SC_CLK_TCK")
    return SystemClock().now() - age_s


def thread_cpu_ticks(thread: int) -> int:
    """Clock ticks of CPU time that a thread of this process has used; 0 where it is gone."""
    fields = _stat(f"/proc/self/task/{thread}/stat")
    return int(fields[13 - _FIELDS_BEFORE_STATE]) + int(fields[14 - _FIELDS_BEFORE_STATE]) if fields else 0


def catches_signal(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal ``number``."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _stat(path: str) -> list[str]:
    # The name, field 2, is in parentheses and may hold anything; what follows begins with the state.
    return _read(path).rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""
