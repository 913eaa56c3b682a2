"""Finds work: looks at the staging directory and queues what is missing.

Everything is derived from files (SD1 to SD3), so a restart, a lost Seal call and a trainer that was
killed after the seal all look the same.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ckpt.clock import Clock
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId, same_run
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import common_pb2, staging_pb2
from ckpt_server.runs import Run, Runs
from ckpt_server.steps import StepKey, StepRecord, StepTable

__all__ = ["Intake", "Jobs"]

_log = get_logger("server.intake")
_Status = staging_pb2.StepStatus
_FRESH_S = 2.0  # some file systems keep times to the second


class Jobs(Protocol):
    """What intake hands its finds to. Queuing a job twice is harmless."""

    def upload(self, run: Run, ident: CheckpointId, rank: int) -> None: ...

    def publish(self, run: Run, ident: CheckpointId) -> None: ...


class Intake:
    """Looks at steps and queues their uploads. Thread-safe."""

    def __init__(self, staging: StagingDir, runs: Runs, table: StepTable, jobs: Jobs, clock: Clock) -> None:
        self._staging = staging
        self._runs = runs
        self._table = table
        self._jobs = jobs
        self._clock = clock
        self._reported: set[tuple[str, str]] = set()  # only the scanning thread
        self._seen: dict[StepKey, int] = {}  # times of folders that were looked at; only the scanning thread

    def scan(self) -> None:
        """Look at every run. One that cannot be read is reported and does not hide the others.

        A step whose folder did not change since it was looked at is passed over: seals, uploads and commits
        are files that appear in it. So thousands of waiting steps cost one stat each.
        """
        seen: dict[StepKey, int] = {}
        for run_key in self._staging.run_keys():
            try:
                run = self._runs.load(run_key)
                for ident in self._staging.checkpoints(run_key):
                    self._examine_changed(run, ident, seen)
            except CkptError as error:
                self._report(run_key, error)
        self._seen = seen  # what is gone is forgotten

    def _examine_changed(self, run: Run, ident: CheckpointId, seen: dict[StepKey, int]) -> None:
        key = (run.key, ident)
        changed_at = self._staging.changed_at_ns(run.key, ident)  # before the look, not after
        if changed_at is None:
            return
        if self._seen.get(key) != changed_at:
            self.examine(run, ident)
            # Two changes within a tick of the file system's clock have one time: look again at fresh ones.
            if changed_at > (self._clock.now() - _FRESH_S) * 1e9:
                return
        seen[key] = changed_at

    def examine(self, run: Run, ident: CheckpointId, *, again: bool = False) -> StepRecord | None:
        """Look at one step and queue what it needs.

        Args:
            run: its run.
            ident: the step.
            again: try a failed step once more (a new Seal arrived).

        Returns:
            The record, or None where nothing is sealed here.

        Raises:
            UnavailableError: the staging directory cannot be read.
        """
        old = self._table.get(run.key, ident)
        sealed = self._staging.sealed_ranks(run.key, ident)
        if not sealed:
            return old
        if old is not None and self._begun_again(run, old, sealed[0]):
            event(_log, logging.WARNING, "run.begun_again", run=run.key, checkpoint=ident, before=old.run_id)
            self._table.forget(run.key, ident)
            run.begins_again()
            old = None
        if old is not None and old.state in (_Status.STATE_COMMITTED, _Status.STATE_ABANDONED):
            return old
        seen, damage = self._look(run, ident, sealed, old)
        record = self._table.observe(seen, again=again)
        if self._staging.is_committed(run.key, ident):
            return self._table.update(run.key, ident, state=_Status.STATE_COMMITTED, error=None)
        if damage is not None:
            return self._table.update(run.key, ident, state=_Status.STATE_FAILED, error=damage)
        if record.state != _Status.STATE_FAILED:
            self._queue(run, record)
        return record

    def _begun_again(self, run: Run, old: StepRecord, rank: int) -> bool:
        """Whether what is sealed here is of a later life of the run than the record: same id, other step."""
        try:
            if not old.run_id or self._sealed_at(run, old.ident, rank) == old.sealed_at:
                return False
            return not same_run(old.run_id, self._staging.read_index(run.key, old.ident, rank).run_id)
        except (OSError, CorruptError, NotFoundError):  # gone or damaged: seen and said right after this
            return False

    def _queue(self, run: Run, record: StepRecord) -> None:
        for rank in sorted(record.sealed - record.uploaded):
            self._jobs.upload(run, record.ident, rank)
        if record.is_uploaded:
            self._jobs.publish(run, record.ident)

    def _look(
        self, run: Run, ident: CheckpointId, sealed: list[int], old: StepRecord | None
    ) -> tuple[StepRecord, CkptError | None]:
        known = old.nbytes if old is not None else {}
        nbytes: dict[int, int] = {}
        group: common_pb2.NodeGroup | None = None
        run_id = ""
        damage: CkptError | None = None
        for rank in sealed:
            if rank in known:
                continue
            try:
                index = self._staging.read_index(run.key, ident, rank)
                _check_group(index.group, rank, group or (old.group if old else None))
            except (CorruptError, NotFoundError) as error:
                damage = error
                continue
            nbytes[rank] = index.nbytes
            group, run_id = index.group, index.run_id
        done = old.uploaded if old is not None else frozenset[int]()
        with os_errors("the staging directory cannot be read", run=run.key, checkpoint=ident):
            uploaded = {
                rank
                for rank in sealed
                if rank not in done and self._staging.uploaded_path(run.key, ident, rank).is_file()
            }
            sealed_at = old.sealed_at if old else self._sealed_at(run, ident, sealed[0])
        seen = StepRecord(
            run_key=run.key,
            url=run.config.url,
            ident=ident,
            group=group,
            sealed=frozenset(nbytes) | frozenset(known),
            uploaded=frozenset(uploaded),
            nbytes=nbytes,
            sealed_at=sealed_at,
            run_id=run_id,
        )
        return seen, damage

    def _sealed_at(self, run: Run, ident: CheckpointId, rank: int) -> float:
        """When the first look-at rank sealed, by the file's time, so that a step's age survives restarts."""
        return self._staging.index_path(run.key, ident, rank).stat().st_mtime

    def _report(self, run_key: str, error: CkptError) -> None:
        key = (run_key, str(error))
        if key not in self._reported:
            self._reported.add(key)
            event(_log, logging.WARNING, "scan.failed", run=run_key, error=error)


def _check_group(group: common_pb2.NodeGroup, rank: int, expected: common_pb2.NodeGroup | None) -> None:
    """Raise CorruptError unless ``group`` holds ``rank`` and is the one its neighbours named."""
    if rank not in group.ranks or group.index >= group.count:
        raise CorruptError("a segment index names a node group it is not in", code="group", rank=rank)
    if expected is not None and group != expected:
        raise CorruptError("ranks of one node disagree on their node group", code="group", rank=rank)
