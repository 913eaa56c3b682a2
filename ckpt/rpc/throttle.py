"""A token bucket: how fast bytes may leave."""

from __future__ import annotations

import threading

from ckpt.clock import Clock

__all__ = ["Throttle"]

# So long may a sender save up. It hides pauses of the source and is short enough to be no burst to a link.
_BURST_S = 0.25
_SLICE_S = 0.5


class Throttle:
    """Lets at most ``rate`` bytes per second pass, after a first burst of a quarter of a second. Thread-safe.

    In any span of t seconds at most ``rate * t + burst`` bytes pass, where the burst is at least one message.

    Args:
        rate: bytes per second; 0 lets everything pass at once.
        largest: bytes of the largest single take.
    """

    def __init__(self, rate: int, *, largest: int, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._burst = max(largest, int(rate * _BURST_S))
        self._lock = threading.Lock()
        self._left = float(self._burst)  # guarded by self._lock; negative: promised to earlier takers
        self._at = clock.monotonic()  # guarded by self._lock
        self._stopped = False

    def take(self, nbytes: int) -> None:
        """Block until ``nbytes`` more may pass. Returns at once after :meth:`stop`."""
        if not self.rate:
            return
        with self._lock:
            now = self._clock.monotonic()
            self._left = min(self._burst, self._left + (now - self._at) * self.rate)
            self._at = now
            self._left -= nbytes
            wait_s = max(0.0, -self._left / self.rate)
        while wait_s > 0 and not self._stopped:
            self._clock.sleep(min(wait_s, _SLICE_S))
            wait_s -= _SLICE_S

    def stop(self) -> None:
        """Let everything pass: whoever waits is about to be cancelled."""
        self._stopped = True
