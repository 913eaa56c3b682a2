"""What ranks settle before anything is saved: one URL, node groups, a server per node, an attempt."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from ckpt.clock import SystemClock
from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import run_key
from ckpt.format.peer import PeerNode
from ckpt.ops.attempts import claim_attempt, read_attempt
from ckpt.storage.aside import set_aside_others
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.agree import Agreement
from ckpt_trainer_hooks.nodes import kernel_id, own_node

__all__ = ["Claim", "Session", "agree_on_session", "claim"]

_log = get_logger("session")


@dataclass(frozen=True, slots=True)
class Session:
    """What the ranks agreed on.

    Attributes:
        group: this rank's node group.
        peers: the ranks with tensors of the same names as this rank's; plain tensors are replicas on these.
        hosts_server: this rank starts the embedded server of its node.
        nodes: every node of the job, this one among them, by smallest rank (the order of the groups).
    """

    group: common_pb2.NodeGroup
    peers: tuple[int, ...]
    hosts_server: bool
    nodes: tuple[PeerNode, ...]


def agree_on_session(
    agreement: Agreement,
    config: RunConfig,
    staging: StagingDir,
    names_digest: str,
    per_rank: Collection[str] = (),
    *,
    start_server: Callable[[], None],
) -> Session:
    """Compare what the ranks were given, group them by node, have each node's server started, and tell it of
    the run and its nodes.

    Args:
        agreement: between the ranks.
        config: of the run.
        staging: of this node.
        names_digest: of the names of this rank's tensors. Ranks of one pipeline stage have the same.
        per_rank: names of the items that this rank has its own state of; a warning where ranks differ.
        start_server: called on one rank of each node; starts its server where that is needed.

    Raises:
        InvalidInputError: ranks were given different URLs; on every rank, with both values.
        TimeoutExceededError: a rank did not take part.
    """
    told = agreement.gather(
        "session",
        {
            "url": config.url,
            "node": _node_identity(staging),
            "names": names_digest,
            "per_rank": sorted(per_rank),
        },
    )
    for rank, other in enumerate(told):
        if other["url"] != told[0]["url"]:
            raise InvalidInputError(
                "ranks were given different URLs",
                code="disagree",
                rank_0=told[0]["url"],
                rank=rank,
                url=other["url"],
            )
    if agreement.rank == 0 and (
        odd := [r for r, o in enumerate(told) if o["per_rank"] != told[0]["per_rank"]]
    ):
        event(
            _log,
            logging.WARNING,
            "session.per_rank_items_differ",
            reason="a per-rank item that some ranks do not have goes back only to ranks that had it",
            rank_0=told[0]["per_rank"],
            other_ranks=odd,
        )
    group = _group_of([other["node"] for other in told], agreement.rank)
    hosts_server = group.ranks[0] == agreement.rank
    mine = None
    with agreement.together("server"):
        if hosts_server:
            start_server()
            mine = own_node(staging, group.ranks, wanted=config.replication_factor > 1).to_json()
    nodes = tuple(PeerNode.from_json(node) for node in agreement.gather("nodes", mine) if node is not None)
    if hosts_server:
        staging.write_run_config(run_key(config.url), replace(config, peers=nodes))
        staging.clear_ended(run_key(config.url))
    peers = tuple(rank for rank, other in enumerate(told) if other["names"] == names_digest)
    return Session(group=group, peers=peers, hosts_server=hosts_server, nodes=nodes)


@dataclass(frozen=True, slots=True)
class Claim:
    """A start of the run: its attempt number, and the id of the run's life, which attempt 1 begins."""

    attempt: int
    run_id: str


def claim(
    agreement: Agreement,
    config: RunConfig,
    parent: CheckpointId | None,
    *,
    parent_is_committed: bool,
    staging: StagingDir,
    hosts_server: bool,
) -> Claim:
    """Claim the next attempt number of the run, once for all ranks, and have every node set aside what it
    holds of other lives of the run: from here on segments are sealed under the same ids.

    Raises:
        NotFoundError, RefusedError: as :func:`claim_attempt`.
        UnavailableError: the store, or a node's staging directory, cannot be used; on every rank.
    """

    def on_rank_0() -> list[Any]:
        with closing(open_store(config.url, config.store_options)) as store:
            number = claim_attempt(
                store,
                parent=parent,
                world_size=agreement.world_size,
                host=socket.gethostname(),
                clock=SystemClock(),
                parent_is_committed=parent_is_committed,
            )
            return [number, read_attempt(store, number).run_id]

    claimed = Claim(*agreement.decide("attempt", on_rank_0))
    with agreement.together("aside"):
        if hosts_server:
            set_aside_others(staging, run_key(config.url), claimed.run_id, is_new=claimed.attempt == 1)
    return claimed


def _node_identity(staging: StagingDir) -> str:
    """Ranks with one identity share a node: the same kernel and the same staging directory."""
    return f"{kernel_id()}/{staging.token().hex()}"


def _group_of(nodes: list[str], rank: int) -> common_pb2.NodeGroup:
    order = list(dict.fromkeys(nodes))  # groups in the order of their smallest rank
    members = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return common_pb2.NodeGroup(index=order.index(nodes[rank]), count=len(order), ranks=members)
