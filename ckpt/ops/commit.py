"""Make a checkpoint exist: check that everything is there, then put the manifest create-if-absent.

The order of writes, and what a crash after each leaves:

1. segments and layouts, then the group index (by each node's server): invisible; continued or swept later.
2. the merged layout, where ranks had different ones: content-addressed, harmless.
3. the manifest, by a conditional put: before it nothing is visible, after it all is. There is no step 4, but
   a look whether somebody began to delete the parts meanwhile (:func:`_undo_if_deleted`).

Any server may try at any time; the conditional put decides. A committer of an older attempt (a zombie, or a
server that catches up after a network cut) is not refused: its checkpoint is whole (its segments are looked
at once more, since a sweep may have taken them) and may be wanted by name, and ``latest`` looks at the newest
attempt only, so it hides nothing (see ckpt.ops.catalog).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ckpt.clock import Clock, SystemClock
from ckpt.collector import collector_paused
from ckpt.errors import CkptError, CorruptError, InvalidInputError, NotFoundError, RefusedError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import INDEX, MANIFESTS, group_key, manifest_key, parse_manifest_key
from ckpt.format.manifest import encode_manifest, open_manifest
from ckpt.format.summaries import Summaries
from ckpt.ops.attempts import first_parsed
from ckpt.ops.catalog import exists
from ckpt.ops.condemn import is_condemned
from ckpt.ops.groups import list_groups, read_group_headers
from ckpt.ops.known_groups import KnownGroups
from ckpt.ops.proof import make_manifest, prove_whole
from ckpt.storage.base import Store
from ckpt.storage.conditional import commit_put

__all__ = [
    "CommitResult",
    "CommitState",
    "commit_delay_s",
    "may_commit",
    "publish_complete",
    "try_commit",
]

_log = get_logger("ops.commit")
_TAKEOVER_STEP_S = 2.0
_TAKEOVER_MOST_S = 60.0


class CommitState(Enum):
    """How :func:`try_commit` ended."""

    COMMITTED = "committed"
    ALREADY = "already"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """What :func:`try_commit` found or did.

    Attributes:
        state: COMMITTED by this call; ALREADY there; WAITING for group indexes.
        missing: groups waited for; empty where not even their number is known yet.
        warnings: oddities that did not stop the commit, as errors that nobody raises.
    """

    state: CommitState
    missing: tuple[int, ...] = ()
    warnings: tuple[CkptError, ...] = ()


def commit_delay_s(
    *, conditional: bool, hosts_rank0: bool, group_index: int, settle_s: float = 300.0
) -> float:
    """Return how long a server leaves a commit to others before it tries itself, in seconds.

    Counted from when it knows that all group indexes are there. The server of rank 0 never waits. Where
    the store keeps the condition of ``put_new`` the others wait a little longer each, only to spare
    requests. Where it does not, only rank 0's server commits, and a takeover needs ``settle_s``: longer than
    any put of rank 0's server can be under way, because the two would overwrite each other unnoticed.
    """
    if hosts_rank0:
        return 0.0
    growing = min(_TAKEOVER_STEP_S * max(group_index, 1), _TAKEOVER_MOST_S)
    return growing if conditional else settle_s + growing


def may_commit(
    *, conditional: bool, hosts_rank0: bool, group_index: int, waited_s: float, settle_s: float = 300.0
) -> bool:
    """Return whether a server that has waited ``waited_s`` may try. See :func:`commit_delay_s`.

    :func:`try_commit` looks for an existing manifest first, so trying late is never wrong.
    """
    delay_s = commit_delay_s(
        conditional=conditional, hosts_rank0=hosts_rank0, group_index=group_index, settle_s=settle_s
    )
    return waited_s >= delay_s


def try_commit(
    store: Store,
    ident: CheckpointId,
    *,
    environment: Mapping[str, str] | None = None,
    known: KnownGroups | None = None,
    clock: Clock | None = None,
) -> CommitResult:
    """Commit ``ident`` if all its group indexes are in the store. Idempotent. Blocks on the store.

    Reads the headers of the group indexes only: O(groups) requests, however many ranks and tensors. With
    ``known``, a checkpoint of many groups whose claims are those of the one committed before takes a listing.

    Args:
        store: of the run.
        ident: which checkpoint.
        environment: versions and settings to note in the manifest, beside those of the segments.
        known: what earlier calls for this run proved; changed here. None: prove everything.
        clock: for the time noted in the manifest and for back-off.

    Raises:
        CorruptError: the parts are there and do not make a checkpoint; it can never be committed.
        UnavailableError: the store cannot be reached, or it is unknown whether the put arrived. Call again.
    """
    clock = clock or SystemClock()
    if exists(store, ident):
        return CommitResult(state=CommitState.ALREADY)
    whole = known.recall(store, ident) if known is not None else None
    if whole is None:
        listing = list_groups(store, ident)
        if not listing.is_complete:
            return CommitResult(state=CommitState.WAITING, missing=listing.missing)
        with collector_paused():
            summaries = Summaries.of(read_group_headers(store, listing.in_order()))
            whole = prove_whole(store, ident, summaries)
            if known is not None:
                known.remember(summaries, whole)
    manifest = make_manifest(ident, whole, environment or {}, clock)
    key = manifest_key(ident)
    ours = commit_put(
        store,
        key,
        encode_manifest(manifest),
        manifest.write_id,
        is_ours=lambda data: open_manifest(data, ident, key=key).write_id == manifest.write_id,
        clock=clock,
    )
    if not ours:
        return CommitResult(state=CommitState.ALREADY)
    _undo_if_deleted(store, ident, manifest.group_count)
    event(
        _log,
        logging.INFO,
        "commit.done",
        checkpoint=ident,
        groups=manifest.group_count,
        nbytes=manifest.nbytes,
        tensors=manifest.tensor_count,
    )
    for warning in whole.warnings:
        event(_log, logging.WARNING, "commit.odd", checkpoint=ident, reason=warning)
    return CommitResult(state=CommitState.COMMITTED, warnings=whole.warnings)


def _undo_if_deleted(store: Store, ident: CheckpointId, group_count: int) -> None:
    """Take the manifest away again where the parts are going, or gone.

    For a committer that was held up between its look at the parts and its put: others committed the same
    checkpoint and newer ones, and pruned this one; or a sweep found it overtaken. They are ahead, so what is
    undone was never the latest. The sweep, or the prune, does the same, should this process die here.

    Raises:
        CorruptError: code "deleted": it was undone; this checkpoint can never be committed.
    """
    key = manifest_key(ident)
    # In this order: the record is there until the group indexes are gone.
    if not is_condemned(store, ident, since=key) and _is_there(store, group_key(ident, 0, group_count)):
        return
    store.delete([key])
    raise CorruptError(
        "the parts were deleted while they were committed: the checkpoint is overtaken, and was pruned or "
        "swept; the commit was undone",
        code="deleted",
        checkpoint=ident,
    )


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


def publish_complete(store: Store) -> list[CheckpointId]:
    """Commit what is complete in a run that has no manifest at all; return that, newest first.

    Where a run's manifests were lost, or its servers died right before their first one, everything else of
    its checkpoints may be there. A run must not begin from scratch over that. Each is proved as in any
    commit. Two requests where there is nothing.

    Raises:
        RefusedError: code "no-manifests": the store ignores conditional puts: only servers may commit then.
        UnavailableError: the store cannot be reached.
    """
    if first_parsed(store, MANIFESTS, parse_manifest_key) is not None:
        return []
    found = []
    for name in sorted(store.list_dirs(INDEX), reverse=True):
        try:
            ident = CheckpointId.parse(name)
        except InvalidInputError:
            continue
        if not store.probe_conditional():
            raise RefusedError(
                "the run has parts of checkpoints in the store and no manifest; its servers may still commit "
                "them: wait for that, or begin anew with start_over",
                code="no-manifests",
                url=store.url,
            )
        try:
            state = try_commit(store, ident).state
        except CorruptError as error:
            event(_log, logging.WARNING, "commit.incomplete", checkpoint=ident, error=error)
            continue
        if state is CommitState.COMMITTED:
            found.append(ident)
            event(
                _log,
                logging.WARNING,
                "commit.found",
                reason="all of the checkpoint was in the store, but no manifest",
                checkpoint=ident,
            )
    return found
