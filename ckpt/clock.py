"""Time and randomness behind one seam, so that crash tests can replay."""

from __future__ import annotations

import secrets
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "random_bytes"]


class Clock(Protocol):
    """Where a component gets its time from."""

    def now(self) -> float:
        """Return Unix seconds (for people; never used to order checkpoints)."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start that never go back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def random_bytes(count: int) -> bytes:
    """Return ``count`` bytes that no other writer will draw."""
    return secrets.token_bytes(count)
