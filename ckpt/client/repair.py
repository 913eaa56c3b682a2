"""``ckpt repair`` without its output: the store from the copies on nodes, then this node's copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.client.peer_copies import PeerCopies
from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId
from ckpt.ops.rebuild import Rebuilder
from ckpt.ops.repair import Mended, RepairReport, repair_checkpoint
from ckpt.ops.repair_local import repair_copies
from ckpt.rpc.access import PeerAccess
from ckpt.storage.base import Store
from ckpt.storage.known_nodes import known_nodes
from ckpt.storage.peerfile import node_id
from ckpt.storage.staging import StagingDir

__all__ = ["Repaired", "repair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What came of it.

    Attributes:
        report: see :class:`ckpt.ops.repair.RepairReport`; copies on this node are in it by their path.
        unreachable: peers that did not answer, and why.
    """

    report: RepairReport
    unreachable: dict[str, CkptError]


def repair(
    store: Store,
    ident: CheckpointId,
    staging: StagingDir,
    run_key: str,
    *,
    peers: Sequence[str] = (),
    access: PeerAccess | None = None,
    dry_run: bool = False,
) -> Repaired:
    """Repair a committed checkpoint and this node's copies of it. Blocks.

    Args:
        store: of the run.
        ident: which.
        staging: of this node; need not exist.
        run_key: the run's folder in it.
        peers: servers of other nodes to ask beside those the run is known to have had.
        access: to other nodes' servers.
        dry_run: change nothing.

    Raises:
        NotFoundError: it is not committed, or was pruned meanwhile.
        UnavailableError: the store, or the staging directory, cannot be used.
    """
    with PeerCopies(staging, run_key, [*peers, *_known(staging, run_key)], access=access) as copies:
        report = repair_checkpoint(store, ident, copies, dry_run=dry_run)
        rebuilder = Rebuilder(store, copies)
        for place in copies.places:
            for problem in repair_copies(place, run_key, ident, report.indexes, rebuilder, dry_run=dry_run):
                if problem.left is None:
                    report.mended.append(Mended(key=problem.path, code=problem.code))
                else:
                    problem.left.context.setdefault("path", problem.path)
                    report.left.append(problem.left)
        return Repaired(report=report, unreachable=copies.unreachable)


def _known(staging: StagingDir, run_key: str) -> list[str]:
    """Targets of the nodes that the run is known to have had, this one left out."""
    nodes = known_nodes(staging, run_key)
    if not nodes:
        return []
    own = node_id(staging) if (staging.path / "token").exists() else None
    return [node.target for node in nodes if node.target is not None and node.node_id != own]
