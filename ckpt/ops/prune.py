"""Carry out retention: unpublish, then delete. What crashes left is ckpt.ops.sweep's.

The order, and what a crash after each leaves:

1. a record that they are condemned; then a look at pins and ``latest`` (:mod:`ckpt.ops.condemn`).
2. the manifests, oldest first: the checkpoints no longer exist, for anybody.
3. where others hold chunks in its segments: a record of them (:mod:`ckpt.ops.references`).
4. its group indexes: from the first one on it cannot be committed again.
5. its segments, unless a checkpoint that stays, or an upload under way, holds chunks in them.
6. the segments of checkpoints pruned earlier that nobody holds chunks in any more. What is left over by a
   crash, ``sweep`` finds.
7. the records of 1.

Nothing is deleted unless what ``latest`` names was found whole (quick verify) right before, and that one is
never deleted. Where somebody has put another run's checkpoint here and it counts as ``latest``, nobody knows
which ones this run needs: then nothing may go but that checkpoint itself, by name. Any number of servers may
prune, upload, commit, pin and start at once; :mod:`ckpt.ops.condemn` says why nothing goes that somebody has
just come to need, :mod:`ckpt.ops.borrow` why no upload loses what it borrowed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ckpt.clock import Clock, SystemClock
from ckpt.errors import CorruptError, NotFoundError, RefusedError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    held_key,
    index_prefix,
    manifest_key,
    own_object_key,
    parse_group_key,
    segment_keys,
)
from ckpt.format.manifest import stored_nbytes
from ckpt.ops.catalog import (
    candidates,
    exists,
    latest,
    list_checkpoints,
    load_checkpoint,
    naming_pruned,
    read_manifest,
)
from ckpt.ops.condemn import Condemned
from ckpt.ops.groups import read_group_headers
from ckpt.ops.identity import OTHER_RUN, find_foreign
from ckpt.ops.pins import list_protected
from ckpt.ops.references import Manifests, look_at_unpublished, put_held, read_held
from ckpt.ops.threads import map_in_threads
from ckpt.ops.verify import verify_quick
from ckpt.plan.retention import Verdict, newest_first, plan_prune
from ckpt.storage.base import Store

__all__ = ["PruneReport", "execute_prune", "plan_deletion", "plan_retention"]

_log = get_logger("ops.prune")
_LOOKS = 5
_WORKERS = 4  # few: each may read the headers of very many groups, and brings threads of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What :func:`execute_prune` did, or would do.

    Attributes:
        verdicts: newest first.
        deleted: checkpoints that no longer exist.
        held: those among them whose segments stay, because a kept checkpoint, or an upload under way, holds
            chunks in them.
        freed: checkpoints pruned earlier whose segments go now, because nobody holds chunks in them any more.
        deleted_objects: number of keys deleted (dry run: would be).
    """

    verdicts: tuple[Verdict, ...]
    deleted: tuple[CheckpointId, ...]
    held: tuple[CheckpointId, ...]
    freed: tuple[CheckpointId, ...]
    deleted_objects: int


def plan_retention(store: Store, *, keep_last: int, keep_every: int = 0) -> list[Verdict]:
    """Return what the policy says of every checkpoint of the run, newest first. Deletes nothing.

    Raises:
        InvalidInputError: bad policy; see :func:`ckpt.plan.retention.plan_prune`.
    """
    plan_prune((), line=(), keep_last=keep_last, keep_every=keep_every)  # refuse before any request
    return plan_prune(
        [info.ident for info in list_checkpoints(store)],
        line=list(candidates(store)),
        keep_last=keep_last,
        keep_every=keep_every,
        pinned=list_protected(store, SystemClock().now),
    )


def plan_deletion(store: Store, idents: Iterable[CheckpointId]) -> list[Verdict]:
    """Return verdicts that delete exactly ``idents``, newest first.

    Raises:
        NotFoundError: one is not committed.
        RefusedError: code "last-good": one is what ``latest`` resolves to; code "pinned": one is pinned.
    """
    condemned = newest_first(idents)
    for ident in condemned:
        if not exists(store, ident):
            raise NotFoundError("no such checkpoint", code="no-checkpoint", checkpoint=ident, url=store.url)
    _refuse_protected(store, condemned, pinned=list_protected(store, SystemClock().now))
    return [Verdict(ident, keep=False, reason="named by the caller") for ident in condemned]


def execute_prune(
    store: Store, verdicts: Sequence[Verdict], *, dry_run: bool = False, clock: Clock | None = None
) -> PruneReport:
    """Delete what ``verdicts`` do not keep. Blocks on the store. Safe to repeat after a crash.

    Args:
        store: of the run.
        verdicts: from :func:`plan_retention` or :func:`plan_deletion`.
        dry_run: check everything, delete nothing.
        clock: for how long it took; what it says of the time of day is not asked.

    Raises:
        RefusedError: nothing was deleted. Code "last-good": ``latest`` resolves to a condemned one (by now);
            code "pinned": one is pinned (by now), or a start is just resuming from it; code
            "latest-damaged": what ``latest`` names is not whole, so older checkpoints may be needed; code
            "other-run": it is another run's.
        UnavailableError: the store cannot be reached; what was condemned may be deleted in part and is
            finished by ``sweep``. Code "slow": this process was held up for long; nothing was deleted.
    """
    condemned = newest_first(verdict.ident for verdict in verdicts if not verdict.keep)
    if not condemned:
        return PruneReport(verdicts=tuple(verdicts), deleted=(), held=(), freed=(), deleted_objects=0)
    _refuse_protected(store, condemned, pinned=list_protected(store, (clock or SystemClock()).now))
    _require_whole_latest(store, condemned)
    manifests = Manifests(store)
    manifests.references(condemned)  # before anything goes: a manifest that cannot be read ends it here
    found = map_in_threads(lambda ident: _parts_of(store, ident), condemned, workers=_WORKERS)
    parts = dict(zip(condemned, found, strict=True))
    records = None if dry_run else _condemn(store, condemned, clock)
    if records is not None:
        for ident in reversed(condemned):  # oldest first: a crash in the middle leaves the newer ones
            store.delete([manifest_key(ident)])  # from here on nobody is offered what is falling apart
    # After the manifests are gone, so that nobody begins to borrow unseen; see ckpt.ops.borrow.
    aside = set(condemned)
    pending = look_at_unpublished(store, published=_published(store) | aside)
    needed = manifests.references(aside).union(*pending.borrowed.values())
    objects = 0
    for ident in reversed(condemned):
        objects += _delete_parts(store, ident, parts[ident], held=ident in needed, dry_run=dry_run)
    freed = tuple(newest_first(pending.held - needed))
    for ident in freed:
        objects += _free(store, ident, dry_run=dry_run)
    if records is not None:
        # Once more: a late commit that saw the record has put a manifest, and may have died before it took
        # it away again.
        store.delete([manifest_key(ident) for ident in condemned])
        records.withdraw()
    return PruneReport(
        verdicts=tuple(verdicts),
        deleted=tuple(condemned),
        held=tuple(ident for ident in condemned if ident in needed),
        freed=freed,
        deleted_objects=objects,
    )


def _condemn(store: Store, condemned: Sequence[CheckpointId], clock: Clock | None) -> Condemned:
    """Say what is about to go, then look once more whether anybody needs it. Raises RefusedError."""
    records = Condemned(store, condemned, clock)
    try:
        _refuse_protected(store, condemned, pinned=list_protected(store, records.put_at))
        records.check_fresh()
    except BaseException:
        records.withdraw()
        raise
    return records


def _published(store: Store) -> set[CheckpointId]:
    return {info.ident for info in list_checkpoints(store)}


def _refuse_protected(
    store: Store, condemned: Sequence[CheckpointId], *, pinned: Collection[CheckpointId]
) -> None:
    last_good = latest(store)
    if last_good is None:  # a fresh attempt that has committed nothing: what there is, is all there is
        newest = next(list_checkpoints(store), None)
        last_good = newest.ident if newest else None
    if last_good is not None and last_good in condemned and not _is_foreign(store, last_good):
        raise RefusedError(
            "this is the checkpoint a run would resume from; it is never deleted",
            code="last-good",
            checkpoint=last_good,
            url=store.url,
        )
    kept = [ident for ident in condemned if ident in pinned]
    if kept:
        raise RefusedError(
            "checkpoint is pinned, or a start is just resuming from it; unpin it first, or try again",
            code="pinned",
            checkpoint=kept[0],
            total=len(kept),
        )


def _is_foreign(store: Store, ident: CheckpointId) -> bool:
    try:
        return find_foreign(store, read_manifest(store, ident)) is not None
    except CorruptError:  # what cannot be read is this run's until it is known not to be
        return False


def _require_whole_latest(store: Store, condemned: Sequence[CheckpointId]) -> None:
    for _ in range(_LOOKS):
        ident = latest(store)
        if ident is None:
            return
        try:
            with naming_pruned(store, ident):
                if _is_foreign(store, ident):
                    _require_foreign(store, ident, condemned)
                    return
                problems: list[CorruptError] = list(verify_quick(load_checkpoint(store, ident)))
        except NotFoundError as error:
            if error.code not in ("pruned", "no-checkpoint"):
                raise
            continue  # overtaken and pruned by others meanwhile: look at what is the latest by now
        except CorruptError as error:
            problems = [error]
        if not problems:
            return
        raise RefusedError(
            "the latest checkpoint is not whole, so older ones may be needed; nothing was deleted",
            code="latest-damaged",
            checkpoint=ident,
            problem=problems[0],
            total=len(problems),
        )
    raise UnavailableError(
        "others prune the latest checkpoint as fast as it is looked at; nothing was deleted", url=store.url
    )


def _require_foreign(store: Store, ident: CheckpointId, condemned: Sequence[CheckpointId]) -> None:
    """The latest, ``ident``, is another run's: only such may go."""
    for other in condemned:
        try:
            if _is_foreign(store, other):
                continue
        except NotFoundError:  # gone meanwhile
            continue
        raise RefusedError(
            "the latest checkpoint is another run's, so nobody knows which ones this run needs; nothing was "
            "deleted. Delete that one by its name first",
            code=OTHER_RUN,
            checkpoint=ident,
            url=store.url,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What belongs to a checkpoint beside its manifest: keys, and whether they are all of its segments."""

    index: list[str]
    data: list[str]


def _parts_of(store: Store, ident: CheckpointId) -> _Parts:
    """List them while the checkpoint is whole. What a damaged one does not tell, the sweep finds."""
    listed = list(store.list_keys(index_prefix(ident)))
    data: dict[str, None] = {}
    groups = [info for info in listed if parse_group_key(info.key)]
    seen = 0
    try:
        for group in read_group_headers(store, groups):
            seen += len(group.header.segments)
            data |= {
                own_object_key(item.object_key, item.pack): None
                for item in group.header.segments
                if stored_nbytes(item)
            }
    except (CorruptError, NotFoundError) as error:
        event(_log, logging.WARNING, "prune.damaged_index", checkpoint=ident, reason=error)
    try:
        world_size = read_manifest(store, ident).world_size
        if seen < world_size:
            data |= dict.fromkeys(segment_keys(ident, range(world_size)))
    except (CorruptError, NotFoundError) as error:
        event(_log, logging.WARNING, "prune.damaged_manifest", checkpoint=ident, reason=error)
    # Marks before the group indexes they speak of.
    return _Parts(index=sorted((info.key for info in listed), reverse=True), data=list(data))


def _delete_parts(store: Store, ident: CheckpointId, parts: _Parts, *, held: bool, dry_run: bool) -> int:
    data = [] if held else parts.data
    if not dry_run:
        if held:
            put_held(store, ident, parts.data)
        store.delete([key for key in parts.index if key != held_key(ident)])
        store.delete(data)
        event(_log, logging.INFO, "prune.done", checkpoint=ident, data_held=held)
    return 1 + len(parts.index) + len(data)


def _free(store: Store, ident: CheckpointId, *, dry_run: bool) -> int:
    """Delete the objects of a checkpoint that was pruned earlier and that nobody needs any more."""
    try:
        data = read_held(store, ident)
    except (CorruptError, NotFoundError) as error:  # the sweep finds them
        event(_log, logging.WARNING, "prune.damaged_held", checkpoint=ident, reason=error)
        return 0
    if not dry_run:
        store.delete(data)
        store.delete([held_key(ident)])
        event(_log, logging.INFO, "prune.freed", checkpoint=ident, objects=len(data))
    return len(data) + 1
