"""The same work on many items, several at a time."""

from __future__ import annotations

import threading

import pytest

from ckpt.ops.threads import map_in_threads


@pytest.mark.parametrize("workers", [1, 3, 64])
def test_results_come_in_the_order_of_the_items(workers: int) -> None:
    assert map_in_threads(lambda item: item * 2, range(500), workers=workers) == list(range(0, 1000, 2))
    assert map_in_threads(lambda item: item, [], workers=workers) == []


def test_workers_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)
    assert len(map_in_threads(lambda _: both.wait(), range(4), workers=2)) == 4


@pytest.mark.parametrize("workers", [1, 4])
def test_a_failure_is_raised_and_stops_what_has_not_begun(workers: int) -> None:
    done = []

    def work(item: int) -> None:
        if item == 0:
            raise ZeroDivisionError
        failing.wait(30)
        done.append(item)

    failing = threading.Event()

    def fail_first(item: int) -> None:
        try:
            work(item)
        finally:
            failing.set()

    with pytest.raises(ZeroDivisionError):
        map_in_threads(fail_first, range(1_000_000), workers=workers)
    assert len(done) < 1_000_000 - 1
