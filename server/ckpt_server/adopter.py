"""Uploads, publishes and commits what was replicated here by a node that is gone."""

from __future__ import annotations

import logging
import threading

from ckpt.clock import Clock
from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import exists
from ckpt.ops.commit import CommitState, commit_delay_s, try_commit
from ckpt.ops.groups import list_groups
from ckpt.storage.base import Store
from ckpt.storage.key_source import environment_keys
from ckpt_proto.v1 import disk_pb2
from ckpt_server.lending import Lending
from ckpt_server.publisher import publish_group
from ckpt_server.replica_dir import ReplicaDir, ReplicaUnit
from ckpt_server.retried import Retried
from ckpt_server.run_identity import RunIdentity
from ckpt_server.runs import Run, Runs
from ckpt_server.settings import Settings
from ckpt_server.uploader import Segment, Uploader

__all__ = ["Adopter"]

_log = get_logger("server.adopt")
_POLL_FIRST_S = 1.0
_POLL_MOST_S = 60.0

_Key = tuple[str, CheckpointId, int]


class _NoLending(Lending):
    """Borrows nothing and, with compression off, makes every adopter's objects and index the same bytes."""

    def lender(self, store: Store, ident: CheckpointId, index: disk_pb2.SegmentIndex) -> None:
        return None


class Adopter:
    """Thread-safe. Every job is idempotent and may run on several nodes at once.

    Args:
        replicas: what is held here.
        settings: of the server.
        clock: time.
    """

    def __init__(self, replicas: ReplicaDir, settings: Settings, clock: Clock) -> None:
        self._replicas = replicas
        self._settings = settings
        self._clock = clock
        self._uploader = Uploader(
            replicas.files,
            part_nbytes=settings.part_nbytes,
            concurrency=settings.upload_concurrency,
            encoders=1,
            key=environment_keys().writing(),
        )
        # Stores and queues of their own: adopting must not hold up what this node has to upload itself.
        self._runs = Runs(replicas.files, workers=1, clock=clock)
        self._identity = RunIdentity(replicas.files)
        self._lock = threading.Lock()
        self._published: set[_Key] = set()  # guarded by self._lock
        self._failed: set[_Key] = set()  # guarded by self._lock; not tried again before a restart

    @property
    def has_work(self) -> bool:
        return any(run.has_work for run in self._runs.all())

    def is_published(self, run_key: str, unit: ReplicaUnit) -> bool:
        """Whether all that this node can do for the step is in the store."""
        with self._lock:
            return (run_key, unit.ident, unit.group.index) in self._published

    def adopt(self, run_key: str, unit: ReplicaUnit, *, reason: str) -> None:
        """Queue the adoption of a whole unit; queuing it twice is harmless.

        Raises:
            CkptError: the run's configuration cannot be read.
        """
        key = (run_key, unit.ident, unit.group.index)
        run = self._runs.load(run_key)
        with self._lock:
            if key in self._failed:
                return
        if key in run.uploads:
            return
        event(
            _log,
            logging.WARNING,
            "adopt.begin",
            run=run_key,
            checkpoint=unit.ident,
            group=unit.group.index,
            owner=unit.owner.host,
            reason=reason,
        )
        wait_s = _POLL_FIRST_S
        published_at: float | None = None

        def work() -> float | None:
            nonlocal wait_s, published_at
            if not set(unit.group.ranks) <= set(self._replicas.files.sealed_ranks(run.key, unit.ident)):
                return None  # given up and dropped meanwhile
            self._identity.require_own(run, unit.ident, unit.group.ranks[0])
            if exists(run.store, unit.ident):
                self._committed(run, unit)
                return None
            if published_at is None:
                self._publish(run, unit)
                published_at = self._clock.monotonic()
            turn_s = published_at + self._delay_s(run, unit) - self._clock.monotonic()
            if turn_s > 0:
                return turn_s
            result = try_commit(
                run.store, unit.ident, environment=self._environment(run, unit), clock=self._clock
            )
            if result.state is not CommitState.WAITING:
                self._committed(run, unit)
                return None
            wait_s, delay_s = min(_POLL_MOST_S, wait_s * 2), wait_s
            return delay_s

        def failed(error: CkptError) -> None:
            event(_log, logging.ERROR, "adopt.failed", run=run_key, checkpoint=unit.ident, error=error)
            with self._lock:
                self._failed.add(key)

        priority = (unit.ident.attempt, unit.ident.step, unit.group.index)
        run.uploads.add(key, Retried(work, waiting=lambda error: None, failed=failed), priority=priority)

    def ask_store(self, run_key: str, ident: CheckpointId) -> None:
        """Find out in the store whether a step is committed, and note it; its owner may never tell.

        Raises:
            CkptError: the run's configuration cannot be read.
        """
        run = self._runs.load(run_key)

        def work() -> float | None:
            self._identity.require_own(run, ident)
            if exists(run.store, ident):
                self._replicas.files.mark_committed(run.key, ident)
            return None

        def passed(error: CkptError) -> None:
            event(_log, logging.INFO, "replicas.store_silent", run=run_key, checkpoint=ident, error=error)

        if ("ask", ident) not in run.control:
            run.control.add(("ask", ident), Retried(work, waiting=passed, failed=passed))

    def make_way(self, segment: Segment, run_id: str) -> None:
        """See :class:`ckpt_server.run_identity.RunIdentity`; raises also what reading run.json does."""
        self._identity.make_way(self._runs.load(segment.run_key), segment, run_id)

    def close(self, deadline: float) -> bool:
        """Stop until ``deadline`` (monotonic); False: something still runs."""
        self._uploader.close()
        return self._runs.close(deadline)

    def _publish(self, run: Run, unit: ReplicaUnit) -> None:
        files = self._replicas.files
        if unit.group.index not in list_groups(run.store, unit.ident).objects:
            for rank in unit.group.ranks:
                self._uploader.upload(
                    run.store,
                    Segment(run_key=run.key, ident=unit.ident, rank=rank),
                    lending=_NoLending(),
                    compression=run.compression,
                    wanted="off",
                )
            publish_group(run.store, files, run.key, unit.ident, unit.group)
        with self._lock:
            self._published.add((run.key, unit.ident, unit.group.index))
        event(
            _log, logging.INFO, "adopt.published", run=run.key, checkpoint=unit.ident, group=unit.group.index
        )

    def _delay_s(self, run: Run, unit: ReplicaUnit) -> float:
        """As any server that does not host rank 0: only a store without conditional puts needs an order."""
        conditional = run.probe()
        if conditional:
            return 0.0
        return commit_delay_s(conditional=False, hosts_rank0=False, group_index=unit.group.index)

    def _environment(self, run: Run, unit: ReplicaUnit) -> dict[str, str]:
        return dict(self._replicas.files.read_index(run.key, unit.ident, unit.group.ranks[0]).environment)

    def _committed(self, run: Run, unit: ReplicaUnit) -> None:
        self._replicas.files.mark_committed(run.key, unit.ident)
        event(
            _log, logging.INFO, "adopt.committed", run=run.key, checkpoint=unit.ident, group=unit.group.index
        )
