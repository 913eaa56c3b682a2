"""The jobs of a step: upload, publish, commit, retain. Retries, back-off and what watchers see of them.

Order is by attempt and step; a step that fails does not hold up later ones.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable

from ckpt.clock import Clock
from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import exists, list_checkpoints
from ckpt.ops.commit import CommitState, commit_delay_s, try_commit
from ckpt.ops.groups import list_groups
from ckpt.ops.identity import OTHER_RUN
from ckpt.storage.key_source import environment_keys
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import common_pb2, staging_pb2
from ckpt_server import retention
from ckpt_server.chunk_source import encoder_threads
from ckpt_server.publisher import publish_group
from ckpt_server.retried import Retried
from ckpt_server.run_identity import RunIdentity
from ckpt_server.runs import Run
from ckpt_server.settings import Settings
from ckpt_server.steps import StepTable
from ckpt_server.uploader import Segment, Uploader

__all__ = ["Pipeline"]

_log = get_logger("server.pipeline")
_Status = staging_pb2.StepStatus

# Rank 0's server commits at once; the others look whether it did, and do it themselves where not.
_POLL_FIRST_S = 1.0
_STAND_IN_FIRST_S = 5.0
_POLL_MOST_S = 60.0
# What a commit says where parts of a checkpoint that were in the store are there no more.
_PARTS_GONE = frozenset({"deleted", "missing", "reference-gone"})
# Around every step's priority, which begins with its attempt.
_FIRST = (0,)


class Pipeline:
    """Queues and carries out the jobs of steps. Thread-safe.

    Args:
        examine: called after a segment was uploaded, to see what the step needs next.
    """

    def __init__(self, staging: StagingDir, table: StepTable, settings: Settings, clock: Clock) -> None:
        self._staging = staging
        self._table = table
        self._settings = settings
        self._clock = clock
        self._uploader = Uploader(
            staging,
            part_nbytes=settings.part_nbytes,
            concurrency=settings.upload_concurrency,
            encoders=encoder_threads(),
            key=environment_keys().writing(),
        )
        self._identity = RunIdentity(staging)
        self.progressed_at = clock.monotonic()

    def probe(self, run: Run) -> None:
        """Queue the conditional-put probe of the run's store."""

        def work() -> None:
            try:
                run.probe()
            except CkptError as error:  # whoever needs the answer asks again
                event(_log, logging.WARNING, "store.probe_failed", run=run.key, error=error)

        run.control.add("probe", self._retried(run, None, work), priority=_FIRST)

    def upload(self, run: Run, ident: CheckpointId, rank: int) -> None:
        """Queue one segment."""

        def work() -> None:
            known = self._table.get(run.key, ident)
            if known is not None and rank in known.uploaded:
                return  # queued once more while it was on its way: by a Seal of another rank, or by the scan
            self._identity.require_own(run, ident, rank)  # else it would overwrite what has its name now
            done = self._uploader.upload(
                run.store,
                Segment(run_key=run.key, ident=ident, rank=rank),
                lending=run.lending,
                compression=run.compression,
                wanted=run.config.compression or self._settings.compression,
            )
            event(
                _log,
                logging.INFO,
                "upload.done",
                run=run.key,
                checkpoint=ident,
                rank=rank,
                nbytes=done.nbytes,
                sent=done.sent_nbytes,
                stored=done.stored_nbytes,
                borrowed=done.borrowed_nbytes,
            )
            self._progress()
            record = self._table.add_uploaded(run.key, ident, rank, done.stored_nbytes)
            if record is not None and record.is_uploaded:
                self.publish(run, ident)

        run.uploads.add((ident, rank), self._retried(run, ident, work), priority=_order(ident, rank))

    def publish(self, run: Run, ident: CheckpointId) -> None:
        """Queue layouts and group index of a step whose ranks are all uploaded."""

        def work() -> None:
            record = self._table.get(run.key, ident)
            if record is None or record.group is None or record.state == _Status.STATE_COMMITTED:
                return
            if ("commit", ident) in run.control:  # queued once more while it ran
                return
            self._identity.require_own(run, ident)
            segments = publish_group(run.store, self._staging, run.key, ident, record.group)
            self._progress()
            self._table.update(run.key, ident, state=_Status.STATE_UPLOADED, error=None)
            self._commit(run, ident, record.group, dict(segments[0].environment))

        if ("commit", ident) not in run.control:
            run.control.add(("publish", ident), self._retried(run, ident, work), priority=_order(ident))

    def _commit(
        self, run: Run, ident: CheckpointId, group: common_pb2.NodeGroup, environment: dict[str, str]
    ) -> None:
        hosts_first = 0 in group.ranks
        wait_s = _POLL_FIRST_S if hosts_first else _STAND_IN_FIRST_S
        complete_at: float | None = None

        def turn_in_s() -> float:
            """How long to leave the commit to rank 0's server; inf while groups are missing."""
            nonlocal complete_at
            if hosts_first:
                return 0.0
            if not list_groups(run.store, ident).is_complete:
                complete_at = None
                return math.inf
            now = self._clock.monotonic()
            complete_at = now if complete_at is None else complete_at
            delay_s = commit_delay_s(conditional=run.probe(), hosts_rank0=False, group_index=group.index)
            return complete_at + delay_s - now

        def work() -> float | None:
            nonlocal wait_s
            record = self._table.get(run.key, ident)
            if record is None or record.state == _Status.STATE_ABANDONED:
                return None
            self._identity.require_own(run, ident)  # else another life's commit would count as this one's
            if exists(run.store, ident):
                return self._committed(run, ident, won=False)
            turn_s = turn_in_s()
            if turn_s <= 0.0:
                result = try_commit(
                    run.store, ident, environment=environment, known=run.known_groups, clock=self._clock
                )
                if result.state is not CommitState.WAITING:
                    won = result.state is CommitState.COMMITTED
                    return self._committed(run, ident, won=won, warnings=result.warnings)
            delay_s = wait_s if turn_s <= 0.0 else min(wait_s, turn_s)
            wait_s = min(_POLL_MOST_S, wait_s * 2)
            return delay_s

        run.control.add(
            ("commit", ident),
            self._retried(run, ident, work),
            priority=_order(ident),
            delay_s=0.0 if hosts_first else _STAND_IN_FIRST_S,
        )

    def _committed(
        self, run: Run, ident: CheckpointId, *, won: bool, warnings: tuple[CkptError, ...] = ()
    ) -> float | None:
        self._staging.mark_committed(run.key, ident)
        self._progress()
        event(_log, logging.INFO, "step.committed", run=run.key, checkpoint=ident, won=won)
        self._table.update(run.key, ident, state=_Status.STATE_COMMITTED, error=None, warnings=warnings)
        self.retain(run, remote=won)
        return None

    def retain(self, run: Run, *, remote: bool) -> None:
        """Queue retention: on NVMe always, in the store only by the server that committed (I7)."""

        def local() -> None:
            retention.retain_local(
                self._staging,
                run,
                self._table,
                now=self._clock.now(),
                grace_s=self._settings.abandon_grace_s,
                free_nbytes=shutil.disk_usage(self._staging.path).free,
            )

        def in_store() -> None:
            retention.retain_remote(run)

        run.control.add("retain-local", self._retried(run, None, local), priority=_FIRST)
        if remote and run.config.keep_last > 0:
            run.deletions.add("retain-remote", self._retried(run, None, in_store))

    def _retried(self, run: Run, ident: CheckpointId | None, work: Callable[[], float | None]) -> Retried:
        def waiting(error: CkptError) -> None:
            if ident is not None:
                self._table.update(run.key, ident, error=error)

        def failed(error: CkptError) -> None:
            event(_log, logging.ERROR, "job.failed", run=run.key, checkpoint=ident, error=error)
            if ident is not None:
                is_over = self._is_over(run, ident, error)
                state = _Status.STATE_ABANDONED if is_over else _Status.STATE_FAILED
                self._table.update(run.key, ident, state=state, error=error)

        return Retried(work, waiting=waiting, failed=failed)

    def _is_over(self, run: Run, ident: CheckpointId, error: CkptError) -> bool:
        """Whether nothing can commit a failed step any more, nor needs to: retention may take it then.

        Others have committed it while this server was away, and newer ones, and pruned it. All that this node
        had was in the store, so nothing brings back what is gone. Where nothing newer is committed the step
        may be what a run resumes from, out of the segments on its nodes: it stays.
        """
        if error.code == OTHER_RUN:
            return True
        record = self._table.get(run.key, ident)
        if error.code not in _PARTS_GONE or record is None or not record.is_uploaded:
            return False
        try:
            newest = next(list_checkpoints(run.store), None)
        except CkptError:  # the next start of the server looks again
            return False
        return newest is not None and retention.overtaken(ident, [newest.ident])

    def _progress(self) -> None:
        self.progressed_at = self._clock.monotonic()


def _order(ident: CheckpointId, rank: int = 0) -> tuple[int, ...]:
    return (ident.attempt, ident.step, rank)
