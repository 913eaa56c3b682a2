"""The ladder of a restore: own NVMe, replicas on it, peers, the store; and the newest step it makes whole.

One rank per node tells rank 0 what its node holds, and what nodes outside the job answered; from that, and
from what the store has committed, rank 0 chooses for all (docs/recovery.md).
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from ckpt.clock import SystemClock
from ckpt.collector import collector_paused
from ckpt.errors import CkptError, CorruptError
from ckpt.events import event, get_logger
from ckpt.flusher.write import being_written
from ckpt.format.held import Held, ranks_from_text, ranks_to_text
from ckpt.format.ids import CheckpointId, same_run
from ckpt.format.invariants import layout_digests
from ckpt.format.layout import LayoutSet, merge_layout_sets
from ckpt.format.peer import PeerNode
from ckpt.ops import catalog
from ckpt.ops.attempts import read_run_id
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.holdings import node_holdings, read_held_layout, segment_headers
from ckpt.ops.staged import StagedCheckpoint, prove_staged
from ckpt.ops.tiers import Tier, node_tiers
from ckpt.plan.choice import (
    NodeHoldings,
    Source,
    Standing,
    Stranger,
    nearest_first,
    of_one_life,
    owners,
    sources,
    standings,
)
from ckpt.rpc.access import PeerAccess
from ckpt.storage.base import Store
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2
from ckpt_trainer_hooks.agree import Agreement

if TYPE_CHECKING:
    from ckpt.client.peer import PeerClient

__all__ = ["Choice", "Ladder"]

_log = get_logger("ladder")
M = TypeVar("M", bound=Message)
T = TypeVar("T")
_ASK_S = 3.0
_POLL_S = 0.05
_ASK_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A step to restore, the same on every rank.

    Attributes:
        ident: which.
        is_staged: it is read from nodes alone, since it is not committed.
        sources: nodes that can be asked for its segments.
    """

    ident: CheckpointId
    is_staged: bool
    sources: tuple[Source, ...]


class Ladder:
    """What this rank reads from, and its part in the choice. Every rank makes the same calls.

    Args:
        agreement: between the ranks.
        staging: of this node.
        run_key: the run's folder in it.
        nodes: of the job.
        known: nodes of earlier starts, newest first. Those that are not part of the job are asked what
            they hold.
        is_host: this rank speaks for its node; one rank of each does.
        access: to other nodes' servers.
    """

    def __init__(
        self,
        agreement: Agreement,
        staging: StagingDir,
        run_key: str,
        *,
        nodes: Sequence[PeerNode],
        known: Sequence[PeerNode],
        is_host: bool,
        access: PeerAccess,
    ) -> None:
        self._agreement = agreement
        self._staging = staging
        self._run_key = run_key
        self._nodes = tuple(nodes)
        self._own = next(node for node in nodes if agreement.rank in node.ranks)
        ids = {node.node_id for node in nodes}
        targets = {node.target for node in nodes}
        self._outside = [
            node for node in known if node.node_id not in ids and node.target not in (None, *targets)
        ]
        self._earlier = known[::-1] or nodes  # of two that had a rank, the later one counts
        self._is_host = is_host
        self._access = access
        self._holdings: list[NodeHoldings] = []  # on rank 0, after look()
        self.run_id: str | None = None
        """After :meth:`look`: which life of the run the store has; None: it knows nothing of the run."""
        self.strangers: tuple[Stranger, ...] = ()
        """On rank 0, after :meth:`look`: what nodes hold of other lives of the run; where the store knows
        nothing of the run, that is everything."""
        self.standings: dict[CheckpointId, Standing] = {}
        """On rank 0, after :meth:`look`: where each step stands that some node holds part of."""

    # --- what there is ---

    def look(self, store: Store, wait_s: float) -> None:
        """Tell rank 0 what every node holds; one exchange. Afterwards it can choose.

        What belongs to another life of the run than the store has is left out: the run was deleted and begun
        again, and its ids stand for other steps now.

        Args:
            store: of the run.
            wait_s: how long to wait for flushers, of trainers that died, that are sealing what they have.

        Raises:
            TimeoutExceededError: a rank did not take part.
            UnavailableError: the store cannot be reached.
        """
        mine: list[Any] | None = None
        if self._is_host:
            self._wait_for_flushers(wait_s)
            own = NodeHoldings(node=self._own, in_job=True, held=tuple(self._own_holdings()))
            mine = [_to_json(item) for item in (own, *self._ask_outside())]

        def keep(told: list[Any]) -> str | None:
            run_id = read_run_id(store)
            found = [_from_json(item) for items in told if items for item in items]
            self._holdings, self.strangers = of_one_life(found, run_id)
            self.standings = standings(self._holdings)
            self._report_strangers(run_id)
            return run_id

        self.run_id = self._agreement.decide_over("holdings", mine, keep)

    def _report_strangers(self, run_id: str | None) -> None:
        for stranger in self.strangers:
            event(
                _log,
                logging.WARNING,
                "restore.other_life",
                reason="a node holds segments of another life of this run, which was deleted and begun "
                "again, or of another store with the same URL; they are not used",
                checkpoint=stranger.ident,
                host=stranger.host,
                run_id=stranger.run_id or "unknown",
                expected=run_id or "nothing is in the store",
            )

    def _wait_for_flushers(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        told = 0
        try:
            while unfinished := being_written(self._staging, self._run_key):
                if time.monotonic() >= deadline:
                    event(_log, logging.WARNING, "ladder.still_sealing", paths=unfinished, waited_s=wait_s)
                    return
                if len(unfinished) != told:
                    told = len(unfinished)
                    event(_log, logging.INFO, "ladder.waiting_for_seal", segments=told)
                time.sleep(_POLL_S)
        except CkptError as error:
            event(_log, logging.WARNING, "ladder.own_holdings", staging=self._staging.path, error=error)

    def _own_holdings(self) -> list[Held]:
        try:
            return node_holdings(self._staging, self._run_key)
        except CkptError as error:  # a disk that fails must not end the restore: other nodes have copies
            event(_log, logging.WARNING, "ladder.own_holdings", staging=self._staging.path, error=error)
            return []

    def _ask_outside(self) -> list[NodeHoldings]:
        """What nodes that are not part of the job hold; those that do not answer in time hold nothing."""
        told = self._ask(self._outside, lambda client: client.have(self._run_key, timeout_s=_ASK_S))
        return [
            NodeHoldings(node=node, in_job=False, held=tuple(Held.from_proto(item) for item in held))
            for node, held in told
        ]

    def _ask(
        self, nodes: Sequence[PeerNode], question: Callable[[PeerClient], T]
    ) -> list[tuple[PeerNode, T]]:
        """The answers of those that answer."""

        def ask(node: PeerNode) -> tuple[PeerNode, T] | None:
            assert node.target is not None
            try:
                with self._client(node.target) as client:
                    return node, question(client)
            except CkptError as error:
                event(_log, logging.INFO, "ladder.silent", host=node.host, target=node.target, error=error)
                return None

        if not nodes:
            return []
        with ThreadPoolExecutor(min(_ASK_AT_ONCE, len(nodes)), "ckpt-ask") as pool:
            return [found for found in pool.map(ask, nodes) if found is not None]

    def usable(self) -> list[CheckpointId]:
        """On rank 0: steps that are not committed, as far as known, and can be read from nodes alone."""
        return [ident for ident, standing in self.standings.items() if standing.is_usable]

    # --- the choice ---

    def candidates(self, store: Store) -> Iterator[Choice | None]:
        """Yield what to restore, best first, on all ranks alike; the first may be None: there is nothing."""
        line = catalog.candidates(store, self.usable()) if self._agreement.rank == 0 else iter(())
        is_first = True
        while True:
            told = self._agreement.decide("candidate", lambda: self._describe(store, next(line, None)))
            if told is None and not is_first:
                return
            yield _choice(told)
            is_first = False

    def named(self, store: Store, text: str) -> Choice:
        """Return what ``text`` names, on all ranks alike. Raises NotFoundError, InvalidInputError."""

        def on_rank_0() -> Any:
            return self._describe(store, catalog.resolve(store, text, self.usable()))

        found = _choice(self._agreement.decide("resolve", on_rank_0))
        assert found is not None
        return found

    def _describe(self, store: Store, ident: CheckpointId | None) -> Any:
        """On rank 0: what the others need to know of a candidate."""
        if ident is None:
            return None
        standing = self.standings.get(ident)
        is_staged = standing is not None and standing.is_usable and not catalog.exists(store, ident)
        found = [
            [source.target, source.domain, ranks_to_text(source.ranks)]
            for source in sources(self._holdings, ident)
        ]
        return [str(ident), is_staged, found]

    def report_losses(self, store: Store, chosen: CheckpointId | None) -> None:
        """On rank 0: warn of each newer step of the current line that is not whole any more.

        Args:
            store: of the run.
            chosen: what is restored instead.
        """
        lost = {
            ident: standing.missing
            for ident, standing in self.standings.items()
            if standing.missing and not standing.is_committed and _is_newer(ident, chosen)
        }
        for gone in catalog.awaited_parents(store):
            if gone not in self.standings and _is_newer(gone, chosen):
                lost[gone] = ()
        for ident, missing in sorted(lost.items()):
            if not catalog.is_on_line(store, ident):
                continue
            nodes = owners(missing, self._earlier)
            names = sorted({f"{node.host} ({node.domain})" for node in nodes.values()})
            event(
                _log,
                logging.WARNING,
                "restore.step_lost",
                checkpoint=ident,
                reason="it was not committed, and of these ranks no node that answers has a copy: they never "
                "sealed it, or their node is lost and so are its replicas",
                ranks=ranks_to_text(missing) or "all",
                nodes=", ".join(names) or "unknown",
                restored=chosen or "nothing",
            )

    # --- reading ---

    @collector_paused()
    def open(self, store: Store, choice: Choice) -> Checkpoint:
        """Return a staged step, on every rank, after rank 0 has proved for all that it is whole.

        Raises:
            CorruptError: its parts do not make a step; on every rank.
        """
        mine = [_encode(header) for header in self._own_headers(choice.ident)] if self._is_host else []
        read: dict[bytes, LayoutSet] = {}  # on rank 0 the proof has read those that all ranks need

        def layout(key: bytes, rank: int) -> LayoutSet:
            if key not in read:
                read[key] = self._layout(choice, key, rank)
            return read[key]

        def prove(told: list[Any]) -> Any:
            headers = [_decode(disk_pb2.GroupHeader(), item) for items in told for item in items]
            headers += self._headers_outside(choice.ident)
            rank_with = {header.segments[0].layout_digest: header.segments[0].rank for header in headers}
            manifest, summaries = prove_staged(
                choice.ident,
                headers,
                lambda key: layout(key, rank_with[key]),
                SystemClock(),
            )
            used = [[key.hex(), rank_with[key]] for key in layout_digests(summaries)]
            return [_encode(manifest), used]

        encoded, used = self._agreement.decide_over("proof", mine, prove)
        manifest = _decode(disk_pb2.Manifest(), encoded)
        with self._agreement.together("layouts"):
            layouts = merge_layout_sets(layout(bytes.fromhex(key), rank) for key, rank in used)
            if layouts.digest != manifest.layout_digest:
                raise CorruptError("layouts changed while they were read", checkpoint=choice.ident)
        return StagedCheckpoint(store, manifest, layouts)

    def _own_headers(self, ident: CheckpointId) -> list[disk_pb2.GroupHeader]:
        """Of the segments that this node holds."""
        try:
            found = list(segment_headers(self._staging, self._run_key, ident))
            return [header for header in found if same_run(header.run_id, self.run_id or "")]
        except CkptError as error:
            event(_log, logging.WARNING, "ladder.own_holdings", staging=self._staging.path, error=error)
            return []

    def _headers_outside(self, ident: CheckpointId) -> list[disk_pb2.GroupHeader]:
        """On rank 0: of the segments that nodes outside the job hold."""
        outside = [item.node for item in self._holdings if not item.in_job and _has(item, ident)]
        told = self._ask(
            list({node.target: node for node in outside}.values()),
            lambda client: client.have(self._run_key, ident, with_headers=True, timeout_s=_ASK_S),
        )
        return [
            segment.header
            for _, held in told
            for item in held
            for segment in item.segments
            if segment.HasField("header") and same_run(segment.header.run_id, self.run_id or "")
        ]

    def _layout(self, choice: Choice, layout_digest: bytes, rank: int) -> LayoutSet:
        """The layout set of a digest, from this node or from one that has the segment of ``rank``."""
        problem: CkptError | None = None
        try:
            return LayoutSet.decode(read_held_layout(self._staging, self._run_key, layout_digest))
        except CkptError as error:
            problem = error
        for source in self._nearest(choice):
            if rank not in source.ranks:
                continue
            try:
                with self._client(source.target) as client:
                    found = client.segment_layouts(self._run_key, choice.ident, rank)
            except CkptError as error:
                problem = error
                continue
            if found.digest == layout_digest:
                return found
        raise CorruptError(
            "no node that answers has a layout of the step",
            code="layout-missing",
            checkpoint=choice.ident,
            layout=layout_digest.hex(),
            cause=problem,
        )

    def tiers(self, choice: Choice, stack: ExitStack) -> list[Tier]:
        """Return what this rank reads ``choice`` from before the store, nearest first; ``stack`` closes."""
        found: list[Tier] = [*node_tiers(self._staging, self._run_key)]
        for source in self._nearest(choice):
            from ckpt.client.peer_tier import PeerTier  # see _client

            tier = PeerTier(source.target, self._run_key, choice.ident, source.ranks, access=self._access)
            stack.callback(tier.close)
            found.append(tier)
        return found

    def _nearest(self, choice: Choice) -> list[Source]:
        return nearest_first(
            choice.sources,
            domain=self._own.domain,
            own_target=self._own.target,
            reader=self._agreement.rank,
        )

    def _client(self, target: str) -> PeerClient:
        # gRPC is loaded only where there are peers: most trainers have none.
        from ckpt.client.peer import PeerClient

        return PeerClient(target, token=self._access.token, ca=self._access.ca)


def _is_newer(ident: CheckpointId, chosen: CheckpointId | None) -> bool:
    return chosen is None or (ident.attempt, ident.step) > (chosen.attempt, chosen.step)


def _choice(told: Any) -> Choice | None:
    if told is None:
        return None
    text, is_staged, found = told
    return Choice(
        ident=CheckpointId.parse(text),
        is_staged=is_staged,
        sources=tuple(
            Source(target=target, domain=domain, ranks=ranks_from_text(ranks))
            for target, domain, ranks in found
        ),
    )


def _has(holdings: NodeHoldings, ident: CheckpointId) -> bool:
    return any(held.ident == ident for held in holdings.held)


def _encode(message: Message) -> str:
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode()


def _decode(message: M, text: str) -> M:
    message.ParseFromString(base64.b64decode(text))
    return message


def _to_json(holdings: NodeHoldings) -> Any:
    return [holdings.node.to_json(), holdings.in_job, [held.to_json() for held in holdings.held]]


def _from_json(body: Any) -> NodeHoldings:
    node, in_job, held = body
    return NodeHoldings(
        node=PeerNode.from_json(node), in_job=in_job, held=tuple(Held.from_json(item) for item in held)
    )
