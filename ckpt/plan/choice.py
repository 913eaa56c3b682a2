"""Which steps can be restored from what nodes hold, and from whom each part is best read. Pure.

Every node says which segments of which steps it holds (ckpt.format.held). A step is *usable* before its
commit when each of its ranks' segments lies on some node and every reader can get at it: a node without an
address for others is no source, except for a job that runs on that node alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId, same_run
from ckpt.format.peer import PeerNode

__all__ = [
    "NodeHoldings",
    "Source",
    "Standing",
    "Stranger",
    "nearest_first",
    "of_one_life",
    "owners",
    "sources",
    "standings",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHoldings:
    """What one node said.

    Attributes:
        node: which.
        in_job: ranks of this job run on it; False: it only serves what it has.
        held: of the run.
    """

    node: PeerNode
    in_job: bool
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a step stands over all nodes that answered.

    Attributes:
        ident: which step.
        world_size: ranks it has.
        is_committed: some node knows that it is.
        missing: ranks whose segment no node has, ascending.
        unreachable: ranks whose segment lies only where not every reader gets at it, ascending.
    """

    ident: CheckpointId
    world_size: int
    is_committed: bool
    missing: tuple[int, ...]
    unreachable: tuple[int, ...]

    @property
    def is_only_unreachable(self) -> bool:
        """Not committed, and whole, but not every reader gets at every part."""
        return bool(self.unreachable) and not (self.is_committed or self.missing)

    @property
    def is_usable(self) -> bool:
        """Not committed, as far as the nodes know, and yet it can be read. (What was committed and is in the
        store no more was deleted there, and must not come back.)"""
        return not (self.is_committed or self.missing or self.unreachable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node that a reader can ask for segments of one step.

    Attributes:
        target: of its server.
        domain: its failure domain.
        ranks: whose segments it has.
    """

    target: str
    domain: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Stranger:
    """Something that a node holds and that is not of the run's present life.

    Attributes:
        ident: which checkpoint.
        run_id: of the life it is of; empty: not known.
        host: name of the node.
    """

    ident: CheckpointId
    run_id: str
    host: str


def of_one_life(
    nodes: Iterable[NodeHoldings], run_id: str | None
) -> tuple[list[NodeHoldings], tuple[Stranger, ...]]:
    """Return what the nodes hold of one life of the run, and what else they hold, each once.

    Args:
        nodes: what they said.
        run_id: of that life; empty: not known, then everything may be of it. None: the run does not exist, so
            nothing is.
    """
    ours, strangers = [], set()
    for item in nodes:
        kept = tuple(held for held in item.held if run_id is not None and same_run(held.run_id, run_id))
        ours.append(replace(item, held=kept))
        strangers |= {Stranger(h.ident, h.run_id, item.node.host) for h in item.held if h not in kept}
    return ours, tuple(sorted(strangers))


def standings(nodes: Sequence[NodeHoldings]) -> dict[CheckpointId, Standing]:
    """Return where each step that some node holds part of stands."""
    is_alone = sum(node.in_job for node in nodes) == 1
    parts: dict[CheckpointId, list[tuple[NodeHoldings, Held]]] = {}
    for node in nodes:
        for held in node.held:
            parts.setdefault(held.ident, []).append((node, held))
    found = {}
    for ident, held_by in parts.items():
        everywhere: set[int] = set()
        reachable: set[int] = set()
        for node, held in held_by:
            everywhere.update(held.ranks)
            if node.node.target is not None or (node.in_job and is_alone):
                reachable.update(held.ranks)
        world_size = max(held.world_size for _, held in held_by)
        found[ident] = Standing(
            ident=ident,
            world_size=world_size,
            is_committed=any(held.is_committed for _, held in held_by),
            missing=tuple(rank for rank in range(world_size) if rank not in everywhere),
            unreachable=tuple(rank for rank in range(world_size) if rank in everywhere - reachable),
        )
    return found


def sources(nodes: Iterable[NodeHoldings], ident: CheckpointId) -> Iterator[Source]:
    """Yield who can be asked for segments of ``ident``; each address once."""
    seen = set()
    for node in nodes:
        target = node.node.target
        if target is None or target in seen:
            continue
        for held in node.held:
            if held.ident == ident:
                seen.add(target)
                yield Source(target=target, domain=node.node.domain, ranks=tuple(sorted(held.ranks)))


def nearest_first(
    found: Iterable[Source], *, domain: str, own_target: str | None, reader: int
) -> list[Source]:
    """Order ``found`` for one reader: its own failure domain first, which is the same rack, switch or host.

    Among equals each reader begins with another one, so that copies of one segment share its readers.

    Args:
        found: of one step.
        domain: of the reader's node.
        own_target: of the reader's node, which it reads without a network; left out.
        reader: its rank.
    """
    others = sorted((source for source in found if source.target != own_target), key=lambda s: s.target)
    near = [source for source in others if source.domain == domain]
    far = [source for source in others if source.domain != domain]
    return [*_turned(near, reader), *_turned(far, reader)]


def _turned(items: Sequence[Source], by: int) -> list[Source]:
    shift = by % len(items) if items else 0
    return [*items[shift:], *items[:shift]]


def owners(ranks: Iterable[int], nodes: Sequence[PeerNode]) -> Mapping[int, PeerNode]:
    """Return the node of each of ``ranks``, of those that are known."""
    of_rank = {rank: node for node in nodes for rank in node.ranks}
    return {rank: of_rank[rank] for rank in ranks if rank in of_rank}
