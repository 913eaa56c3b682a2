"""What leaves NVMe and the store after a commit. Nothing before something newer is committed (I7)."""

from __future__ import annotations

import logging

from ckpt.errors import RefusedError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.plan.retention import newest_first
from ckpt.storage.spares import drop_spares, retire_checkpoint, spare_nbytes
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import staging_pb2
from ckpt_server.runs import Run
from ckpt_server.steps import StepRecord, StepTable

__all__ = ["overtaken", "retain_local", "retain_remote"]

_log = get_logger("server.retention")
_Status = staging_pb2.StepStatus

# Records of steps that are no longer here, kept so that a late watcher still hears how they ended.
_REMEMBERED = 256
# Beside the next save, bytes: indexes, markers and what else the disk holds.
_HEADROOM_NBYTES = 64 * 1024 * 1024
# Somebody has pinned, or resumed from, what was to go while it was looked at.
_OVERTAKEN = frozenset({"pinned", "last-good"})
# A spare segment that was not overwritten for so long is given back, seconds: the run has ended.
_SPARE_AGE_S = 3600.0


def overtaken(ident: CheckpointId, committed: list[CheckpointId]) -> bool:
    """Whether a committed checkpoint of this attempt, or of a newer one, is newer than ``ident``."""
    return any(
        other.attempt > ident.attempt or (other.attempt == ident.attempt and other.step > ident.step)
        for other in committed
    )


def retain_local(
    staging: StagingDir, run: Run, table: StepTable, *, now: float, grace_s: float, free_nbytes: int
) -> list[CheckpointId]:
    """Delete committed steps beyond the newest ``keep_local``, and steps that can never commit.

    A step that is sealed here and not committed is never deleted, unless it is older than ``grace_s``
    and overtaken, and either a rank of this node never sealed it, or all this node owed it is in the store.
    Where the next save would not fit into ``free_nbytes``, only the newest committed step stays: a save that
    fails is worse than a restart that reads from the store. The segments of a committed step become spares
    (see ckpt.storage.spares) where there is room.

    Returns:
        What was deleted.

    Raises:
        UnavailableError: the staging directory cannot be read or changed.
    """
    free_nbytes += spare_nbytes(staging, run.key)  # the next save overwrites them
    here = staging.checkpoints(run.key)
    committed = newest_first([ident for ident in here if staging.is_committed(run.key, ident)])
    gone = committed[_keep_count(run, table, free_nbytes) :]
    for ident in here:
        if (
            ident not in committed
            and overtaken(ident, committed)
            and _is_dead(staging, run, table, ident, now - grace_s)
        ):
            event(_log, logging.WARNING, "step.abandoned", run=run.key, checkpoint=ident)
            table.update(run.key, ident, state=_Status.STATE_ABANDONED)
            gone.append(ident)
    has_room = free_nbytes >= _next_save_nbytes(run, table)
    for ident in gone:
        if has_room and ident in committed:
            retire_checkpoint(staging, run.key, ident)
        else:
            staging.remove_checkpoint(run.key, ident)
        event(_log, logging.INFO, "retain.local", run=run.key, checkpoint=ident)
    drop_spares(staging, run.key, unused_since=now - _SPARE_AGE_S if has_room else None)
    _forget_old(table, run.key, set(here) - set(gone))
    return gone


def _next_save_nbytes(run: Run, table: StepTable) -> int:
    largest = max((sum(record.nbytes.values()) for record in table.records(run.key)), default=0)
    return largest + _HEADROOM_NBYTES


def _keep_count(run: Run, table: StepTable, free_nbytes: int) -> int:
    wanted = max(1, run.config.keep_local)
    needed = _next_save_nbytes(run, table)
    if wanted == 1 or free_nbytes >= needed:
        return wanted
    event(_log, logging.WARNING, "retain.low_space", run=run.key, free=free_nbytes, next_save=needed)
    return 1


def retain_remote(run: Run) -> int:
    """Apply the run's keep_last and keep_every in the store; returns the number of deleted objects.

    Raises:
        CkptError: whatever the store raises; RefusedError where what ``latest`` names is not whole.
    """
    config = run.config
    verdicts = plan_retention(run.store, keep_last=config.keep_last, keep_every=config.keep_every)
    try:
        report = execute_prune(run.store, verdicts)
    except RefusedError as error:
        if error.code not in _OVERTAKEN:
            raise
        event(_log, logging.INFO, "retain.overtaken", run=run.key, reason=error)  # the next commit prunes
        return 0
    if report.deleted:
        gone = ",".join(map(str, report.deleted))
        event(_log, logging.INFO, "retain.store", run=run.key, deleted=gone, objects=report.deleted_objects)
    return report.deleted_objects


def _is_dead(staging: StagingDir, run: Run, table: StepTable, ident: CheckpointId, older_than: float) -> bool:
    record = table.get(run.key, ident)
    if record is None:
        return _is_debris(staging, run, ident, older_than)
    if record.sealed_at > older_than:
        return False
    if record.state == _Status.STATE_SEALING:
        return record.sealed == record.uploaded
    return record.state in (_Status.STATE_UPLOADED, _Status.STATE_ABANDONED)


def _is_debris(staging: StagingDir, run: Run, ident: CheckpointId, older_than: float) -> bool:
    """Whether a folder without any seal has not been written to for long."""
    path = staging.checkpoint_dir(run.key, ident)
    with os_errors("the staging directory cannot be read", path=path):
        if staging.sealed_ranks(run.key, ident):
            return False
        return max(entry.stat().st_mtime for entry in (path, *path.iterdir())) < older_than


def _forget_old(table: StepTable, run_key: str, here: set[CheckpointId]) -> None:
    ended: list[StepRecord] = [record for record in table.records(run_key) if record.ident not in here]
    for record in ended[:-_REMEMBERED]:
        table.forget(run_key, record.ident)
