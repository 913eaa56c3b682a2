"""A job that is tried again with growing pauses after a hiccup, and reports an error that stays."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckpt.clock import random_bytes
from ckpt.errors import CkptError, TimeoutExceededError
from ckpt.events import event, get_logger

__all__ = ["Retried"]

_log = get_logger("server.pipeline")
_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 15.0
_JITTER = 0.25  # of the pause, either way: thousands of servers must not knock at one moment


class Retried:
    """A job for a :class:`ckpt_server.work.WorkQueue`.

    Args:
        work: returns None when it is done, or the seconds after which it wants to run again.
        waiting: told of an error that may pass; the job is tried again.
        failed: told of one that stays; the job is given up.
    """

    def __init__(
        self,
        work: Callable[[], float | None],
        *,
        waiting: Callable[[CkptError], None],
        failed: Callable[[CkptError], None],
    ) -> None:
        self._work = work
        self._waiting = waiting
        self._failed = failed
        self._failures = 0

    def __call__(self) -> float | None:
        try:
            delay_s = self._work()
        except CkptError as error:
            return self._handle(error)
        except Exception as error:  # noqa: BLE001 - thread border: logged and kept as the job's error
            _log.exception("job.crashed")
            self._failed(CkptError("the server failed in a way it should not", reason=repr(error)))
            return None
        self._failures = 0
        return delay_s

    def _handle(self, error: CkptError) -> float | None:
        if not (error.retryable or isinstance(error, TimeoutExceededError)):
            self._failed(error)
            return None
        self._failures += 1
        pause_s = min(_RETRY_MOST_S, _RETRY_FIRST_S * 2.0 ** min(self._failures - 1, 16))
        delay_s = pause_s * (1.0 + _JITTER * (random_bytes(1)[0] / 127.5 - 1.0))
        event(_log, logging.WARNING, "job.retry", error=error, failures=self._failures, delay_s=delay_s)
        self._waiting(error)
        return delay_s
