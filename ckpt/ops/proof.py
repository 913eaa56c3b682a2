"""The proof that all parts of a checkpoint are there and make one whole.

A commit proves it of what is in the store; a restore of a step that is only sealed, of what nodes hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.clock import Clock, random_bytes
from ckpt.errors import CkptError, CorruptError, NotFoundError
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
from ckpt.format.keys import MANIFESTS, parse_manifest_key
from ckpt.format.layout import LayoutSet
from ckpt.format.manifest import groups_digest, stored_nbytes
from ckpt.format.summaries import Summaries
from ckpt.ops.attempts import first_parsed, newest_attempt
from ckpt.ops.borrow import borrows_of
from ckpt.ops.catalog import exists, latest, read_manifest
from ckpt.ops.groups import put_layout, read_layout
from ckpt.ops.verify import check_objects
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "FirstRanks",
    "Whole",
    "check_references",
    "is_late",
    "make_manifest",
    "odd_states",
    "prove_parts",
    "prove_whole",
    "state_ranks",
]

FirstRanks = Mapping[tuple[bytes, bytes], int]
"""The lowest rank with each (layout, state) pair of digests, ascending by that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What is known of a checkpoint whose parts make a whole; the manifest is made of it.

    Attributes:
        first: header of group 0.
        groups_digest, layout_digest, tensor_count, nbytes, stored_nbytes, has_explicit_boxes, references,
            state_ranks: as in the manifest.
        warnings: oddities that do not stop a commit.
    """

    first: disk_pb2.GroupHeader
    groups_digest: bytes
    layout_digest: bytes
    tensor_count: int
    nbytes: int
    stored_nbytes: int
    has_explicit_boxes: bool
    references: tuple[CheckpointId, ...]
    state_ranks: tuple[int, ...]
    warnings: tuple[CkptError, ...] = ()


def prove_whole(store: Store, ident: CheckpointId, summaries: Summaries) -> Whole:
    """Check G1 to G5, the replica audit and references. The merged layout is in the store afterwards.

    Args:
        store: of the run.
        ident: which checkpoint.
        summaries: of all its groups, in order.

    Raises:
        CorruptError: the parts do not make a whole.
        UnavailableError: the store cannot be reached.
    """
    merged, whole = prove_parts(ident, summaries, lambda key: read_layout(store, key))
    raise_first(check_references(store, ident, whole.references))
    if is_late(store, ident):
        # Only what is overtaken may be swept, so only there can complete group indexes outlive segments.
        raise_first(check_objects(store, summaries.groups))
    if merged.digest not in layout_digests(summaries):
        put_layout(store, merged)
    return whole


def prove_parts(
    ident: CheckpointId, summaries: Summaries, read_any: Callable[[bytes], LayoutSet]
) -> tuple[LayoutSet, Whole]:
    """Check G1 to G5 and the replica audit; the store is not looked at.

    Args:
        ident: which checkpoint.
        summaries: of all its groups, in order.
        read_any: returns the layout set of a digest.

    Returns:
        The merged layouts, and what the manifest is made of.

    Raises:
        CorruptError: the parts do not make a whole.
        CkptError: what ``read_any`` raises.
    """
    raise_first(check_groups(ident, summaries))
    used = layout_digests(summaries)
    layouts = {key: read_any(key) for key in used}
    merged, problems = check_layouts(used, layouts)
    raise_first(problems)
    raise_first(check_coverage(merged, used, layouts))
    first = summaries.groups[0].header
    raise_first(check_replicas(summaries.segments, layouts, world_size=first.world_size))
    pairs = summaries.first_ranks()
    whole = Whole(
        first=first,
        groups_digest=groups_digest(summaries.groups),
        layout_digest=merged.digest,
        tensor_count=len(merged),
        nbytes=sum(summaries.nbytes),
        stored_nbytes=sum(map(stored_nbytes, summaries.segments)),
        has_explicit_boxes=summaries.has_explicit_boxes,
        references=tuple(merged_references(summaries)),
        state_ranks=state_ranks(pairs),
        warnings=tuple(_state_warnings(ident, summaries, pairs)),
    )
    return merged, whole


def make_manifest(
    ident: CheckpointId, whole: Whole, environment: Mapping[str, str], clock: Clock
) -> disk_pb2.Manifest:
    """Return the manifest of what was proved.

    Args:
        ident: which checkpoint.
        whole: what is known of it.
        environment: versions and settings to note beside those of the segments.
        clock: for the time noted.
    """
    first = whole.first
    manifest = disk_pb2.Manifest(
        run=first.run,
        id=ident.to_proto(),
        write_id=random_bytes(16),
        world_size=first.world_size,
        group_count=first.group.count,
        layout_digest=whole.layout_digest,
        groups_digest=whole.groups_digest,
        nbytes=whole.nbytes,
        tensor_count=whole.tensor_count,
        has_explicit_boxes=whole.has_explicit_boxes,
        committed_at=clock.now(),
        references=[other.to_proto() for other in whole.references],
        environment={**first.environment, **environment},
        state_ranks=whole.state_ranks,
        run_id=first.run_id,
    )
    if whole.stored_nbytes != whole.nbytes:
        manifest.stored_nbytes = whole.stored_nbytes
    if first.HasField("parent"):
        manifest.parent.CopyFrom(first.parent)
    return manifest


def is_late(store: Store, ident: CheckpointId) -> bool:
    """Whether something newer exists: a newer attempt, or a higher step of this one."""
    newest = first_parsed(store, MANIFESTS, parse_manifest_key)
    if newest is not None and (newest[0].attempt, newest[0].step) > (ident.attempt, ident.step):
        return True
    return (newest_attempt(store) or 0) > ident.attempt


def check_references(
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
    if not held.issuperset(gone):
        held |= borrows_of(store, ident)  # so nobody has deleted them, see there
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


def state_ranks(pairs: FirstRanks) -> tuple[int, ...]:
    """Return the ranks that hold parts of the plain state; empty where rank 0 holds it all.

    A rank adds a part where both its tensors and its plain state are unlike those of every rank before it.
    Replicas (same tensors) add nothing, even where their state differs, which is a warning; nor do ranks that
    only have a data loader's tensors of their own.
    """
    layouts: set[bytes] = set()
    states: set[bytes] = set()
    found = []
    for (layout, state), rank in pairs.items():
        if layout not in layouts and state not in states:
            found.append(rank)
        layouts.add(layout)
        states.add(state)
    return tuple(found) if found != [0] else ()


def odd_states(pairs: FirstRanks) -> set[tuple[bytes, bytes]]:
    """Return the (layout, state) pairs whose state is not that of the lowest rank with the layout."""
    first: dict[bytes, bytes] = {}
    return {(layout, state) for layout, state in pairs if state and first.setdefault(layout, state) != state}


def _state_warnings(ident: CheckpointId, summaries: Summaries, pairs: FirstRanks) -> list[CkptError]:
    """Name replicas whose common state differs: a restore uses that of the lowest rank."""
    odd = odd_states(pairs)
    if not odd:
        return []
    columns = zip(summaries.layouts, summaries.states, summaries.ranks.tolist(), strict=True)
    other = sorted(rank for layout, state, rank in columns if (layout, state) in odd)
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
