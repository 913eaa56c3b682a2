"""Carry out retention: unpublish, then delete. What crashes left is ckpt.ops.sweep's.

The order of deletes, and what a crash after each leaves:

1. the manifest: the checkpoint no longer exists, for anybody.
2. its group indexes: from the first one on it cannot be committed again.
3. its segments, unless a checkpoint that stays holds chunks in them. What is left over, ``sweep`` finds.

Nothing is deleted unless what ``latest`` names was found whole (quick verify) right before, and that one is
never deleted. Prune and commit of one run are meant to be run by one server, one after the other: a commit
that borrows chunks from a checkpoint in the very moment it is pruned is refused, but only as far as requests
can be ordered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import CorruptError, NotFoundError, RefusedError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    index_prefix,
    manifest_key,
    segment_key,
)
from ckpt.ops.catalog import candidates, exists, latest, list_checkpoints, load_checkpoint, read_manifest
from ckpt.ops.pins import list_pins
from ckpt.ops.verify import verify_quick
from ckpt.plan.retention import Verdict, newest_first, plan_prune
from ckpt.storage.base import Store

__all__ = ["PruneReport", "execute_prune", "plan_deletion", "plan_retention", "references_of_others"]

_log = get_logger("ops.prune")
_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What :func:`execute_prune` did, or would do.

    Attributes:
        verdicts: newest first.
        deleted: checkpoints that no longer exist.
        held: those among them whose segments stay, because a kept checkpoint holds chunks in them.
        deleted_objects: number of keys deleted (dry run: would be).
    """

    verdicts: tuple[Verdict, ...]
    deleted: tuple[CheckpointId, ...]
    held: tuple[CheckpointId, ...]
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
        pinned=list_pins(store),
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
    _refuse_protected(store, condemned)
    return [Verdict(ident, keep=False, reason="named by the caller") for ident in condemned]


def execute_prune(store: Store, verdicts: Sequence[Verdict], *, dry_run: bool = False) -> PruneReport:
    """Delete what ``verdicts`` do not keep. Blocks on the store. Safe to repeat after a crash.

    Args:
        store: of the run.
        verdicts: from :func:`plan_retention` or :func:`plan_deletion`.
        dry_run: check everything, delete nothing.

    Raises:
        RefusedError: nothing was deleted. Code "last-good": ``latest`` resolves to a condemned one (by now);
            code "pinned": one is pinned (by now); code "latest-damaged": what ``latest`` names is not whole,
            so older checkpoints may be needed.
        UnavailableError: the store cannot be reached; what was condemned may be deleted in part and is
            finished by ``sweep``.
    """
    condemned = newest_first(verdict.ident for verdict in verdicts if not verdict.keep)
    if not condemned:
        return PruneReport(verdicts=tuple(verdicts), deleted=(), held=(), deleted_objects=0)
    _refuse_protected(store, condemned)
    _require_whole_latest(store)
    needed = references_of_others(store, set(condemned))
    objects = 0
    for ident in reversed(condemned):  # oldest first: a crash in the middle leaves the newer ones
        objects += _delete_one(store, ident, keep_data=ident in needed, dry_run=dry_run)
    held = tuple(ident for ident in condemned if ident in needed)
    return PruneReport(verdicts=tuple(verdicts), deleted=tuple(condemned), held=held, deleted_objects=objects)


def _refuse_protected(store: Store, condemned: Sequence[CheckpointId]) -> None:
    last_good = latest(store)
    if last_good is None:  # a fresh attempt that has committed nothing: what there is, is all there is
        newest = next(list_checkpoints(store), None)
        last_good = newest.ident if newest else None
    if last_good in condemned:
        raise RefusedError(
            "this is the checkpoint a run would resume from; it is never deleted",
            code="last-good",
            checkpoint=last_good,
            url=store.url,
        )
    pins = list_pins(store)
    pinned = [ident for ident in condemned if ident in pins]
    if pinned:
        raise RefusedError(
            "checkpoint is pinned; unpin it first", code="pinned", checkpoint=pinned[0], total=len(pinned)
        )


def _require_whole_latest(store: Store) -> None:
    ident = latest(store)
    if ident is None:
        return
    try:
        problems: list[CorruptError] = list(verify_quick(load_checkpoint(store, ident)))
    except CorruptError as error:
        problems = [error]
    if problems:
        raise RefusedError(
            "the latest checkpoint is not whole, so older ones may be needed; nothing was deleted",
            code="latest-damaged",
            checkpoint=ident,
            problem=problems[0],
            total=len(problems),
        )


def references_of_others(store: Store, condemned: set[CheckpointId]) -> set[CheckpointId]:
    """Return the checkpoints that those which stay hold chunks in. Reads the manifests of those.

    Raises:
        CorruptError: a manifest cannot be read, so what it needs is unknown.
    """
    stay = [info.ident for info in list_checkpoints(store) if info.ident not in condemned]

    def references(ident: CheckpointId) -> list[CheckpointId]:
        try:
            manifest = read_manifest(store, ident)
        except NotFoundError:  # deleted meanwhile by somebody else
            return []
        return [CheckpointId.from_proto(other) for other in manifest.references]

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-prune") as pool:
        return {other for found in pool.map(references, stay) for other in found}


def _delete_one(store: Store, ident: CheckpointId, *, keep_data: bool, dry_run: bool) -> int:
    try:
        world_size = read_manifest(store, ident).world_size
    except NotFoundError:
        return 0
    except CorruptError as error:  # it goes all the same; the sweep finds segments we cannot name
        event(_log, logging.WARNING, "prune.damaged_manifest", checkpoint=ident, reason=error)
        world_size = 0
    published = [manifest_key(ident)]
    index = sorted((info.key for info in store.list_keys(index_prefix(ident))), reverse=True)  # marks first
    data = [] if keep_data else [segment_key(ident, rank) for rank in range(world_size)]
    if not dry_run:
        store.delete(published)  # first: from here on nobody is offered a checkpoint that is falling apart
        store.delete(index)
        store.delete(data)
        event(_log, logging.INFO, "prune.done", checkpoint=ident, data_held=keep_data)
    return len(published) + len(index) + len(data)
