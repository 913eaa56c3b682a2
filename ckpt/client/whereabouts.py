"""Where the copies of a run's segments are: on this node and on the others that it knows of."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.client.peer import PeerClient
from ckpt.errors import CkptError
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.ops.holdings import node_holdings
from ckpt.rpc.access import PeerAccess
from ckpt.storage.known_nodes import known_nodes
from ckpt.storage.peerfile import node_id, read_peer_file
from ckpt.storage.staging import StagingDir

__all__ = ["Whereabouts", "find_copies"]

_ASK_S = 3.0  # somebody waits
_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What one node holds.

    Attributes:
        node: address of its server, else the host's name.
        is_here: it is the node that was asked.
        held: by checkpoint; its own segments and replicas of others'.
        problem: why it does not say.
    """

    node: str
    is_here: bool
    held: Sequence[Held] = ()
    problem: CkptError | None = None


def find_copies(
    staging: StagingDir, run_key: str, access: PeerAccess, only: CheckpointId | None = None
) -> list[Whereabouts]:
    """Ask this node and, at once, the others that it knows of the run; blocks for three seconds at most.

    Args:
        staging: of this node.
        run_key: the run's folder, here and there.
        access: to the other nodes' servers.
        only: this checkpoint alone.

    Raises:
        UnavailableError: this node's directory cannot be read.
    """
    me = read_peer_file(staging)
    name = "this node" if me is None else me.target or me.host
    here = Whereabouts(node=name, is_here=True, held=node_holdings(staging, run_key, only))
    own = node_id(staging)
    others = [node for node in known_nodes(staging, run_key) if node.node_id != own]

    def ask(node: PeerNode) -> Whereabouts | None:
        if node.target is None:
            return None  # it has no server for others
        try:
            with PeerClient(node.target, token=access.token, ca=access.ca, timeout_s=_ASK_S) as client:
                held = [Held.from_proto(item) for item in client.have(run_key, only)]
        except CkptError as error:
            return Whereabouts(node=node.target, is_here=False, problem=error)
        return Whereabouts(node=node.target, is_here=False, held=held)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ckpt-ask") as pool:
        return [here, *(found for found in pool.map(ask, others) if found is not None)]
