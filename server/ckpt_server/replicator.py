"""Sends replicas of what is sealed here to other nodes, beside the upload.

Which nodes: ckpt.plan.placement. What they hold already they say themselves (Greet), so nothing about it is
kept on disk here, and a restart of either side finds out again. A node that is silent for ``peer_lost_s``
counts as lost: the next one in placement order gets its copies.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from ckpt.clock import Clock
from ckpt.errors import CkptError, ConflictError, CorruptError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.plan.placement import Placement, choose_copies, place_replicas
from ckpt.plan.replicas import steps_to_replicate
from ckpt.rpc.bulk import FRAME_NBYTES
from ckpt.rpc.throttle import Throttle
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import replica_pb2, staging_pb2
from ckpt_server.peers import Peers
from ckpt_server.retried import Retried
from ckpt_server.runs import Run, Runs
from ckpt_server.steps import StepRecord, StepTable
from ckpt_server.work import WorkQueue

__all__ = ["Replicator"]

_log = get_logger("server.replicate")
_Status = staging_pb2.StepStatus
_WORKERS = 2  # segments on their way at once per run: one is read while the other waits for the network
_GREET_MOST_S = 10.0
_GREET_LEAST_S = 0.2
# A step is passed over while so many newer ones have no replicas yet: on a link that is too slow for every
# step, newer ones whole are worth more than all of them late.
_PASS_OVER = 2
_PASS_OVER_S = 1.0
# A node without room is asked again after so many times peer_lost_s.
_FULL_FOR = 10

_Segment = tuple[CheckpointId, int]


@dataclass(slots=True)
class _RunState:
    """What the replicator knows of one run; guarded by the replicator's lock, but for what is thread-safe.

    Attributes:
        config: that placement and throttle were made for.
        placement: of this node; None where the run wants no replicas from it.
        queue: segments to send.
        throttle: how fast.
        buddies: who holds the replicas now.
        held: segments by node id, as that node said, or as it was sent.
        wanted: segments that should have replicas.
        begun: steps of which something was sent.
        hopeless: segments that cannot be sent because they are damaged here.
        at_once: do not wait for the end of pauses after failures: another node, or one that is back.
        full_since: monotonic seconds since when a node has had no room, by its id.
        warned: what was said once.
    """

    config: RunConfig
    placement: Placement | None
    queue: WorkQueue
    throttle: Throttle
    buddies: tuple[PeerNode, ...] = ()
    held: dict[str, set[_Segment]] = field(default_factory=dict)
    wanted: set[_Segment] = field(default_factory=set)
    begun: set[CheckpointId] = field(default_factory=set)
    hopeless: set[_Segment] = field(default_factory=set)
    at_once: bool = False
    full_since: dict[str, float] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


class Replicator:
    """Thread-safe. :meth:`scan` is called again and again; all work happens in queues of its own.

    Args:
        staging: of this node.
        runs: known here.
        table: of steps; is told where replicas are.
        peers: the other nodes.
        peer_lost_s: see Settings.
        clock: time.
    """

    def __init__(
        self,
        staging: StagingDir,
        runs: Runs,
        table: StepTable,
        peers: Peers,
        *,
        peer_lost_s: float,
        clock: Clock,
    ) -> None:
        self._staging = staging
        self._runs = runs
        self._table = table
        self._peers = peers
        self._lost_s = peer_lost_s
        self._greet_s = min(_GREET_MOST_S, max(_GREET_LEAST_S, peer_lost_s / 6))
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, _RunState] = {}  # guarded by self._lock
        self._greetings = WorkQueue("greet", workers=4, clock=clock)
        self._sent_bytes = 0  # guarded by self._lock

    @property
    def sent_bytes(self) -> int:
        """Bytes of segments sent to other nodes since the start, repeats included."""
        with self._lock:
            return self._sent_bytes

    def scan(self) -> None:
        """Look at every run and queue what lacks a copy."""
        if self._peers.me is not None:
            for run in self._runs.all():
                self.look(run)

    def look(self, run: Run) -> None:
        """Look at one run; called when something was sealed, so that its replicas begin at once. Never
        raises: nothing that goes on depends on replicas.
        """
        try:
            self._look(run)
        except CkptError as error:
            event(_log, logging.WARNING, "replicate.scan_failed", run=run.key, error=error)

    def _look(self, run: Run) -> None:
        if self._peers.me is None:
            return
        state = self._state(run)
        if state is None:
            return
        records = {record.ident: record for record in self._table.records(run.key)}
        wanted = self._wanted(run, records)
        with self._lock:
            state.wanted = wanted
            state.begun &= {ident for ident, _ in wanted}
        self._choose(run, state)
        with self._lock:
            at_once, state.at_once = state.at_once, False
        for segment in sorted(wanted):
            if self._lacking(state, segment) and (at_once or segment not in state.queue):
                self._queue(run, state, segment)
        for node in state.buddies:
            self._keep_greeting(run, state, node)
        self._tell(run, state, records)

    def close(self, deadline: float) -> bool:
        """Stop sending until ``deadline`` (monotonic); False: something runs on."""
        with self._lock:
            states = list(self._states.values())
        for state in states:
            state.throttle.stop()
        ended = [queue.close(deadline) for queue in (self._greetings, *(s.queue for s in states))]
        return all(ended)

    # --- what and where ---

    def _state(self, run: Run) -> _RunState | None:
        """The run's state, made anew where its nodes or its wishes changed; None: it wants no replicas."""
        config = run.config
        with self._lock:
            state = self._states.get(run.key)
            if state is None and config.replication_factor <= 1:
                return None
            if state is None:
                queue = WorkQueue(f"replicate-{run.key}", workers=_WORKERS, clock=self._clock)
                state = _RunState(config, self._placement(config), queue, self._throttle(config))
                self._states[run.key] = state
            elif state.config != config:
                if state.config.replication_rate != config.replication_rate:
                    state.throttle.stop()
                    state.throttle = self._throttle(config)
                state.config, state.placement, state.warned = config, self._placement(config), set()
            return state if state.placement is not None else None

    def _throttle(self, config: RunConfig) -> Throttle:
        return Throttle(config.replication_rate, largest=FRAME_NBYTES, clock=self._clock)

    def _placement(self, config: RunConfig) -> Placement | None:
        assert self._peers.me is not None
        if config.replication_factor <= 1:
            return None
        placed = place_replicas(config.peers, factor=config.replication_factor, jump=config.replication_jump)
        return placed.get(self._peers.me.node_id)  # None: a run of other nodes, registered from afar

    def _wanted(self, run: Run, records: dict[CheckpointId, StepRecord]) -> set[_Segment]:
        here: dict[CheckpointId, list[int]] = {}
        for ident in self._staging.checkpoints(run.key):
            record = records.get(ident)
            if record is not None and record.group is not None and record.state != _Status.STATE_ABANDONED:
                here[ident] = sorted(record.sealed)
        committed = {ident for ident in here if records[ident].state == _Status.STATE_COMMITTED}
        if self._staging.is_ended(run.key):  # nobody will come back for what the store has
            here = {ident: ranks for ident, ranks in here.items() if ident not in committed}
        steps = steps_to_replicate(here, committed, keep=max(1, run.config.keep_local))
        return {(ident, rank) for ident in steps for rank in here[ident]}

    def _choose(self, run: Run, state: _RunState) -> None:
        """Settle who holds the replicas now; say so where that changes or is not as it should be."""
        assert state.placement is not None
        assert self._peers.me is not None
        factor = state.config.replication_factor
        order = state.placement.order
        lost = self._lost(state, order)
        buddies = tuple(choose_copies(self._peers.me, order, factor=factor, lost=lost))
        with self._lock:
            before, state.buddies = state.buddies, buddies
        for node in before:
            if node not in buddies:
                why = self._peers.failure(node.node_id)
                event(_log, logging.WARNING, "replicate.lost", run=run.key, node=node.host, reason=why)
        if buddies != before:
            with self._lock:
                state.at_once = True
            names = ",".join(node.target or node.host for node in buddies)
            event(_log, logging.INFO, "replicate.nodes", run=run.key, nodes=names)
        if len(buddies) < factor - 1:
            reason = "there are not enough nodes that can be reached for the copies that are wanted"
            self._warn(run, state, reason, copies=len(buddies) + 1)
        elif len({self._peers.me.domain, *(node.domain for node in buddies)}) < factor:
            reason = "copies share a failure domain, since there are not enough domains"
            self._warn(run, state, reason, domains=",".join(sorted({node.domain for node in buddies})))

    def _warn(self, run: Run, state: _RunState, reason: str, **context: object) -> None:
        with self._lock:
            if reason in state.warned:
                return
            state.warned.add(reason)
        factor = state.config.replication_factor
        event(_log, logging.WARNING, "replicate.place", run=run.key, reason=reason, wanted=factor, **context)

    def _lacking(self, state: _RunState, segment: _Segment) -> list[PeerNode]:
        with self._lock:
            if segment in state.hopeless:
                return []
            return [node for node in state.buddies if segment not in state.held.get(node.node_id, set())]

    def _tell(self, run: Run, state: _RunState, records: dict[CheckpointId, StepRecord]) -> None:
        """Show in the table which nodes hold which ranks."""
        with self._lock:
            copies: dict[CheckpointId, dict[int, frozenset[str]]] = {}
            names = {node.node_id: node.target or node.host for node in state.config.peers}
            for node_id, segments in state.held.items():
                if self._peers.silent_s(node_id) <= self._lost_s:
                    for ident, rank in segments:
                        ranks = copies.setdefault(ident, {})
                        ranks[rank] = ranks.get(rank, frozenset()) | {names.get(node_id, node_id)}
            wanted = state.config.replication_factor - 1
        for ident in records:
            self._table.update(run.key, ident, replicas=copies.get(ident, {}), replicas_wanted=wanted)

    # --- the jobs ---

    def _queue(self, run: Run, state: _RunState, segment: _Segment) -> None:
        ident, rank = segment

        def work() -> float | None:
            if segment not in state.wanted:
                return None
            if self._is_passed_over(state, ident):
                return _PASS_OVER_S
            failure: CkptError | None = None
            for node in self._lacking(state, segment):
                try:
                    self._send(run, state, segment, node)
                except CkptError as error:
                    failure = failure or self._judged(state, node, error)
            if failure is not None:
                raise failure
            return None

        def failed(error: CkptError) -> None:
            """Damage or a conflict: another try meets the same. The upload reports what is damaged here."""
            event(_log, logging.ERROR, "replicate.given_up", run=run.key, checkpoint=ident, error=error)
            with self._lock:
                state.hopeless.add(segment)

        job = Retried(work, waiting=lambda error: None, failed=failed)
        state.queue.add(segment, job, priority=(ident.attempt, ident.step, rank))

    def _judged(self, state: _RunState, node: PeerNode, error: CkptError) -> CkptError:
        """Note a node that is full. What may pass is worth another try: also a wrong token, once mended."""
        event(_log, logging.WARNING, "replicate.failed", node=node.host, error=error)
        if error.code == "no-space":
            with self._lock:
                state.full_since.setdefault(node.node_id, self._clock.monotonic())
        if error.retryable or isinstance(error, (CorruptError, ConflictError)):
            return error
        wrapped = UnavailableError("a replica was refused", code=error.code, node=node.host, reason=error)
        wrapped.__cause__ = error
        return wrapped

    def _lost(self, state: _RunState, order: tuple[PeerNode, ...]) -> set[str]:
        """Nodes that do not count now: silent ones, and those without room for longer than a hiccup."""
        now = self._clock.monotonic()
        with self._lock:
            since = state.full_since
            for node_id in [n for n, at in since.items() if now - at > _FULL_FOR * self._lost_s]:
                del since[node_id]
            full = {node_id for node_id, at in since.items() if now - at > self._lost_s}
        return full | {n.node_id for n in order if self._peers.silent_s(n.node_id) > self._lost_s}

    def _is_passed_over(self, state: _RunState, ident: CheckpointId) -> bool:
        with self._lock:
            if ident in state.begun:
                return False
            newer = {
                other
                for other, _ in state.wanted
                if (other.attempt, other.step) > (ident.attempt, ident.step)
            }
        waiting = [o for o in newer if any(self._lacking(state, s) for s in state.wanted if s[0] == o)]
        if len(waiting) < _PASS_OVER:
            with self._lock:
                state.begun.add(ident)
            return False
        return True

    def _send(self, run: Run, state: _RunState, segment: _Segment, node: PeerNode) -> None:
        assert self._peers.me is not None
        ident, rank = segment
        began = self._clock.monotonic()
        sent = self._peers.client(node).send_segment(
            self._staging,
            run.key,
            ident,
            rank,
            config=state.config,
            owner=self._peers.me,
            throttle=state.throttle,
            on_bytes=self._count,
        )
        with self._lock:
            state.held.setdefault(node.node_id, set()).add(segment)
            state.full_since.pop(node.node_id, None)
        event(
            _log,
            logging.INFO,
            "replicate.done",
            run=run.key,
            checkpoint=ident,
            rank=rank,
            node=node.host,
            nbytes=sent,
            elapsed_s=self._clock.monotonic() - began,
        )
        self._tell(run, state, {ident: record} if (record := self._table.get(run.key, ident)) else {})

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._sent_bytes += nbytes

    def _keep_greeting(self, run: Run, state: _RunState, node: PeerNode) -> None:
        key = (run.key, node.node_id)
        said: str | None = None  # why it is silent; None while it answers

        def work() -> float | None:
            nonlocal said
            if node not in state.buddies and self._peers.silent_s(node.node_id) <= self._lost_s:
                return None  # a lost one is asked on: it takes its place again when it is back
            if node not in state.config.peers:
                return None
            # From the table, not the disk: local retention may have removed the folder before this call.
            committed = [r.ident for r in self._table.records(run.key) if r.state == _Status.STATE_COMMITTED]
            try:
                reply = self._peers.greet(
                    node, run.key, committed=committed, ended=self._staging.is_ended(run.key)
                )
            except CkptError as error:
                level = logging.DEBUG if error.code == said else logging.WARNING  # once per reason
                event(_log, level, "replicate.silent", node=node.host, error=error)
                said = error.code
            else:
                self._note_held(state, node, reply)
                with self._lock:
                    state.at_once |= said is not None
                said = None
            return self._greet_s

        if key not in self._greetings:
            self._greetings.add(key, work)

    def _note_held(self, state: _RunState, node: PeerNode, reply: replica_pb2.GreetResponse) -> None:
        held = {(CheckpointId.from_proto(one.id), rank) for one in reply.held for rank in one.ranks}
        with self._lock:
            state.held[node.node_id] = held
