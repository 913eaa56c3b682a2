"""The table of steps: where each one stands, and who wants to hear when that changes.

It is a view of the staging directory, rebuilt by a scan at every start; nothing here is the truth.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId
from ckpt.format.problem import error_to_info
from ckpt_proto.v1 import common_pb2, staging_pb2

__all__ = ["StepKey", "StepRecord", "StepTable", "oldest_pending_s"]

StepKey = tuple[str, CheckpointId]

_Status = staging_pb2.StepStatus
_OWED = (
    _Status.STATE_SEALING,
    _Status.STATE_UPLOADING,
    _Status.STATE_UPLOADED,
    _Status.STATE_FAILED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one run on this node.

    Attributes:
        sealed: ranks of the group whose segment is sealed here.
        uploaded: of those, the ones whose object is complete.
        nbytes: size of each sealed segment, by rank.
        stored: of those uploaded by this process: what their objects came to in the store, by rank.
        sealed_at: Unix seconds of the first seal.
        run_id: of the run's life it is of; empty: not known.
        error: why it failed, or why it is waiting.
        warnings: oddities that did not stop the commit; known to the server that made it.
        replicas: which other nodes hold each rank's segment.
        replicas_wanted: how many should; 0: none.
    """

    run_key: str
    url: str
    ident: CheckpointId
    state: staging_pb2.StepStatus.State = staging_pb2.StepStatus.STATE_SEALING
    group: common_pb2.NodeGroup | None = None
    sealed: frozenset[int] = frozenset()
    uploaded: frozenset[int] = frozenset()
    nbytes: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    sealed_at: float = 0.0
    run_id: str = ""
    error: CkptError | None = None
    warnings: tuple[CkptError, ...] = ()
    replicas: dict[int, frozenset[str]] = field(default_factory=dict)
    replicas_wanted: int = 0

    @property
    def is_owed(self) -> bool:
        """Whether it is sealed here and may still be committed, by itself or after somebody's help."""
        return self.state in _OWED

    @property
    def is_failed(self) -> bool:
        return self.state == _Status.STATE_FAILED

    @property
    def is_sealed(self) -> bool:
        """Whether every rank of the group has sealed."""
        return self.group is not None and self.sealed.issuperset(self.group.ranks)

    @property
    def is_uploaded(self) -> bool:
        """Whether every rank of the group is in the store."""
        return self.group is not None and self.uploaded.issuperset(self.group.ranks)

    def to_proto(self) -> staging_pb2.StepStatus:
        return staging_pb2.StepStatus(
            run_key=self.run_key,
            url=self.url,
            id=self.ident.to_proto(),
            state=self.state,
            sealed_ranks=sorted(self.sealed),
            group=self.group,
            uploaded_bytes=sum(self.nbytes.get(rank, 0) for rank in self.uploaded),
            total_bytes=sum(self.nbytes.values()),
            stored_bytes=sum(self.stored.get(rank, self.nbytes.get(rank, 0)) for rank in self.uploaded),
            error=error_to_info(self.error) if self.error is not None else None,
            warnings=[error_to_info(warning) for warning in self.warnings],
            replicas=[
                staging_pb2.SegmentReplicas(rank=rank, nodes=sorted(nodes))
                for rank, nodes in sorted(self.replicas.items())
            ],
            replicas_wanted=self.replicas_wanted,
        )


class StepTable:
    """All steps, with a change counter that watchers wait on. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: dict[StepKey, StepRecord] = {}  # guarded by self._changed
        self._versions: dict[StepKey, int] = {}  # guarded by self._changed
        self._version = 0  # guarded by self._changed
        self._closed = False  # guarded by self._changed

    def get(self, run_key: str, ident: CheckpointId) -> StepRecord | None:
        with self._changed:
            return self._records.get((run_key, ident))

    def put(self, record: StepRecord) -> None:
        """Insert or replace a record; an equal one is no change."""
        key = (record.run_key, record.ident)
        with self._changed:
            if _same(self._records.get(key), record):
                return
            self._records[key] = record
            self._bump(key)

    def update(self, run_key: str, ident: CheckpointId, **changes: object) -> StepRecord | None:
        """Change fields of a record atomically; returns the new record, None where there is none."""
        key = (run_key, ident)
        with self._changed:
            old = self._records.get(key)
            if old is None:
                return None
            new = replace(old, **changes)  # type: ignore[arg-type]
            if not _same(old, new):
                self._records[key] = new
                self._bump(key)
            return new

    def observe(self, seen: StepRecord, *, again: bool = False) -> StepRecord:
        """Merge what a look at the disk found into the record, and return the result.

        Seals and uploads only ever grow, so that looks from several threads may arrive in any order.

        Args:
            seen: its state and error are ignored.
            again: a failed step is to be tried again.
        """
        key = (seen.run_key, seen.ident)
        with self._changed:
            old = self._records.get(key)
            new = _merge(old, seen, again=again)
            if not _same(old, new):
                self._records[key] = new
                self._bump(key)
            return new

    def add_uploaded(
        self, run_key: str, ident: CheckpointId, rank: int, stored_nbytes: int
    ) -> StepRecord | None:
        """Note that a rank's object is complete; clears a retry's error. None where there is no record."""
        key = (run_key, ident)
        with self._changed:
            old = self._records.get(key)
            if old is None:
                return None
            new = replace(
                old,
                uploaded=old.uploaded | {rank},
                stored={**old.stored, rank: stored_nbytes},
                error=old.error if old.is_failed else None,
            )
            if not _same(old, new):
                self._records[key] = new
                self._bump(key)
            return new

    def forget(self, run_key: str, ident: CheckpointId) -> None:
        """Drop a record whose folder is gone."""
        with self._changed:
            self._records.pop((run_key, ident), None)
            self._versions.pop((run_key, ident), None)

    def records(self, run_key: str = "") -> list[StepRecord]:
        """Every record (of one run), by run, then step, then attempt."""
        with self._changed:
            found = [record for (key, _), record in self._records.items() if run_key in ("", key)]
        return sorted(found, key=lambda record: (record.run_key, record.ident))

    def changes(self, run_key: str, after: int, timeout_s: float) -> tuple[list[StepRecord], int, bool]:
        """Wait for changes after version ``after``.

        Returns:
            The changed records, the version to pass next time, and whether the table was closed. The
            list is empty where ``timeout_s`` passed, a waiter was woken, or the table was closed.
        """
        with self._changed:
            if self._version <= after and not self._closed:
                self._changed.wait(timeout_s)
            found = [
                (version, self._records[key])
                for key, version in self._versions.items()
                if version > after and run_key in ("", key[0])
            ]
            return (
                [record for _, record in sorted(found, key=lambda item: item[0])],
                self._version,
                self._closed,
            )

    def wake(self) -> None:
        """Make every waiter return from :meth:`changes`."""
        with self._changed:
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the server is on its way out."""
        with self._changed:
            return self._closed

    def close(self) -> None:
        """End every watch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _bump(self, key: StepKey) -> None:
        self._version += 1
        self._versions[key] = self._version
        self._changed.notify_all()


def _same(old: StepRecord | None, new: StepRecord) -> bool:
    """Whether nothing changed that a watcher would see; errors are compared by what they say."""
    if old is None or str(old.error) != str(new.error):
        return False
    return replace(old, error=None) == replace(new, error=None)


def _merge(old: StepRecord | None, seen: StepRecord, *, again: bool) -> StepRecord:
    if old is None:
        old = replace(seen, state=_Status.STATE_SEALING, error=None)
    merged = replace(
        old,
        url=seen.url,
        group=seen.group or old.group,
        sealed=old.sealed | seen.sealed,
        uploaded=old.uploaded | seen.uploaded,
        nbytes={**old.nbytes, **seen.nbytes},
        sealed_at=old.sealed_at or seen.sealed_at,
        run_id=old.run_id or seen.run_id,
    )
    reopened = again and old.state == _Status.STATE_FAILED
    if old.state in (_Status.STATE_SEALING, _Status.STATE_UPLOADING) or reopened:
        state = _Status.STATE_UPLOADING if merged.is_sealed else _Status.STATE_SEALING
        return replace(merged, state=state, error=None if reopened else old.error)
    return merged


def oldest_pending_s(records: Iterable[StepRecord], now: float) -> float:
    """Age in seconds, at Unix time ``now``, of the oldest step sealed here that may still be committed;
    0 if there is none.
    """
    waiting = [record.sealed_at for record in records if record.is_owed and record.sealed_at]
    return max(0.0, now - min(waiting)) if waiting else 0.0
