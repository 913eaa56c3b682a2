"""What an interval cost: CPU of our processes, cores that others used meanwhile, memory at its peak.

Linux only: everything is read from /proc.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = [
    "Cost",
    "Meter",
    "PeakMemory",
    "forget_cached",
    "sync_tree",
    "tree_cpu_s",
    "wait_until_idle",
    "warm_cache",
]

_TICKS = os.sysconf("SC_CLK_TCK")
_CORES = os.cpu_count() or 1
_LOOK_S = 0.3  # the counters go in steps of 10 ms


@dataclass(frozen=True, slots=True)
class Cost:
    """What one interval took.

    Attributes:
        wall_s: its length.
        cpu_s: CPU seconds of the measured processes and of everything below them, ended ones included. Work
            that the kernel does in threads of its own (write-back) is not in it.
        foreign: share of all cores that other processes used meanwhile, 0 to 1.
    """

    wall_s: float
    cpu_s: float
    foreign: float


class Meter:
    """Measures a ``with`` block; afterwards ``cost`` has the result.

    Args:
        roots: process ids whose trees are ours; default this process.
    """

    def __init__(self, *roots: int) -> None:
        self._roots = roots or (os.getpid(),)
        self.cost = Cost(0.0, 0.0, 0.0)

    def __enter__(self) -> Meter:
        self._own, self._busy = tree_cpu_s(*self._roots), _busy_s()
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall = time.perf_counter() - self._began
        own = tree_cpu_s(*self._roots) - self._own
        others = max(0.0, _busy_s() - self._busy - own)
        # The counters go in steps of 10 ms: in a shorter time than some of these, they say nothing.
        self.cost = Cost(wall, own, min(1.0, others / wall / _CORES) if wall > 0.1 else 0.0)


def tree_cpu_s(*roots: int) -> float:
    """Return the CPU seconds used so far by ``roots`` and all their descendants."""
    return sum(sum(map(int, fields[11:15])) for fields in _tree(roots).values()) / _TICKS


def _tree(roots: tuple[int, ...]) -> dict[int, list[str]]:
    """Fields of /proc/PID/stat behind the name, of each process at or below ``roots``."""
    every: dict[int, list[str]] = {}
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(") ")[2].split()
                every[int(folder.name)] = fields
                below.setdefault(int(fields[1]), []).append(int(folder.name))
    found: dict[int, list[str]] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in every and pid not in found:
            found[pid] = every[pid]
            waiting += below.get(pid, [])
    return found


def _busy_s() -> float:
    """CPU seconds that the whole machine has been busy."""
    values = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    user, nice, system, _idle, _iowait, irq, softirq = values
    return (user + nice + system + irq + softirq) / _TICKS


def wait_until_idle(*, most_s: float = 20.0) -> None:
    """Return when all processes together have used less than a tenth of a core for a third of a second."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        before = _busy_s()
        time.sleep(_LOOK_S)
        if _busy_s() - before < 0.1 * _LOOK_S:
            return


class PeakMemory:
    """Peak, over a ``with`` block, of private memory of our processes plus all shared memory, in bytes.

    Shared pages (memfd, tmpfs) count once; so nothing else may write to a tmpfs meanwhile.
    """

    def __init__(self, *roots: int) -> None:
        self._roots = roots or (os.getpid(),)
        self.peak_nbytes = self.extra_nbytes = 0

    def _now(self) -> int:
        return sum(map(_anonymous_nbytes, _tree(self._roots))) + _shared_nbytes()

    def __enter__(self) -> PeakMemory:
        self._before = self._peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, self._now())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_nbytes = max(self._peak, self._now())
        self.extra_nbytes = self.peak_nbytes - self._before


def _anonymous_nbytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return 0


def _shared_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def sync_tree(path: Path) -> None:
    """Make a file or folder durable: fsync every file, every folder, and the folder above."""
    folders = [path, *(each for each in path.rglob("*") if each.is_dir())] if path.is_dir() else []
    for each in [*_files(path), *folders, path.parent]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def forget_cached(path: Path) -> None:
    """Drop the (clean, unmapped) pages of a file or of all files below a folder from the page cache."""
    for each in _files(path):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_cache(path: Path) -> None:
    """Read a file, or all files below a folder, into the page cache."""
    buffer = bytearray(8 << 20)
    for each in _files(path):
        with each.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
