"""The token bucket of replication: how many bytes pass in how much time, by a clock of our own."""

from __future__ import annotations

import pytest

from ckpt.rpc.throttle import Throttle
from tests.support.builders import FakeClock

MIB = 1 << 20


@pytest.mark.parametrize("rate", [MIB, 10 * MIB, 100 * MIB])
def test_no_span_of_time_lets_more_pass_than_the_rate_and_one_burst(rate: int) -> None:
    clock = FakeClock()
    throttle = Throttle(rate, largest=MIB, clock=clock)
    burst = max(MIB, rate // 4)
    passed: list[tuple[float, int]] = []
    for _ in range(200):
        throttle.take(MIB)
        passed.append((clock.monotonic(), MIB))
    for first in range(0, len(passed), 7):
        nbytes = 0
        for at, size in passed[first:]:
            nbytes += size
            assert nbytes <= rate * (at - passed[first][0]) + burst + MIB
    # Nor is it slower than it has to be.
    assert clock.monotonic() - passed[0][0] <= 200 * MIB / rate


def test_saved_up_time_is_a_burst_of_bounded_size() -> None:
    clock = FakeClock()
    throttle = Throttle(8 * MIB, largest=MIB, clock=clock)
    clock.time += 3600
    start = clock.monotonic()
    for _ in range(2):
        throttle.take(MIB)
    assert clock.monotonic() == start
    throttle.take(8 * MIB)
    assert clock.monotonic() - start == pytest.approx(1.0)


def test_no_limit_and_a_stopped_one_never_wait() -> None:
    clock = FakeClock()
    Throttle(0, largest=MIB, clock=clock).take(1 << 40)
    stopped = Throttle(1, largest=MIB, clock=clock)
    stopped.stop()
    stopped.take(1 << 40)
    assert clock.slept == []
