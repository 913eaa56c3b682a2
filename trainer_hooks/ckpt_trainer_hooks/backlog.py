"""Tells the training log that saves wait for their commit for too long, whatever the reason is."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ckpt.clock import Clock, SystemClock
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt_trainer_hooks.handle import SaveHandle

__all__ = ["Backlog"]

_log = get_logger("manager")


class Backlog:
    """Remembers since when saves are under way. Not thread-safe: the training thread looks.

    Attributes:
        behind_s: age of the oldest from which on it is a warning.
    """

    def __init__(self, *, behind_s: float = 600.0, clock: Clock | None = None) -> None:
        self.behind_s = behind_s
        self._clock = clock or SystemClock()
        self._since: dict[CheckpointId, float] = {}
        self._warned_s = 0.0

    def look(self, pending: Iterable[SaveHandle]) -> None:
        """Note what is under way; warn where the oldest waits for long, again at twice that."""
        now = self._clock.monotonic()
        left = [handle.ident for handle in pending if not handle.done()]
        self._since = {ident: self._since.get(ident, now) for ident in left}
        oldest = min(self._since.values(), default=now)
        waited_s = now - oldest
        if waited_s < self.behind_s:
            self._warned_s = 0.0
        elif waited_s >= 2 * self._warned_s:
            self._warned_s = waited_s
            event(
                _log,
                logging.WARNING,
                "save.behind",
                reason="saves are not committed: see `ckpt status` for what the staging server says. "
                "What is sealed stays on NVMe",
                oldest_step=min(self._since, key=lambda ident: self._since[ident]).step,
                waited_s=waited_s,
                waiting=len(left),
            )
