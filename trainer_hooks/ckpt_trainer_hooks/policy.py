"""When to save. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckpt.errors import InvalidInputError

__all__ = ["EveryNSteps", "SaveDecisionPolicy"]


class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved. Must give the same answer on every rank."""

    def should_save(self, step: int) -> bool:
        """Return whether to save after ``step`` optimizer steps."""
        ...


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Save when the number of completed steps is a multiple of ``interval`` (0: never by itself)."""

    interval: int

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise InvalidInputError("save_interval_steps must not be negative", value=self.interval)

    def should_save(self, step: int) -> bool:
        return self.interval > 0 and step % self.interval == 0
