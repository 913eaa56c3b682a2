"""Looks after the replicas that are held here: which are committed, which may go, which must be adopted.

Adoption: when a node is gone, those that hold replicas of its uncommitted steps upload them, publish its
group index and commit in its place. Several may do so at once: the same bytes under the same keys, and one
manifest.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

from ckpt.clock import Clock
from ckpt.errors import CkptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.plan.replicas import HeldReplica, replicas_to_drop
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_server.adopter import Adopter
from ckpt_server.peers import Peers
from ckpt_server.replica_dir import ReplicaDir, ReplicaUnit
from ckpt_server.retention import overtaken
from ckpt_server.settings import Settings
from ckpt_server.work import WorkQueue

__all__ = ["ReplicaKeeper"]

_log = get_logger("server.replicas")
_GREET_MOST_S = 10.0
_GREET_LEAST_S = 0.2
_ASK_EVERY_S = 60.0
_MISSED = 3  # greetings without an answer that say that a node is gone, where the run goes on without it


class ReplicaKeeper:
    """Thread-safe. :meth:`scan` is called again and again; calls to other nodes happen in a queue.

    Args:
        staging: of this node; its run.json says which nodes a run has now.
        replicas: what is held.
        peers: the other nodes.
        adopter: commits in the place of a node that is gone.
        settings: of the server.
        clock: time.
    """

    def __init__(
        self,
        staging: StagingDir,
        replicas: ReplicaDir,
        peers: Peers,
        adopter: Adopter,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._staging = staging
        self._replicas = replicas
        self._peers = peers
        self._adopter = adopter
        self._settings = settings
        self._clock = clock
        wanted_s = max(_GREET_LEAST_S, settings.peer_lost_s / 6, 2 * settings.scan_interval_s)
        self._greet_s = min(_GREET_MOST_S, wanted_s)
        self._greetings = WorkQueue("owners", workers=2, clock=clock)
        self._scanning = threading.Lock()  # one scan at a time: two would delete the same files
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, CheckpointId], float] = {}  # only within a scan
        self._ended: set[str] = set()  # guarded by self._lock; runs that ended, as their nodes said
        self._owners: dict[tuple[str, str], PeerNode] = {}  # guarded by self._lock; owed to us a sign of life

    def greeted(self, run_key: str, committed: Iterable[CheckpointId], ended: bool) -> None:
        """A node has told which of its steps are committed, and whether the run has ended in order there."""
        files = self._replicas.files
        here = set(files.checkpoints(run_key))
        for ident in committed:
            if ident in here and not files.is_committed(run_key, ident):
                files.mark_committed(run_key, ident)
        with self._lock:
            (self._ended.add if ended else self._ended.discard)(run_key)

    def scan(self) -> None:
        """Look at every replica: note commits, drop what is not needed, adopt what is orphaned."""
        with self._scanning:
            for run_key in self._replicas.files.run_keys():
                try:
                    self._look(run_key)
                except CkptError as error:
                    event(_log, logging.WARNING, "replicas.scan_failed", run=run_key, error=error)

    def make_room(self) -> None:
        """Drop every replica of a committed step: the store has it, and room is short."""
        with self._scanning:
            for run_key in self._replicas.files.run_keys():
                for unit in self._replicas.units(run_key):
                    if self._replicas.files.is_committed(run_key, unit.ident):
                        self._drop(run_key, unit, "room is short")

    @property
    def has_uncommitted(self) -> bool:
        """Whether this node holds whole replicas of a step that is not known to be committed."""
        files = self._replicas.files
        return any(
            unit.is_whole and not files.is_committed(run_key, unit.ident)
            for run_key in files.run_keys()
            for unit in self._replicas.units(run_key)
        )

    @property
    def has_work(self) -> bool:
        """Whether an adoption is under way."""
        return self._adopter.has_work

    def is_needed(self) -> bool:
        """Whether another node may still want what is held here: not where its run has ended in order."""
        with self._lock:
            ended = set(self._ended)
        return any(
            run_key not in ended and not self._staging.is_ended(run_key)
            for run_key in self._replicas.files.run_keys()
        )

    def close(self, deadline: float) -> bool:
        """Stop until ``deadline`` (monotonic); False: something still runs."""
        ended = [self._greetings.close(deadline), self._adopter.close(deadline)]
        return all(ended)

    # --- one run ---

    def _look(self, run_key: str) -> None:
        units = self._replicas.units(run_key)
        self._note_commits(run_key, units)
        current = self._current(run_key)
        for unit in units:
            if self._replicas.files.is_committed(run_key, unit.ident):
                continue
            self._keep_greeting(run_key, unit.owner)
            if unit.is_whole and (reason := self._orphaned(unit, current)) is not None:
                self._adopter.adopt(run_key, unit, reason=reason)
        self._retain(run_key, units, current or set())

    def _note_commits(self, run_key: str, units: Iterable[ReplicaUnit]) -> None:
        """What this node's own part of the step says; owners tell the rest when they greet."""
        files = self._replicas.files
        for ident in {unit.ident for unit in units}:
            if not files.is_committed(run_key, ident) and self._staging.is_committed(run_key, ident):
                files.mark_committed(run_key, ident)

    def _ask_store(self, run_key: str, units: list[ReplicaUnit], committed: list[CheckpointId]) -> None:
        """Overtaken steps are most likely committed too; their owner may have died before it said so."""
        now = self._clock.monotonic()
        for ident in {unit.ident for unit in units if unit.ident not in committed}:
            key = (run_key, ident)
            if overtaken(ident, committed) and now - self._asked.get(key, -math.inf) > _ASK_EVERY_S:
                self._asked[key] = now
                self._adopter.ask_store(run_key, ident)

    def _current(self, run_key: str) -> set[str] | None:
        """Ids of the run's nodes as of its newest start; None where this node takes no part in that."""
        try:
            config: RunConfig = self._staging.read_run_config(run_key)
        except NotFoundError:
            return None
        nodes = {node.node_id for node in config.peers}
        return nodes if self._peers.me is not None and self._peers.me.node_id in nodes else None

    def _orphaned(self, unit: ReplicaUnit, current: set[str] | None) -> str | None:
        """Why the owner will not commit this itself; None while it may."""
        silent_s = self._peers.silent_s(unit.owner.node_id, calls_count=True)
        if current is not None and unit.owner.node_id not in current and silent_s > _MISSED * self._greet_s:
            return "the run goes on without its node, which does not answer"
        if silent_s > self._settings.adopt_after_s:
            return f"its node has been silent for {silent_s:.0f} s"
        return None

    def _retain(self, run_key: str, units: list[ReplicaUnit], current: set[str]) -> None:
        files = self._replicas.files
        committed = [i for i in {unit.ident for unit in units} if files.is_committed(run_key, i)]
        try:
            own = self._staging.checkpoints(run_key)
            keep = max(1, files.read_run_config(run_key).keep_local)
        except NotFoundError:
            return
        known = {*committed, *(i for i in own if self._staging.is_committed(run_key, i))}
        held = {
            (unit.ident, unit.group.index): HeldReplica(
                ident=unit.ident,
                group=unit.group.index,
                owner=unit.owner.node_id,
                committed=unit.ident in committed,
                whole=unit.is_whole,
                given_up=unit.ident not in committed and self._is_dead(run_key, unit, list(known)),
            )
            for unit in units
        }
        self._ask_store(run_key, units, list(known))
        by_key = {(unit.ident, unit.group.index): unit for unit in units}
        for one in replicas_to_drop(list(held.values()), keep=keep, current=current):
            reason = "can never be committed" if one.given_up else "newer ones are held"
            self._drop(run_key, by_key[one.ident, one.group], reason)

    def _is_dead(self, run_key: str, unit: ReplicaUnit, committed: list[CheckpointId]) -> bool:
        """Not committed, overtaken for long, and not the last copy: the owner has its own, or all that this
        node could do for it is in the store, or it is not whole.
        """
        old = unit.noted_at < self._clock.now() - self._settings.abandon_grace_s
        if not old or not overtaken(unit.ident, committed):
            return False
        if not unit.is_whole:
            return True
        owner = unit.owner.node_id
        alive = self._peers.silent_s(owner, calls_count=True) <= self._settings.peer_lost_s
        return alive or self._adopter.is_published(run_key, unit)

    def _drop(self, run_key: str, unit: ReplicaUnit, reason: str) -> None:
        self._replicas.remove(run_key, unit)
        self._asked.pop((run_key, unit.ident), None)
        event(
            _log,
            logging.INFO,
            "replicas.dropped",
            run=run_key,
            checkpoint=unit.ident,
            group=unit.group.index,
            owner=unit.owner.host,
            reason=reason,
        )

    def _keep_greeting(self, run_key: str, owner: PeerNode) -> None:
        """Ask the owner for signs of life while something of it here is not committed."""
        key = (run_key, owner.node_id)
        with self._lock:
            self._owners[key] = owner
        if key in self._greetings:
            return

        def work() -> float | None:
            with self._lock:
                owner = self._owners.pop(key, None)  # put back by every scan for as long as it is needed
            if owner is None:
                return None
            try:
                self._peers.greet(owner, run_key)
            except CkptError as error:
                event(_log, logging.DEBUG, "replicas.owner_silent", owner=owner.host, error=error)
            return self._greet_s

        self._greetings.add(key, work)
