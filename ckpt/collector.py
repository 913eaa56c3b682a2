"""Python's garbage collector, kept out of bursts of allocation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused", "heap_set_aside"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection in the block, on any thread; afterwards it is as it was.

    Planning a snapshot or a restore makes several objects per tensor, the proof of a commit several per rank,
    and no cycles. The collector counts the objects and walks the whole heap again and again, the model's
    modules included: with 20,000 tensors that was 60 % of the time of a plan; with 588, one restore in ten
    took twice as long; with 100,000 ranks it was 14 % of a commit. Also a decorator. Nests.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """In the block collections look at what was made in it, and not at all that there is; also a decorator.

    For work of any length, in which garbage must be collected: the collector, held up while a restore was
    planned, now and then went over the whole heap while it read, 115 to 205 ms. Nests. Somebody else's frozen
    heap stays as it is (``gc.unfreeze`` would thaw that as well).
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
