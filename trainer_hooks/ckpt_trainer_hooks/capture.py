"""Carrying out the copies of one snapshot: now, or while the next forward and backward run."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ckpt.errors import CkptError, SnapshotTornError
from ckpt_trainer_hooks.snapshot import Copies

__all__ = ["Capture"]


class Capture:
    """The copy of one snapshot in flight.

    ``volatile`` state (buffers, values in plain objects) is copied before :meth:`start` returns;
    ``deferred`` state (parameters, optimizer state) on a thread (CPU) or a side stream (CUDA) when
    ``overlapped``, else also at once. On CUDA nothing waits on the host: the training stream waits for
    the side stream's event.

    Args:
        volatile: copies that must be of this very moment.
        deferred: copies that may run until the next optimizer step.
        after: called after the copies (CPU only) while the live state still may not change.
        witness: called with the copies of each kind once they are made (on CUDA on the training thread, with
            the side stream current), while their sources are still what was copied.
        done: called once from whichever thread finishes, with None or the error; afterwards the arena
            holds the snapshot, or does not.
    """

    def __init__(
        self,
        volatile: Copies,
        deferred: Copies,
        done: Callable[[CkptError | None], None],
        *,
        after: Callable[[], None] | None = None,
        witness: Callable[[Copies], None] = lambda _: None,
    ) -> None:
        self._volatile = volatile
        self._deferred = deferred
        self._done = done
        self._after = after
        self._witness = witness
        self._finished = threading.Event()
        self._verdict_lock = threading.Lock()
        self._verdict_known = False  # guarded by self._verdict_lock
        self._torn: SnapshotTornError | None = None  # guarded by self._verdict_lock
        self._event: torch.cuda.Event | None = None

    def start(self, *, overlapped: bool, on_thread: Callable[[Callable[[], None]], None]) -> None:
        """Copy what must be copied now and arrange for the rest. Called on the training thread."""
        cuda = any(t.is_cuda for t in self._volatile.sources) or any(
            t.is_cuda for t in self._deferred.sources
        )
        if cuda:
            self._start_cuda(overlapped=overlapped)
            on_thread(self._finish_cuda)
            if not overlapped:
                self._finished.wait()
            return
        idle = torch.get_num_threads()  # cores that training would use now and cannot: it waits for us
        self._volatile.run(threads=idle)
        self._witness(self._volatile)
        if overlapped and self._deferred.targets:
            on_thread(lambda: self._finish_cpu(threads=1))
        else:
            self._finish_cpu(threads=idle)

    def before_optimizer_step(self) -> None:
        """Fence: returns when parameters may change. Called on the training thread."""
        if self._event is not None:
            self._judge()  # on the host's clock, before the optimizer moves any version counter
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._finished.wait()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> None:
        """Block until the snapshot is in the arena or was thrown away."""
        self._finished.wait()

    def _start_cuda(self, *, overlapped: bool) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._volatile.run()
            volatile_done = torch.cuda.Event()
            volatile_done.record(side)
            self._deferred.run()
            self._event = torch.cuda.Event()
            self._event.record(side)
            self._witness(self._volatile)
            self._witness(self._deferred)
        # Kernels of the next forward that change buffers queue behind their copy.
        torch.cuda.current_stream().wait_event(volatile_done if overlapped else self._event)

    def _finish_cuda(self) -> None:
        assert self._event is not None
        self._event.synchronize()
        self._conclude(None)

    def _finish_cpu(self, *, threads: int) -> None:
        error: CkptError | None = None
        try:
            self._deferred.run(threads=threads)
            self._witness(self._deferred)
            if self._after is not None:
                self._after()
        except Exception as cause:  # noqa: BLE001 - the border of a thread: the error goes to the handle
            error = CkptError("copying the state failed", cause=repr(cause))
        self._conclude(error)

    def _conclude(self, error: CkptError | None) -> None:
        verdict = error or self._judge()
        # Live tensors must not be kept alive by a finished snapshot.
        self._volatile = self._deferred = Copies([], [], [], [], [])
        try:
            self._done(verdict)
        finally:
            self._finished.set()

    def _judge(self) -> SnapshotTornError | None:
        """Decide once whether the state changed under the copy."""
        with self._verdict_lock:
            if not self._verdict_known:
                self._verdict_known = True
                try:
                    self._deferred.check_unchanged()
                except SnapshotTornError as torn:
                    self._torn = torn
            return self._torn
