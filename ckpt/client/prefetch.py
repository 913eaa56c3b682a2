"""Bring segments to a node before its ranks start, so that their restore finds them on its own NVMe.

They become replicas there (``<staging>/replicas``), through the node's own server, as if another node had
sent them: it checks every chunk, keeps to its quota, and drops them when newer steps are held. What was
fetched counts chunk by chunk, so that a prefetch may be cut off anywhere and repeated; and a restore that
comes while it runs finds the sealed segments and reads the others from where this reads them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from threading import Lock

from ckpt.client.peer import PeerClient
from ckpt.client.peer_tier import PeerTier
from ckpt.client.replica import ReplicaClient
from ckpt.digest import DIGEST_NBYTES
from ckpt.errors import CkptError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.format.envelope import Kind, open_envelope, open_message, seal_message
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.format.segment import chunk_range
from ckpt.ops import catalog
from ckpt.ops.attempts import read_run_id
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.fetch import read_verified_chunk
from ckpt.ops.holdings import node_holdings
from ckpt.ops.tiers import PEER, REMOTE
from ckpt.plan.choice import NodeHoldings, of_one_life, standings
from ckpt.plan.share import saved_ranks_for
from ckpt.rpc.access import PeerAccess
from ckpt.storage.base import Store
from ckpt.storage.known_nodes import known_nodes
from ckpt.storage.open import open_store
from ckpt.storage.peerfile import read_peer_file
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import disk_pb2, replica_pb2

__all__ = ["Prefetched", "prefetch"]

_log = get_logger("prefetch")
_AT_ONCE = 4  # segments; of each one chunk is in memory
_ASK_S = 5.0
_ROUNDS = 3  # how often a chunk is sent that the server finds damaged
_STORE = PeerNode(node_id="0" * 16, target=None, domain="store", host="the object store")


@dataclass(slots=True, kw_only=True)
class Prefetched:
    """What was done.

    Attributes:
        ident: the step that a restore would take now.
        ranks: that were wanted.
        here: of them those whose segments were on this node already.
        missing: of them those that could not be had, and why.
        nbytes: fetched, by tier.
        silent: addresses of nodes that did not answer, and why.
    """

    ident: CheckpointId
    ranks: tuple[int, ...]
    here: tuple[int, ...] = ()
    missing: dict[int, CkptError] = field(default_factory=dict)
    nbytes: Counter[str] = field(default_factory=Counter)
    silent: dict[str, CkptError] = field(default_factory=dict)


def prefetch(
    url: str,
    options: Mapping[str, str],
    staging: StagingDir,
    *,
    peers: Collection[str] = (),
    access: PeerAccess | None = None,
    wanted: str = "latest",
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
) -> Prefetched:
    """Fetch the segments of ``ranks`` to the node of a staging directory, from peers or else the store.

    Args:
        url: of the run.
        options: of the store.
        staging: of this node, whose server must be running and listen for peers.
        peers: addresses of other nodes' servers, beside those that this node knows of the run and CKPT_PEERS.
        access: to them.
        wanted: a step, or "latest", also one that is not committed but whole on nodes.
        ranks: of the saved step; None: all.
        world_size: then ``ranks`` are those that this node will have in a start with so many ranks, and what
            is fetched is what they mostly need: see :func:`ckpt.plan.share.saved_ranks_for`.

    Raises:
        UnavailableError: this node has no server that listens for peers, or the store cannot be reached.
        NotFoundError: there is nothing to restore.
        InvalidInputError: the step, or the coming start, has no such ranks.
    """
    run_key = keys.run_key(url)
    access = access or PeerAccess.from_environment()
    me = read_peer_file(staging)
    if me is None:
        raise UnavailableError(
            "this node has no server that takes replicas: start `ckpt serve --peer-listen HOST:PORT` first",
            code="no-peers",
            staging=staging.path,
        )
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(url, options)))
        own = stack.enter_context(ReplicaClient(staging.socket_target()))
        job = _Prefetch(
            store=store,
            own=own,
            me=me,
            access=access,
            run_key=run_key,
            config=RunConfig(url=url, store_options=dict(options)),
        )
        known = [node.target for node in known_nodes(staging, run_key) if node.target]
        targets = [target for target in dict.fromkeys([*peers, *known]) if target != me.target]
        job.ask(targets)
        mine = node_holdings(staging, run_key)
        result = job.choose(wanted, mine, ranks, world_size)
        job.fetch(result, stack)
    return result


@dataclass(slots=True, kw_only=True)
class _Prefetch:
    """One prefetch under way.

    Attributes:
        own: this node's server.
        me: this node.
        holdings: of the nodes that answer.
    """

    store: Store
    own: ReplicaClient
    me: PeerNode
    access: PeerAccess
    run_key: str
    config: RunConfig
    holdings: list[NodeHoldings] = field(default_factory=list)
    silent: dict[str, CkptError] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def ask(self, targets: Sequence[str]) -> None:
        """Learn who is at ``targets`` and what they hold; those that do not answer hold nothing."""
        with ThreadPoolExecutor(max(1, len(targets)), "ckpt-ask") as pool:
            list(pool.map(self._ask_one, targets))

    def _ask_one(self, target: str) -> None:
        access = {"token": self.access.token, "ca": self.access.ca}
        try:
            with (
                ReplicaClient(target, timeout_s=_ASK_S, **access) as replica,  # type: ignore[arg-type]
                PeerClient(target, timeout_s=_ASK_S, **access) as peer,  # type: ignore[arg-type]
            ):
                node = PeerNode.from_proto(replica.greet(self.run_key, self.me).node)
                held = tuple(Held.from_proto(item) for item in peer.have(self.run_key))
        except CkptError as error:
            event(_log, logging.INFO, "prefetch.silent", target=target, error=error)
            with self._lock:
                self.silent[target] = error
            return
        with self._lock:
            self.holdings.append(NodeHoldings(node=node, in_job=False, held=held))

    def choose(
        self, wanted: str, mine: Sequence[Held], ranks: Sequence[int] | None, world_size: int | None
    ) -> Prefetched:
        """Choose as a restore would."""
        own = NodeHoldings(node=self.me, in_job=True, held=tuple(mine))
        nodes, strangers = of_one_life([own, *self.holdings], read_run_id(self.store))
        for stranger in strangers:
            event(_log, logging.WARNING, "prefetch.other_life", checkpoint=stranger.ident, host=stranger.host)
        mine, self.holdings = nodes[0].held, nodes[1:]
        found = standings(nodes)
        usable = [ident for ident, standing in found.items() if standing.is_usable]
        if wanted == "latest":
            ident = next(catalog.candidates(self.store, usable), None)
            if ident is None:
                raise NotFoundError("there is nothing to prefetch", code="no-checkpoint", url=self.config.url)
        else:
            ident = catalog.resolve(self.store, wanted, usable)
        if ident in found:
            world = found[ident].world_size
        else:
            world = catalog.read_manifest(self.store, ident).world_size
        if world_size is not None and ranks is not None:
            ranks = saved_ranks_for(ranks, world_size=world_size, saved_world_size=world)
        chosen = tuple(range(world)) if ranks is None else tuple(sorted(set(ranks)))
        if chosen and not 0 <= chosen[0] <= chosen[-1] < world:
            raise InvalidInputError(
                "the step has no such ranks", checkpoint=ident, ranks=chosen, world_size=world
            )
        held_here = {rank for held in mine if held.ident == ident for rank in held.ranks}
        here = tuple(rank for rank in chosen if rank in held_here)
        return Prefetched(ident=ident, ranks=chosen, here=here, silent=self.silent)

    def fetch(self, result: Prefetched, stack: ExitStack) -> None:
        """Fetch what is not here; a segment that cannot be had is no reason to give up the others."""
        committed = catalog.exists(self.store, result.ident)
        checkpoint = catalog.load_checkpoint(self.store, result.ident) if committed else None
        sources = []
        for item in self.holdings:
            ranks = [rank for held in item.held if held.ident == result.ident for rank in held.ranks]
            assert item.node.target is not None
            tier = PeerTier(item.node.target, self.run_key, result.ident, ranks, access=self.access)
            stack.callback(tier.close)
            sources.append(_Source(item.node, frozenset(ranks), tier))

        def work(rank: int) -> None:
            try:
                self._fetch_one(result, rank, checkpoint, sources)
            except UnavailableError:
                raise  # this node's server or the store; the others fail alike
            except CkptError as error:
                event(_log, logging.WARNING, "prefetch.missing", rank=rank, error=error)
                result.missing[rank] = error

        lacking = [rank for rank in result.ranks if rank not in result.here]
        with ThreadPoolExecutor(_AT_ONCE, "ckpt-prefetch") as pool:
            list(pool.map(work, lacking))
        if committed:
            self.own.greet(self.run_key, _STORE, committed=[result.ident])

    def _fetch_one(
        self,
        result: Prefetched,
        rank: int,
        checkpoint: Checkpoint | None,
        sources: Sequence[_Source],
    ) -> None:
        having = [source for source in sources if rank in source.ranks]
        owner, data, layout = self._described(result.ident, rank, checkpoint, having)
        index = open_message(Kind.SEGMENT_INDEX, data, disk_pb2.SegmentIndex(), where=owner.host)
        offer = replica_pb2.OfferRequest(
            config=self.config.to_proto(),
            owner=owner.to_proto(),
            id=result.ident.to_proto(),
            rank=rank,
            index=data,
            layout=layout,
        )
        lacking, rounds = self.own.offer(offer), 0
        while lacking:
            chunk = lacking[0]
            tier, raw = self._read(result.ident, rank, index, chunk, checkpoint, having)
            try:
                lacking = self.own.send_chunk(self.run_key, result.ident, rank, chunk, raw)
            except CorruptError:
                rounds += 1
                if rounds >= _ROUNDS:
                    raise
                continue
            with self._lock:
                result.nbytes[tier] += len(raw)

    def _described(
        self,
        ident: CheckpointId,
        rank: int,
        checkpoint: Checkpoint | None,
        having: Sequence[_Source],
    ) -> tuple[PeerNode, bytes, bytes]:
        """(whose replica it will be, index file, layout set) of a segment, from the first that has it."""
        for source in having:
            assert source.node.target is not None
            try:
                with PeerClient(source.node.target, token=self.access.token, ca=self.access.ca) as client:
                    return (source.node, *client.sealed_segment(self.run_key, ident, rank))
            except CkptError as error:
                event(_log, logging.WARNING, "prefetch.peer", target=source.node.target, error=error)
        if checkpoint is None:
            raise NotFoundError("no node that answers has this segment", checkpoint=ident, rank=rank)
        index = disk_pb2.SegmentIndex()
        index.CopyFrom(checkpoint.segment_index(rank))
        table = disk_pb2.ChunkTable(chunk_nbytes=index.chunks.chunk_nbytes, digests=index.chunks.digests)
        index.chunks.CopyFrom(table)  # as it was sealed: raw, in one file
        key = keys.layout_key(index.layout_digest)
        layout = bytes(open_envelope(Kind.LAYOUT_SET, self.store.get(key), where=key))
        return _STORE, seal_message(Kind.SEGMENT_INDEX, index), layout

    def _read(
        self,
        ident: CheckpointId,
        rank: int,
        index: disk_pb2.SegmentIndex,
        chunk: int,
        checkpoint: Checkpoint | None,
        having: Sequence[_Source],
    ) -> tuple[str, memoryview]:
        """(tier, raw bytes) of a chunk, verified."""
        start, stop = chunk_range(chunk, index.nbytes, index.chunks.chunk_nbytes)
        raw = memoryview(bytearray(stop - start))
        for tier in _tiers(having):
            try:
                found = tier.read_into([raw], ident, rank, start)
            except CkptError:
                continue  # counted and reported there
            if found == index.chunks.digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES]:
                return PEER, raw
            event(
                _log, logging.WARNING, "fetch.bad_copy", tier=PEER, checkpoint=ident, rank=rank, chunk=chunk
            )
        if checkpoint is None:
            raise CorruptError("no good copy of a chunk is left", checkpoint=ident, rank=rank, chunk=chunk)
        return REMOTE, memoryview(read_verified_chunk(checkpoint, rank, chunk))


@dataclass(frozen=True, slots=True)
class _Source:
    """A node that holds segments of the step."""

    node: PeerNode
    ranks: frozenset[int]
    tier: PeerTier


def _tiers(having: Sequence[_Source]) -> Iterator[PeerTier]:
    return (source.tier for source in having)
