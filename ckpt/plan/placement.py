"""On which nodes the replicas of a node's segments lie. Pure; every node finds the same from the same list.

Copies are kept apart: in different failure domains wherever there are enough of them, never two on one
node. They are balanced: where every node can be served apart, each holds the replicas of factor - 1 others.

How: line the nodes up domain by domain, the largest first, and let m be the size of the largest domain.
Whoever stands m, 2m, ... places further on (around a ring) is in another domain as long as the copies fit:
factor * m <= number of nodes. A shift is a permutation, so the load is equal. Where they do not fit (two
racks of which one has most of the nodes), nodes choose one after another: another domain first, then the
least loaded, then the nearest.

``jump`` replaces the automatic distance by a fixed one in the order of the list, as ``replication_jump`` of
Megatron-LM and NVRx does for ranks (copies at n + J, n + 2J, ...); a node there that is in a domain of
another copy already is passed over while others are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt.errors import InvalidInputError
from ckpt.format.peer import PeerNode

__all__ = ["Placement", "choose_copies", "place_replicas"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the replicas of one node go.

    Attributes:
        order: every other node, best first. The first ``factor - 1`` hold the replicas while all are alive.
        apart: False where copies have to share a failure domain even while all are alive.
    """

    order: tuple[PeerNode, ...]
    apart: bool


def place_replicas(nodes: Sequence[PeerNode], *, factor: int, jump: int = 0) -> dict[str, Placement]:
    """Return the placement of every node, by its id.

    Args:
        nodes: of the run, in the order of their smallest rank; ids differ.
        factor: copies in all, the node's own included; at least 1. With fewer nodes than copies each node has
            a copy.
        jump: distance of the copies in the list; 0: as the failure domains demand.

    Raises:
        InvalidInputError: factor below 1, jump below 0, or one id twice.
    """
    if factor < 1 or jump < 0:
        raise InvalidInputError("bad replication", replication_factor=factor, replication_jump=jump)
    if len({node.node_id for node in nodes}) != len(nodes):
        raise InvalidInputError("a node is listed twice", nodes=[node.node_id for node in nodes])
    copies = min(factor, len(nodes)) - 1
    line = list(nodes) if jump else _by_domain(nodes)
    largest = max(Counter(node.domain for node in nodes).values(), default=0)
    if jump:
        distance, fits = jump, False
    elif largest == len(nodes):  # one domain: nothing to keep apart, but the load still has to be equal
        distance, fits = 1, True
    else:
        distance, fits = largest, factor * largest <= len(nodes)
    loads: Counter[str] = Counter()
    placed = {}
    for position, node in enumerate(line):
        others = _around(line, position, distance)
        if fits:
            first = others[:copies]
        elif jump:
            first = _spread(node, others, copies)
        else:
            first = _least_loaded(node, others, copies, loads)
        loads.update(other.node_id for other in first)
        rest = [other for other in others if other not in first]
        domains = [node.domain, *(other.domain for other in first)]
        rest.sort(key=lambda other: other.domain in domains)  # stable
        apart = len(set(domains)) == len(domains) == factor
        placed[node.node_id] = Placement(tuple(first + rest), apart)
    return placed


def choose_copies(
    owner: PeerNode, order: Sequence[PeerNode], *, factor: int, lost: Collection[str] = ()
) -> list[PeerNode]:
    """Return the nodes that hold the replicas of ``owner`` now: the next in ``order`` stand in for the lost.

    Args:
        owner: whose segments.
        order: from its :class:`Placement`.
        factor: copies in all, the owner's included.
        lost: ids of nodes that do not count.

    Returns:
        At most ``factor - 1`` nodes, fewer where not more are left. Nodes without a target never count.
    """
    alive = [node for node in order if node.target is not None and node.node_id not in lost]
    return _spread(owner, alive, factor - 1)


def _by_domain(nodes: Sequence[PeerNode]) -> list[PeerNode]:
    """The nodes domain by domain, the largest first, else in the order of the list."""
    sizes = Counter(node.domain for node in nodes)
    first: dict[str, int] = {}
    for position, node in enumerate(nodes):
        first.setdefault(node.domain, position)
    return sorted(nodes, key=lambda node: (-sizes[node.domain], first[node.domain]))


def _around(line: Sequence[PeerNode], position: int, distance: int) -> list[PeerNode]:
    """Every other node: those at multiples of ``distance`` along the ring first, then the nearest."""
    count = len(line)
    steps = [*(distance * k % count for k in range(1, count)), *range(1, count)]
    return [line[(position + step) % count] for step in dict.fromkeys(steps) if step]


def _spread(owner: PeerNode, others: Sequence[PeerNode], copies: int) -> list[PeerNode]:
    """The first ``copies`` of ``others`` in domains of their own; where those run out, the first left."""
    chosen: list[PeerNode] = []
    domains = {owner.domain}
    for other in others:
        if len(chosen) < copies and other.domain not in domains:
            chosen.append(other)
            domains.add(other.domain)
    left = [other for other in others if other not in chosen]
    return chosen + left[: copies - len(chosen)]


def _least_loaded(
    owner: PeerNode, others: Sequence[PeerNode], copies: int, loads: Counter[str]
) -> list[PeerNode]:
    """Choose one after another: another domain, then the least load, then the place in ``others``."""
    chosen: list[PeerNode] = []
    domains = Counter([owner.domain])
    left = list(others)
    for _ in range(copies):
        best = min(left, key=lambda other: (domains[other.domain], loads[other.node_id]))
        left.remove(best)
        chosen.append(best)
        domains[best.domain] += 1
    return chosen
