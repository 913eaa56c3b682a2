"""Brings timings that ranks and flushers leave in the staging directory for people into the store."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ckpt.clock import Clock
from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.ops.ledger import ledger_to_publish, put_ledger
from ckpt.ops.recovery import put_recovery, recoveries_to_publish
from ckpt.storage.staging import StagingDir
from ckpt_server.runs import Run

__all__ = ["publish_ledger", "publish_recoveries"]

_log = get_logger("server.recoveries")
_RETRY_S = 30.0
_LAST = (1 << 62,)  # everything else is more urgent


def publish_recoveries(runs: Iterable[Run], staging: StagingDir) -> None:
    """Queue the put of every timing that is complete on this node. Called by the scan."""
    for run in runs:
        if recoveries_to_publish(staging, run.key):
            run.control.add("recovery", lambda run=run: _publish(run, staging), priority=_LAST)  # type: ignore[misc]


def _publish(run: Run, staging: StagingDir) -> float | None:
    records = recoveries_to_publish(staging, run.key)
    if not records:
        return None
    try:
        put_recovery(run.store, staging, run.key, records)
    except CkptError as error:
        event(_log, logging.WARNING, "recovery.not_published", run=run.key, error=error)
        return _RETRY_S if error.retryable else None
    event(_log, logging.INFO, "recovery.published", run=run.key, attempt=records[0].attempt)
    return None


def publish_ledger(runs: Iterable[Run], staging: StagingDir, clock: Clock) -> None:
    """Queue the put of what the ledger lacks of this node. Called by the scan."""
    for run in runs:
        if ledger_to_publish(staging, run.key, clock):
            run.control.add("ledger", lambda run=run: _put_ledger(run, staging, clock), priority=_LAST)  # type: ignore[misc]


def _put_ledger(run: Run, staging: StagingDir, clock: Clock) -> float | None:
    lives = ledger_to_publish(staging, run.key, clock)
    if not lives:
        return None
    try:
        put_ledger(run.store, staging, run.key, lives, clock=clock)
    except CkptError as error:
        event(_log, logging.WARNING, "ledger.not_published", run=run.key, error=error)
        return _RETRY_S if error.retryable else None
    event(_log, logging.INFO, "ledger.published", run=run.key, attempt=lives[0].attempt, ranks=len(lives))
    return None
