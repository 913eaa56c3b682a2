"""The same work on many items, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["map_in_threads"]

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(work: Callable[[T], R], items: Sequence[T], *, workers: int) -> list[R]:
    """Return ``work`` of each item, in order. A failure stops what has not begun and is raised.

    One task per worker, which takes item after item: a pool with one task per item spends 40 us on each,
    several times what reading a small object from memory costs.
    """
    if workers <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    results: list[R | None] = [None] * len(items)
    left = iter(range(len(items)))  # its next() is one step under the GIL
    failed = threading.Event()

    def take() -> None:
        for position in left:
            if failed.is_set():
                return
            try:
                results[position] = work(items[position])
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(workers, thread_name_prefix="ckpt-many") as pool:
        for task in [pool.submit(take) for _ in range(workers)]:
            task.result()
    return results  # type: ignore[return-value]
