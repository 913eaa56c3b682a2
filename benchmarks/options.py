"""What the command line says about sizes, places and rows, for every benchmark alike."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["TMPFS", "Options"]

TMPFS = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one run of one benchmark.

    Attributes:
        quick: smallest sizes and one repeat: shows that it runs, measures nothing.
        place: "disk" or "tmpfs".
        disk: folder on the disk to be measured; None: where temporary files go.
        only: rows wanted, by parts of their names; empty for all.
        mib: size of the state, instead of the benchmark's own.
        repeat: repeats, instead of the benchmark's own.
        threads: compute threads of the training.
        seconds: no new round begins after so long; None: as many as were asked for.
    """

    quick: bool = False
    place: str = "disk"
    disk: Path | None = None
    only: tuple[str, ...] = ()
    mib: int | None = None
    repeat: int | None = None
    threads: int = os.cpu_count() or 1
    seconds: float | None = None
    began_at: float = field(default_factory=time.monotonic)

    def time_is_up(self) -> bool:
        """Return whether no further round may begin."""
        return self.seconds is not None and time.monotonic() - self.began_at > self.seconds

    def has_time_for(self, seconds: float) -> bool:
        """Return whether a round of about ``seconds`` would still end in time."""
        return self.seconds is None or time.monotonic() - self.began_at + seconds <= self.seconds

    def name(self, benchmark: str) -> str:
        """Return the name of the benchmark's report in this place."""
        return benchmark if self.place == "disk" else f"{benchmark}-{self.place}"

    def size(self, *, quick: int, full: int) -> int:
        """Return the wanted size of the state, in bytes."""
        if self.mib is not None:
            return self.mib << 20
        return quick if self.quick else full

    def repeats(self, *, quick: int, full: int) -> int:
        if self.repeat is not None:
            return self.repeat
        return quick if self.quick else full

    def chosen(self, titles: Sequence[str], *, always: Sequence[str] = ()) -> list[str]:
        """Return the titles that ``only`` lets through, and ``always``, in their order."""
        return [t for t in titles if t in always or not self.only or any(part in t for part in self.only)]

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A new folder in the place, removed afterwards."""
        where = TMPFS if self.place == "tmpfs" else self.disk
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=where, ignore_cleanup_errors=True) as name:
            yield Path(name)
