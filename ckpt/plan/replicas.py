"""Which steps are worth a replica, and which replicas may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ckpt.format.ids import CheckpointId
from ckpt.plan.retention import newest_first

__all__ = ["HeldReplica", "replicas_to_drop", "steps_to_replicate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldReplica:
    """What a node holds of one other node's part of one step.

    Attributes:
        ident: the step.
        group: number of the owner's node group in it.
        owner: id of the node whose part it is.
        committed: the manifest is in the store.
        whole: every rank of the group is sealed here.
        given_up: not committed, and never will be, or not from here: see ckpt_server.replicas.
    """

    ident: CheckpointId
    group: int
    owner: str
    committed: bool
    whole: bool
    given_up: bool = False


def steps_to_replicate(
    sealed: Iterable[CheckpointId], committed: Collection[CheckpointId], *, keep: int
) -> list[CheckpointId]:
    """Return the steps that should have replicas, oldest first: the newest ``keep`` and all that are not
    committed, since of those there is no other copy.

    Args:
        sealed: steps that this node has sealed whole.
        committed: those of them whose manifest is in the store.
        keep: newest steps whose replicas make a restart fast; at least 1.
    """
    ordered = newest_first(sealed)
    newest = set(ordered[:keep])
    return [ident for ident in reversed(ordered) if ident in newest or ident not in committed]


def replicas_to_drop(
    held: Sequence[HeldReplica], *, keep: int, current: Collection[str]
) -> list[HeldReplica]:
    """Return the replicas that are not needed any more, oldest first.

    Never one of a step that is not committed, unless it is given up. A committed one goes when ``keep`` newer
    whole ones are here: of the same owner, or, where that owner is no node of the run any more, of anybody.

    Args:
        held: everything held of one run.
        keep: as for :func:`steps_to_replicate`, so that nothing is dropped that its owner would send again.
        current: ids of the nodes of the run's newest start.
    """
    dropped = []
    for one in held:
        newer = {
            other.ident
            for other in held
            if other.whole
            and not other.given_up
            and _order(other.ident) > _order(one.ident)
            and (other.owner == one.owner or one.owner not in current)
        }
        if one.given_up or (one.committed and len(newer) >= keep):
            dropped.append(one)
    return sorted(dropped, key=lambda one: (_order(one.ident), one.group))


def _order(ident: CheckpointId) -> tuple[int, int]:
    return ident.attempt, ident.step
