"""One rank's save path: flatten, plan, arena, capture, hand over to the flusher, follow the outcome."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckpt.clock import SystemClock
from ckpt.collector import collector_paused
from ckpt.errors import CkptError, SnapshotTornError, UnavailableError, from_kind
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt_proto.v1 import common_pb2, disk_pb2, flusher_pb2
from ckpt_trainer_hooks.arena import Arena, arena_nbytes
from ckpt_trainer_hooks.audit import Audit
from ckpt_trainer_hooks.capture import Capture
from ckpt_trainer_hooks.environment import environment
from ckpt_trainer_hooks.flusher_process import FlusherProcess
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.leaves import FlatState
from ckpt_trainer_hooks.liveness import Pulse
from ckpt_trainer_hooks.pinned import pin, unpin
from ckpt_trainer_hooks.selftest import SelfTest
from ckpt_trainer_hooks.snapshot import Binding, Copies, SnapshotPlan, plan_snapshot
from ckpt_trainer_hooks.state import TrainState

__all__ = ["Origin", "SavePipeline"]

_log = get_logger("save")
_MOST_UNREPLICATED = 16
_TAIL_SLACK = 1 << 20  # room for values that grow from save to save, so that the arena need not


@dataclass(frozen=True, slots=True)
class Origin:
    """What every segment index says about where it comes from."""

    run: str
    run_id: str
    rank: int
    world_size: int
    attempt: int
    parent: CheckpointId | None
    group: common_pb2.NodeGroup


class SavePipeline:
    """Owns the arena, the capture thread and the flusher of one rank.

    All public methods are for the training thread; events arrive on the flusher's reader thread.

    Args:
        state: what to save.
        rank: global rank.
        staging: staging directory of the node.
        run_key: the run's folder in it.
        server: gRPC target of the staging server.
        starts_server: the flusher starts an embedded server whenever none answers.
        selftest: read every sealed segment back; see ckpt_trainer_hooks.selftest.
        pulse: shown to the flusher.
        replicates: other nodes are to hold replicas; handles tell when they do.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        rank: int,
        staging: Path,
        run_key: str,
        server: str,
        starts_server: bool,
        selftest: bool = False,
        pulse: Pulse | None = None,
        replicates: bool = False,
    ) -> None:
        self._state = state
        self._rank = rank
        self._start_flusher: Callable[[], FlusherProcess] = lambda: FlusherProcess(
            staging=staging,
            run_key=run_key,
            server=server,
            on_event=self._on_event,
            on_death=self._on_flusher_death,
            starts_server=starts_server,
            pulse=None if pulse is None else pulse.fds,
        )
        self._selftest = SelfTest(staging, run_key, rank, self._fail) if selftest else None
        self._lock = threading.Lock()
        self._handles: dict[int, SaveHandle] = {}  # guarded by self._lock; by sequence
        # Committed saves whose replicas are still under way, the last few; guarded by self._lock.
        self._unreplicated: dict[int, SaveHandle] = {}
        self._replicates = replicates
        self._problems: list[CkptError] = []  # guarded by self._lock
        self._flusher_alive = True  # guarded by self._lock
        self._sequence = 0
        self._plan: SnapshotPlan | None = None
        self._binding: Binding | None = None
        self._arena: Arena | None = None
        self._unannounced: UnavailableError | None = None  # why the flusher does not know the arena
        self._arena_free: Future[None] | None = None  # completion of the flush that reads the arena
        self._capture: Capture | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="ckpt-capture")
        self._prefault: Future[Arena] | None = None
        self._prefault_nbytes = 0  # what was asked for
        self._bound_ahead: Future[Binding] | None = None  # to the arena of _prefault
        self.retake_wanted = False
        self._flusher = self._start_flusher()

    @collector_paused()
    def prepare(self) -> None:
        """Plan for the state as it is now and pre-fault an arena for it in the background.

        Copying into untouched memory is 8 times slower; this makes the first save as fast as later ones.
        """
        flat = self._state.flatten()
        plan = self._plan_for(flat)
        needed = self._arena_nbytes(plan, flat.values.ByteSize() + flat.rank_values.ByteSize())
        if self._arena is not None and self._arena.nbytes >= needed:
            return
        if self._prefault is None or self._prefault_nbytes < needed:
            # A fresh run asks twice: at restore, and when the optimizer has made its state.
            self._bound_ahead = None  # it holds the arena that is released next
            arena = self._prefault = self._threads.submit(_make_arena, needed, instead_of=self._prefault)
            self._prefault_nbytes = needed
            self._bound_ahead = self._threads.submit(lambda: Binding(plan, arena.result()))

    @collector_paused()  # once around all of its steps, so that it catches up once
    def save(
        self,
        ident: CheckpointId,
        origin: Origin,
        *,
        overlapped: bool,
        audit_shift: int | None = None,
        flat: FlatState | None = None,
    ) -> SaveHandle:
        """Start a save of the live state. The arena must be free (see :meth:`busy`).

        Returns at once after the copy (blocking), or after the copy of volatile state (overlapped).

        Args:
            ident: step and attempt.
            origin: for the segment index.
            overlapped: leave the copy of parameters and optimizer state to the capture thread.
            audit_shift: compare replicas in this snapshot, each with the one so much further; the same on
                every rank. None: no audit.
            flat: save this instead of the live state; what is deferred in it is still that of live tensors.

        Raises:
            InvalidInputError: something in the state cannot be stored; nothing was written.
        """
        if flat is None:
            flat = self._state.flatten()
        plan = self._plan_for(flat)
        index = self._index(ident, origin, plan, flat)
        audit = None
        if audit_shift is not None:
            audit = Audit(plan, flat.leaves, self._rank, audit_shift)
            index += audit.placeholder()
        binding = self._bind(plan, len(index))
        handle = SaveHandle(ident, peer_completion=Future() if self._replicates else None)
        self._sequence += 1
        flush = self._write_tail(binding, index, ident)
        with self._lock:
            self._handles[self._sequence] = handle
        self._arena_free = handle.local_completion
        volatile, deferred = binding.copies(flat.leaves)
        capture = Capture(
            volatile,
            deferred,
            lambda error: self._captured(handle, flush, error),
            after=None if audit is None else lambda: _fill_in(audit, binding, flush),
            **self._witness(ident, plan, flat),
        )
        self._capture = capture
        capture.start(overlapped=overlapped, on_thread=self._submit)
        return handle

    def _witness(
        self, ident: CheckpointId, plan: SnapshotPlan, flat: FlatState
    ) -> dict[str, Callable[[Copies], None]]:
        if self._selftest is None:
            return {}
        return {"witness": self._selftest.begin(self._sequence, ident, plan, flat)}

    def finish_selftests(self) -> None:
        """Block until every save is checked, where that is wanted. All saves must be over."""
        if self._selftest is not None:
            self._selftest.finish()

    @property
    def busy(self) -> bool:
        """Whether the arena still holds a snapshot that is not sealed."""
        return self._arena_free is not None and not self._arena_free.done()

    def wait_until_free(self, timeout_s: float | None) -> None:
        """Block until the arena is free, however the flush ended."""
        if self._arena_free is not None:
            self._arena_free.exception(timeout_s)

    @property
    def is_capturing(self) -> bool:
        """Whether an overlapped copy has not been waited for yet."""
        return self._capture is not None

    def before_optimizer_step(self) -> None:
        """Fence for an overlapped capture; costs nothing when none is running."""
        capture = self._capture
        if capture is not None:
            capture.before_optimizer_step()
            self._capture = None

    def wait_until_captured(self) -> None:
        """Block until no copy is running."""
        if self._capture is not None:
            self._capture.wait()
            self._capture = None

    def take_problems(self) -> list[CkptError]:
        """Return and forget the errors that background work has had since the last call."""
        with self._lock:
            found, self._problems = self._problems, []
        return found

    def pending(self) -> list[SaveHandle]:
        """Saves that are neither committed nor failed."""
        with self._lock:
            return list(self._handles.values())

    def close(self) -> None:
        """Finish the copy, let the flusher finish the rest (with or without us), release the arena."""
        self.wait_until_captured()
        self._threads.shutdown(wait=True)
        self._flusher.close(wait=False)
        if self._selftest is not None:
            self._selftest.close()
        for handle in self.pending():  # nobody will hear of their commit; whoever waits must not hang
            closed = UnavailableError(
                "the manager was closed before the commit was known; the staging server goes on with it",
                code="closed",
                step=handle.step,
            )
            handle.fail_upload(closed)
            handle.fail_peer(closed)
        self._give_up_replicas(keep=0)
        self._binding = self._bound_ahead = None
        arenas = [self._arena] if self._arena is not None else []
        if self._prefault is not None and self._prefault.exception() is None:
            arenas.append(self._prefault.result())
        self._arena = self._prefault = None
        for arena in arenas:
            _release(arena)

    def _submit(self, work: Callable[[], None]) -> None:
        self._threads.submit(work)

    def _plan_for(self, flat: FlatState) -> SnapshotPlan:
        if self._plan is None or not self._plan.fits(flat.leaves):
            self._plan = plan_snapshot(flat.leaves, self._rank)
        return self._plan

    def _index(self, ident: CheckpointId, origin: Origin, plan: SnapshotPlan, flat: FlatState) -> bytes:
        variable = disk_pb2.SegmentIndex(
            run=origin.run,
            run_id=origin.run_id,
            id=ident.to_proto(),
            world_size=origin.world_size,
            group=origin.group,
            captured_at=SystemClock().now(),
            environment=environment(),
            state=flat.values,
            rank_state=flat.rank_values,
        )
        if origin.parent is not None:
            variable.parent.CopyFrom(origin.parent.to_proto())
        # Serialized messages concatenate: the constant part is not built again for every save.
        return plan.constant_index + variable.SerializeToString()

    def _arena_nbytes(self, plan: SnapshotPlan, index_nbytes: int) -> int:
        index_room = 2 * (len(plan.constant_index) + index_nbytes) + _TAIL_SLACK
        return arena_nbytes(plan.save.nbytes, index_room, len(plan.layout_bytes))

    def _bind(self, plan: SnapshotPlan, index_nbytes: int) -> Binding:
        exact = arena_nbytes(plan.save.nbytes, index_nbytes, len(plan.layout_bytes))
        arena = self._arena_for(exact, self._arena_nbytes(plan, index_nbytes))
        with self._lock:
            revive = not self._flusher_alive
            self._flusher_alive = True
        if revive:
            self._flusher = self._start_flusher()
        if revive or arena is not self._arena or self._unannounced is not None:
            self._announce(arena)
        if self._binding is None or self._binding.plan is not plan or self._binding.arena is not arena:
            self._binding = self._take_bound_ahead(plan, arena) or Binding(plan, arena)
        if self._arena is not None and arena is not self._arena:
            _release(self._arena)
        self._arena = arena
        return self._binding

    def _announce(self, arena: Arena) -> None:
        """Tell the flusher of its arena. One that dies in this very moment fails the save, not the loop."""
        try:
            self._flusher.send_arena(arena)
            self._unannounced = None
        except UnavailableError as error:
            self._unannounced = error

    def _take_bound_ahead(self, plan: SnapshotPlan, arena: Arena) -> Binding | None:
        """The binding that was made in the background, if it is one of these; it is kept no longer."""
        ahead, self._bound_ahead = self._bound_ahead, None
        if ahead is None or ahead.exception() is not None:
            return None
        binding = ahead.result()
        return binding if binding.plan is plan and binding.arena is arena else None

    def _drop_bound_ahead(self) -> None:
        """Forget the binding made in the background; returns when nobody works on its arena any more."""
        ahead, self._bound_ahead = self._bound_ahead, None
        if ahead is not None:
            ahead.exception()  # waits for it

    def _arena_for(self, exact: int, comfortable: int) -> Arena:
        if self._prefault is not None:
            prefault, self._prefault = self._prefault, None  # first, so that a failure is not for ever
            made = prefault.result()
            if made.nbytes >= exact:
                return made
            self._drop_bound_ahead()
            _release(made)
        if self._arena is not None and self._arena.nbytes >= exact:
            return self._arena
        return _make_arena(comfortable)

    def _write_tail(self, binding: Binding, index: bytes, ident: CheckpointId) -> flusher_pb2.Flush:
        plan = binding.plan
        tail = binding.arena.write_tail(plan.save.nbytes, index, plan.layout_bytes)
        return flusher_pb2.Flush(
            sequence=self._sequence,
            id=ident.to_proto(),
            rank=self._rank,
            segment_nbytes=plan.save.nbytes,
            index_offset=tail.index_offset,
            index_nbytes=tail.index_nbytes,
            layout_offset=tail.layout_offset,
            layout_nbytes=tail.layout_nbytes,
            layout_digest=plan.layout_digest,
        )

    def _captured(self, handle: SaveHandle, flush: flusher_pb2.Flush, error: CkptError | None) -> None:
        """The copy is over, on whichever thread made it."""
        error = error or self._unannounced  # a flusher that knows another arena must not read that one
        if error is None:
            try:
                self._flusher.flush(flush)
            except CkptError as broken:
                error = broken
        if error is None:
            handle.settle(handle.staging_completion)
            return
        if isinstance(error, SnapshotTornError):
            self.retake_wanted = True
            self._state.copy_at_once(error.tensors)
        self._fail(flush.sequence, error)

    def _fail(self, sequence: int, error: CkptError) -> None:
        error.context.setdefault("rank", self._rank)
        if self._selftest is not None:
            self._selftest.drop(sequence)
        with self._lock:
            handle = self._handles.pop(sequence, None)
            if not isinstance(error, SnapshotTornError):
                self._problems.append(error)
        if handle is not None:
            error.context.setdefault("step", handle.step)
            handle.fail(error)
        event(_log, logging.WARNING, "save.failed", error=error)

    def _on_event(self, message: flusher_pb2.FlusherEvent) -> None:
        state = flusher_pb2.FlusherEvent
        with self._lock:
            handle = self._handles.get(message.sequence)
        if message.state == state.STATE_REPLICATED:
            self._replicated(message.sequence)
        elif message.state in (state.STATE_SEALED, state.STATE_COMMITTED) and handle is not None:
            is_committed = message.state == state.STATE_COMMITTED
            if self._selftest is None:
                self._reached(message.sequence, handle, is_committed=is_committed)
            else:
                sealed, sequence = handle, message.sequence
                self._selftest.after_check(
                    sequence, lambda: self._reached(sequence, sealed, is_committed=is_committed)
                )
        elif message.state in (state.STATE_FAILED, state.STATE_WARNING):
            info = message.error
            error = from_kind(info.kind, info.message, code=info.code, context=dict(info.context))
            if message.state == state.STATE_FAILED:
                self._fail(message.sequence, error)
            else:
                event(_log, logging.WARNING, "save.degraded", error=error)

    def _reached(self, sequence: int, handle: SaveHandle, *, is_committed: bool) -> None:
        handle.settle(handle.local_completion)
        if is_committed:
            handle.settle(handle.upload_completion)
            with self._lock:
                self._handles.pop(sequence, None)
                if handle.peer_completion is not None and not handle.peer_completion.done():
                    self._unreplicated[sequence] = handle
            self._give_up_replicas(keep=_MOST_UNREPLICATED)

    def _replicated(self, sequence: int) -> None:
        with self._lock:
            handle = self._handles.get(sequence) or self._unreplicated.pop(sequence, None)
        if handle is not None and handle.peer_completion is not None:
            handle.settle(handle.peer_completion)

    def _give_up_replicas(self, *, keep: int) -> None:
        """Fail what nobody will hear of any more; whoever waits must not hang. The server goes on with it."""
        with self._lock:
            late = list(self._unreplicated)
            gone = [self._unreplicated.pop(sequence) for sequence in late[: max(0, len(late) - keep)]]
        for handle in gone:
            reason = UnavailableError("it is not known whether replicas were made", step=handle.step)
            handle.fail_peer(reason)

    def _on_flusher_death(self, exit_code: int) -> None:
        with self._lock:
            self._flusher_alive = False
            lost = [number for number, handle in self._handles.items() if not handle.local_completion.done()]
        for sequence in lost:
            self._fail(sequence, UnavailableError("the flusher process died", exit_code=exit_code))


def _fill_in(audit: Audit, binding: Binding, flush: flusher_pb2.Flush) -> None:
    """Replace the audit's placeholder at the end of the index, which has the same length."""
    found = audit.run(binding.arena)
    end = flush.index_offset + flush.index_nbytes
    binding.arena.view[end - len(found) : end] = found


def _make_arena(nbytes: int, *, instead_of: Future[Arena] | None = None) -> Arena:
    if instead_of is not None and instead_of.exception() is None:
        _release(instead_of.result())
    started = time.perf_counter()
    arena = Arena(nbytes)
    arena.prefault_all()
    pin(arena)
    event(_log, logging.INFO, "arena.ready", nbytes=nbytes, elapsed_s=time.perf_counter() - started)
    return arena


def _release(arena: Arena) -> None:
    unpin(arena)
    arena.close()
