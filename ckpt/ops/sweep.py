"""Remove what crashes left in the store: objects of checkpoints that do not exist, and unfinished uploads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpt.clock import Clock, SystemClock, random_bytes
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    DATA,
    INDEX,
    PINS,
    PROBE,
    checkpoint_of_data_key,
    checkpoint_of_index_key,
    manifest_key,
    own_object_key,
    parse_temporary_pin_key,
    segment_of_data_key,
)
from ckpt.ops.attempts import newest_attempt
from ckpt.ops.catalog import awaited_parents, exists, list_checkpoints, read_manifest
from ckpt.ops.condemn import STALE_S, Condemned
from ckpt.ops.groups import list_groups, read_group_headers
from ckpt.ops.references import Manifests, look_at_unpublished
from ckpt.storage.base import HasUploads, ObjectInfo, Store

__all__ = ["GRACE_LEAST_S", "Swept", "check_grace", "sweep", "sweep_uploads"]

_log = get_logger("ops.sweep")

GRACE_LEAST_S = 3600.0
"""Shorter ones must be asked for: an upload that is still under way may take as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What went (would go) of one checkpoint, or beside a committed one: ``objects`` keys."""

    ident: CheckpointId
    objects: int


def check_grace(older_than_s: float, *, force: bool) -> None:
    """Raise InvalidInputError ("grace") for a grace under an hour without ``force``, or a negative one."""
    if not older_than_s >= 0 or (older_than_s < GRACE_LEAST_S and not force):
        raise InvalidInputError(
            "a sweep must spare what is younger than an hour, where somebody may be writing",
            code="grace",
            older_than_s=older_than_s,
        )


def sweep(
    store: Store, *, older_than_s: float, dry_run: bool = False, clock: Clock | None = None
) -> Iterator[Swept]:
    """Delete group indexes and segments that no checkpoint needs; yield whose they were, oldest first.
    Then what lies beside the objects of a committed checkpoint (:class:`_Strays`), and what the dead held for
    a moment (:func:`_sweep_passing`).

    Left by saves that never committed and by prunes that were cut short. An object goes only if its
    checkpoint has no manifest, neither a manifest nor an upload under way refers to it, all objects of that
    checkpoint are older than ``older_than_s`` by the store's clock, and something newer is committed: its
    attempt is not the newest, or a higher step of its attempt is committed. (Should such a late one be
    committed after all, the commit finds its segments gone and refuses.) What the newest
    attempts resumed from before it was committed stays until they have committed something themselves.

    Nothing happens before the iterator is asked; ending it early leaves the rest.

    Args:
        store: of the run.
        older_than_s: grace in seconds; must exceed the longest time an upload may take. At least 0.
        dry_run: delete nothing.
        clock: what "now" is; by default the store's own clock, by which its objects' ages are told. (In a dry
            run, which writes nothing, this machine's.)

    Raises:
        InvalidInputError: negative grace.
        CorruptError: a manifest is damaged, so what it needs is unknown. Nothing was deleted.
    """
    check_grace(older_than_s, force=True)
    now = _now(store, clock, dry_run=dry_run)
    # Twice: the keys of what is committed already need not be kept in memory, and what is committed while
    # the keys are listed has a manifest afterwards.
    committed = {info.ident for info in list_checkpoints(store)}
    orphans: dict[CheckpointId, list[str]] = {}
    touched: dict[CheckpointId, float] = {}
    strays = _Strays(store, now - older_than_s)
    for prefix in (INDEX, DATA):
        for info in store.list_keys(prefix):
            ident = _owner(info.key)
            if ident in committed:
                strays.look_at(ident, info)
            elif ident is not None:
                orphans.setdefault(ident, []).append(info.key)
                touched[ident] = max(touched.get(ident, 0.0), info.modified_at)
    if orphans:  # else the manifests need not be read
        yield from _sweep_orphans(store, orphans, touched, older_than=now - older_than_s, dry_run=dry_run)
    yield from strays.sweep(dry_run=dry_run)
    yield from _sweep_passing(store, older_than=now - max(older_than_s, STALE_S), dry_run=dry_run)


def _sweep_orphans(
    store: Store,
    orphans: Mapping[CheckpointId, list[str]],
    touched: Mapping[CheckpointId, float],
    *,
    older_than: float,
    dry_run: bool,
) -> Iterator[Swept]:
    committed = {info.ident for info in list_checkpoints(store)}
    newest = newest_attempt(store) or 0
    awaited = awaited_parents(store)
    highest: dict[int, int] = {}
    for ident in committed:
        highest[ident.attempt] = max(highest.get(ident.attempt, -1), ident.step)

    def is_garbage(ident: CheckpointId) -> bool:
        overtaken = ident.attempt < newest or ident.step < highest.get(ident.attempt, -1)
        old = touched[ident] < older_than
        return ident not in committed and ident not in awaited and overtaken and old

    dead = {ident for ident in orphans if is_garbage(ident)}
    # The manifests after the records: what is committed in between is seen there. (What the orphans have is
    # gone already, so nobody begins to borrow it unseen; see ckpt.ops.borrow.)
    pending = look_at_unpublished(store, published=committed)
    needed = Manifests(store).references()
    needed |= {other for ident, found in pending.borrowed.items() if ident not in dead for other in found}

    for ident, keys in sorted(orphans.items()):
        if ident not in dead or ident in needed:
            continue
        if dry_run or _delete_orphan(store, ident, keys):
            yield Swept(ident=ident, objects=len(keys))


def _delete_orphan(store: Store, ident: CheckpointId, keys: Iterable[str]) -> bool:
    """Delete ``keys``, unless somebody commits the checkpoint at the last moment. See ckpt.ops.condemn."""
    records = Condemned(store, [ident])
    if exists(store, ident):
        records.withdraw()
        return False
    records.check_fresh()
    found = sorted(keys, reverse=True)
    store.delete(found)  # marks, then group indexes, then segments
    store.delete([manifest_key(ident)])  # of a commit that saw the record and died before it was undone
    records.withdraw()
    event(_log, logging.INFO, "sweep.done", checkpoint=ident, objects=len(found))
    return True


class _Strays:
    """Second objects of a segment whose checkpoint is committed.

    Two servers that pack one segment differently, or one that was killed after it had sent its object and
    then borrows otherwise, leave two objects; the group index names one. No table names the other, and none
    ever will: whoever finds the group index there takes it.
    """

    def __init__(self, store: Store, older_than: float) -> None:
        self._store = store
        self._older_than = older_than
        self._last: ObjectInfo | None = None
        self._found: dict[CheckpointId, dict[str, ObjectInfo]] = {}

    def look_at(self, ident: CheckpointId, info: ObjectInfo) -> None:
        """Take a key of a committed checkpoint. To be called in ascending order: a segment's objects are
        neighbours.
        """
        last, self._last = self._last, info
        if last is not None and segment_of_data_key(info.key) == segment_of_data_key(last.key) is not None:
            self._found.setdefault(ident, {}).update({last.key: last, info.key: info})

    def sweep(self, *, dry_run: bool) -> Iterator[Swept]:
        """Delete those that are old and that no group index names."""
        for ident, found in sorted(self._found.items()):
            try:
                groups = read_group_headers(self._store, list_groups(self._store, ident).in_order())
                world_size = read_manifest(self._store, ident).world_size
            except (CorruptError, NotFoundError) as error:
                event(_log, logging.WARNING, "sweep.damaged_index", checkpoint=ident, reason=error)
                continue
            segments = [segment for group in groups for segment in group.header.segments]
            if len(segments) != world_size:  # what is missing might name it
                continue
            named = {own_object_key(segment.object_key, segment.pack) for segment in segments}
            old = [key for key, info in found.items() if info.modified_at < self._older_than]
            keys = [key for key in old if key not in named]
            if not keys:
                continue
            if not dry_run:
                self._store.delete(keys)
                event(_log, logging.INFO, "sweep.strays", checkpoint=ident, objects=len(keys))
            yield Swept(ident=ident, objects=len(keys))


def _sweep_passing(store: Store, *, older_than: float, dry_run: bool) -> Iterator[Swept]:
    """Delete the temporary pins and probes of processes that died before they did. Such pins count no more;
    probes belong to no checkpoint and are empty, so they are not told.
    """
    pins: dict[CheckpointId, list[str]] = {}
    for info in store.list_keys(PINS):
        ident = parse_temporary_pin_key(info.key)
        if ident is not None and info.modified_at < older_than:
            pins.setdefault(ident, []).append(info.key)
    for ident, keys in sorted(pins.items()):
        if not dry_run:
            store.delete(keys)
            event(_log, logging.INFO, "sweep.pins", checkpoint=ident, objects=len(keys))
        yield Swept(ident=ident, objects=len(keys))
    probes = [info.key for info in store.list_keys(PROBE) if info.modified_at < older_than]
    if probes and not dry_run:
        store.delete(probes)


def sweep_uploads(
    store: Store, *, older_than_s: float, dry_run: bool = False, clock: Clock | None = None
) -> int | None:
    """Abort large puts that were begun more than ``older_than_s`` seconds ago and never ended.

    Returns:
        How many; None where the store's engine cannot list them (then the bucket needs a lifecycle rule).
    """
    check_grace(older_than_s, force=True)
    if not isinstance(store, HasUploads):
        return None
    now = _now(store, clock, dry_run=dry_run)
    return store.abort_uploads(before=now - older_than_s, dry_run=dry_run)


def _now(store: Store, clock: Clock | None, *, dry_run: bool) -> float:
    """A clock that is an hour ahead must not take what an upload has just written."""
    if clock is not None or dry_run:
        return (clock or SystemClock()).now()
    key = f"{PROBE}{random_bytes(12).hex()}"
    store.put(key, b"")
    try:
        return store.head(key).modified_at
    finally:
        store.delete([key])


def _owner(key: str) -> CheckpointId | None:
    return checkpoint_of_index_key(key) or checkpoint_of_data_key(key)
