"""A small priority queue of retried jobs with its own threads.

One per run and kind of work, so that a store that hangs delays nobody else's run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ckpt.clock import Clock
from ckpt.events import event, get_logger

__all__ = ["Job", "WorkQueue"]

_log = get_logger("server.work")

Job = Callable[[], float | None]


@dataclass(slots=True)
class _Entry:
    priority: tuple[int, ...]
    job: Job
    due: float  # Clock.monotonic
    running: bool = False
    again: bool = False
    pausing: bool = False


class WorkQueue:
    """Runs jobs, lowest priority tuple first among those that are due.

    A job returns None when it is done, or the seconds after which it wants to run again; that pause is kept,
    however often the key is added meanwhile (every scan adds what is not done). A key is queued once; adding
    one that is running and gets done runs it once more afterwards. Jobs must leave nothing half-done that a
    restart does not find: the threads are daemons, and a job that outlasts :meth:`close` is cut off by the
    end of the process.
    """

    def __init__(self, name: str, *, workers: int, clock: Clock) -> None:
        self._name = name
        self._workers = workers
        self._clock = clock
        self._wake = threading.Condition()
        self._entries: dict[Hashable, _Entry] = {}  # guarded by self._wake
        self._threads: list[threading.Thread] = []  # guarded by self._wake
        self._stopping = False  # guarded by self._wake

    def add(self, key: Hashable, job: Job, *, priority: tuple[int, ...] = (), delay_s: float = 0.0) -> None:
        """Queue ``job`` unless ``key`` is queued; an earlier due time wins, but for a job's own pause."""
        due = self._clock.monotonic() + delay_s
        with self._wake:
            if self._stopping:
                return
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = _Entry(priority, job, due)
            elif entry.running:
                entry.again = True
            elif not entry.pausing:
                entry.due = min(entry.due, due)
            self._start_thread()
            self._wake.notify()

    def __len__(self) -> int:
        """Jobs queued or running."""
        with self._wake:
            return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        with self._wake:
            return key in self._entries

    def close(self, deadline: float) -> bool:
        """Start nothing new and wait for running jobs until ``deadline`` (monotonic); False: some run on."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start_thread(self) -> None:
        if len(self._threads) < self._workers:
            name = f"ckpt-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            key, entry = taken
            delay_s: float | None = None
            try:
                delay_s = entry.job()
            except Exception as error:  # noqa: BLE001 - thread border; jobs handle what they expect
                event(_log, logging.ERROR, "job.crashed", key=key, error=repr(error))
                _log.exception("job.crashed")
                delay_s = 60.0
            self._finish(key, entry, delay_s)

    def _take(self) -> tuple[Hashable, _Entry] | None:
        with self._wake:
            while not self._stopping:
                now = self._clock.monotonic()
                idle = [(key, entry) for key, entry in self._entries.items() if not entry.running]
                due = [item for item in idle if item[1].due <= now]
                if due:
                    key, entry = min(due, key=lambda item: item[1].priority)
                    entry.running = True
                    return key, entry
                soonest = min((entry.due for _, entry in idle), default=None)
                self._wake.wait(None if soonest is None else max(0.0, soonest - now))
            return None

    def _finish(self, key: Hashable, entry: _Entry, delay_s: float | None) -> None:
        with self._wake:
            entry.pausing = delay_s is not None
            if delay_s is None and entry.again:
                delay_s = 0.0
            if delay_s is None:
                del self._entries[key]
            else:
                entry.running = entry.again = False
                entry.due = self._clock.monotonic() + delay_s
            self._wake.notify()
