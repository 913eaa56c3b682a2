"""Make a checkpoint exist: check that everything is there, then put the manifest create-if-absent.

The order of writes, and what a crash after each leaves:

1. segments and layouts, then the group index (by each node's server): invisible; continued or swept later.
2. the merged layout, where ranks had different ones: content-addressed, harmless.
3. the manifest, by a conditional put: before it nothing is visible, after it all is. There is no step 4.

Any server may try at any time; the conditional put decides. A committer of an older attempt (a zombie, or a
server that catches up after a network cut) is not refused: its checkpoint is whole (its segments are looked
at once more, since a sweep may have taken them) and may be wanted by name, and ``latest`` looks at the newest
attempt only, so it hides nothing (see ckpt.ops.catalog).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ckpt.clock import Clock, SystemClock, random_bytes
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.audit import check_replicas
from ckpt.format.ids import CheckpointId
from ckpt.format.invariants import (
    check_coverage,
    check_groups,
    check_layouts,
    layout_digests,
    merged_references,
    raise_first,
)
from ckpt.format.keys import MANIFESTS, manifest_key, parse_manifest_key
from ckpt.format.layout import LayoutSet
from ckpt.format.manifest import encode_manifest, groups_digest, open_manifest
from ckpt.format.summaries import Summaries
from ckpt.ops.attempts import first_parsed, newest_attempt
from ckpt.ops.catalog import exists, latest, read_manifest
from ckpt.ops.groups import list_groups, put_layout, read_group_headers, read_layout
from ckpt.ops.verify import check_objects
from ckpt.storage.base import Store
from ckpt.storage.conditional import commit_put
from ckpt_proto.v1 import disk_pb2

__all__ = ["CommitResult", "CommitState", "commit_delay_s", "may_commit", "try_commit"]

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
    clock: Clock | None = None,
) -> CommitResult:
    """Commit ``ident`` if all its group indexes are in the store. Idempotent. Blocks on the store.

    Reads the headers of the group indexes only: O(groups) requests, however many ranks and tensors.

    Args:
        store: of the run.
        ident: which checkpoint.
        environment: versions and settings to note in the manifest, beside those of the segments.
        clock: for the time noted in the manifest and for back-off.

    Raises:
        CorruptError: the parts are there and do not make a checkpoint; it can never be committed.
        UnavailableError: the store cannot be reached, or it is unknown whether the put arrived. Call again.
    """
    clock = clock or SystemClock()
    if exists(store, ident):
        return CommitResult(state=CommitState.ALREADY)
    listing = list_groups(store, ident)
    if not listing.is_complete:
        return CommitResult(state=CommitState.WAITING, missing=listing.missing)
    summaries = Summaries.of(read_group_headers(store, listing.in_order()))
    merged = _prove_whole(store, ident, summaries)
    manifest = _manifest(ident, summaries, merged, environment or {}, clock)
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
    warnings = tuple(_state_warnings(ident, summaries))
    event(
        _log,
        logging.INFO,
        "commit.done",
        checkpoint=ident,
        groups=manifest.group_count,
        nbytes=manifest.nbytes,
        tensors=manifest.tensor_count,
    )
    for warning in warnings:
        event(_log, logging.WARNING, "commit.odd", checkpoint=ident, reason=warning)
    return CommitResult(state=CommitState.COMMITTED, warnings=warnings)


def _prove_whole(store: Store, ident: CheckpointId, summaries: Summaries) -> LayoutSet:
    """Check the invariants and return the merged layout, which is in the store by then."""
    raise_first(check_groups(ident, summaries))
    used = layout_digests(summaries)
    layouts = {key: read_layout(store, key) for key in used}
    merged, problems = check_layouts(used, layouts)
    raise_first(problems)
    raise_first(check_coverage(merged, used, layouts))
    world_size = summaries.groups[0].header.world_size
    raise_first(check_replicas(summaries.segments, layouts, world_size=world_size))
    raise_first(_check_references(store, ident, merged_references(summaries)))
    if _is_late(store, ident):
        # Only what is overtaken may be swept, so only there can complete group indexes outlive segments.
        raise_first(check_objects(store, summaries.groups))
    if merged.digest not in layouts:
        put_layout(store, merged)
    return merged


def _is_late(store: Store, ident: CheckpointId) -> bool:
    """Whether something newer exists: a newer attempt, or a higher step of this one."""
    newest = first_parsed(store, MANIFESTS, parse_manifest_key)
    if newest is not None and (newest[0].attempt, newest[0].step) > (ident.attempt, ident.step):
        return True
    return (newest_attempt(store) or 0) > ident.attempt


def _check_references(
    store: Store, ident: CheckpointId, references: Sequence[CheckpointId]
) -> list[CkptError]:
    """Check that the data this checkpoint borrows from older ones was not pruned meanwhile."""
    gone = [other for other in references if not exists(store, other)]
    if not gone:
        return []
    # Pruned, but its data stay as long as a checkpoint that exists needs them.
    newest = latest(store)
    held: set[CheckpointId] = set()
    if newest is not None:
        try:
            held = {CheckpointId.from_proto(other) for other in read_manifest(store, newest).references}
        except NotFoundError:
            held = set()
    return [
        CorruptError(
            "chunks lie in the objects of a checkpoint that was pruned meanwhile",
            code="reference-gone",
            checkpoint=ident,
            reference=other,
        )
        for other in gone
        if other not in held
    ]


def _manifest(
    ident: CheckpointId,
    summaries: Summaries,
    merged: LayoutSet,
    environment: Mapping[str, str],
    clock: Clock,
) -> disk_pb2.Manifest:
    first = summaries.groups[0].header
    manifest = disk_pb2.Manifest(
        run=first.run,
        id=ident.to_proto(),
        write_id=random_bytes(16),
        world_size=first.world_size,
        group_count=len(summaries.groups),
        layout_digest=merged.digest,
        groups_digest=groups_digest(summaries.groups),
        nbytes=sum(summaries.nbytes),
        tensor_count=len(merged),
        has_explicit_boxes=summaries.has_explicit_boxes,
        committed_at=clock.now(),
        references=[other.to_proto() for other in merged_references(summaries)],
        environment={**first.environment, **environment},
        state_ranks=_state_ranks(summaries),
    )
    if first.HasField("parent"):
        manifest.parent.CopyFrom(first.parent)
    return manifest


def _state_ranks(summaries: Summaries) -> list[int]:
    """Return the ranks that hold parts of the plain state; empty where rank 0 holds it all.

    A rank adds a part where both its tensors and its plain state are unlike those of every rank before it.
    Replicas (same tensors) add nothing, even where their state differs, which is a warning; nor do ranks that
    only have a data loader's tensors of their own.
    """
    layouts: set[bytes] = set()
    states: set[bytes] = set()
    found = []
    for (layout, state), rank in summaries.first_ranks().items():
        if layout not in layouts and state not in states:
            found.append(rank)
        layouts.add(layout)
        states.add(state)
    return found if found != [0] else []


def _state_warnings(ident: CheckpointId, summaries: Summaries) -> list[CkptError]:
    """Name replicas whose common state differs: a restore uses that of the lowest rank."""
    first: dict[bytes, bytes] = {}
    odd = {
        (layout, state)
        for layout, state in summaries.first_ranks()
        if state and first.setdefault(layout, state) != state
    }
    if not odd:
        return []
    pairs = zip(summaries.layouts, summaries.states, summaries.ranks.tolist(), strict=True)
    other = sorted(rank for layout, state, rank in pairs if (layout, state) in odd)
    shown = ", ".join(map(str, other[:8])) + (", ..." if len(other) > 8 else "")
    return [
        CkptError(
            "plain state differs between replicas; a restore uses that of the lowest rank",
            code="state-differs",
            checkpoint=ident,
            ranks=shown,
            total=len(other),
        )
    ]
