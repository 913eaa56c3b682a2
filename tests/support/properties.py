"""Settings for property tests that do not fail on a slow or busy machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

__all__ = ["examples"]


def examples(count: int = 100) -> settings:
    """Try ``count`` examples, however long they take; a hang is left to the test timeout."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
