"""A verification as a stream of progress: the work in a thread of its own, its callbacks to a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.problem import error_to_info
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.verify import verify_deep, verify_quick
from ckpt_proto.v1 import catalog_pb2

__all__ = ["verification"]

# Progress the client has not read yet; beyond it the verification waits.
_QUEUED = 64
_REPORT_EVERY_NBYTES = 64 * 1024 * 1024
# An ErrorInfo is at most 4 KiB and a message of a client with default limits 4 MiB.
_PROBLEMS_PER_MESSAGE = 200

_Item = catalog_pb2.VerifyProgress | None


def verification(
    checkpoint: Checkpoint, *, deep: bool, is_active: Callable[[], bool]
) -> Iterator[catalog_pb2.VerifyProgress]:
    """Verify ``checkpoint`` and yield progress; the last message has ``done``.

    Args:
        checkpoint: freshly loaded, so that nothing comes from a memory of it.
        deep: read every chunk.
        is_active: whether the client is still there; when not, the work stops at the next chunk.

    Raises:
        CkptError: what verify_quick and verify_deep raise.
    """
    worker = _Worker(checkpoint, deep=deep, is_active=is_active)
    thread = threading.Thread(target=worker.run, name="ckpt-verify", daemon=True)  # reads only
    thread.start()
    while (item := worker.items.get()) is not None:
        yield item
    for problems in _batches(worker.result.result()):
        yield worker.message(problems)
    last = worker.message([])
    last.done = True
    yield last


class _Worker:
    def __init__(self, checkpoint: Checkpoint, *, deep: bool, is_active: Callable[[], bool]) -> None:
        self.items: queue.Queue[_Item] = queue.Queue(_QUEUED)
        self.result: Future[list[CorruptError]] = Future()
        self._checkpoint = checkpoint
        self._deep = deep
        self._is_active = is_active
        self._done = 0
        self._total = 0
        self._reported = 0

    def run(self) -> None:
        """Verify; the problems, all of them, or the failure are in ``result``."""
        try:
            if self._deep:
                found = verify_deep(self._checkpoint, progress=self._progress)
            else:
                found = verify_quick(self._checkpoint)
            self.result.set_result(found)
        except Exception as error:  # noqa: BLE001 - thread border: raised again where the result is read
            self.result.set_exception(error)
        finally:
            self._put(None)

    def message(self, problems: list[CorruptError]) -> catalog_pb2.VerifyProgress:
        return catalog_pb2.VerifyProgress(
            id=self._checkpoint.ident.to_proto(),
            checked_bytes=self._done,
            total_bytes=self._total,
            problems=[error_to_info(problem) for problem in problems],
        )

    def _progress(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if done - self._reported >= _REPORT_EVERY_NBYTES or done == total:
            self._reported = done
            self._put(self.message([]))

    def _put(self, item: _Item) -> None:
        while self._is_active():
            try:
                self.items.put(item, timeout=1.0)
            except queue.Full:
                continue
            return
        if item is not None:
            raise UnavailableError("the client left", code="cancelled")
        # Nobody reads any more, unless the reader is about to look: make room and let it see the end.
        while not self.items.empty():
            self.items.get_nowait()
        self.items.put(None)


def _batches(problems: list[CorruptError]) -> Iterator[list[CorruptError]]:
    for start in range(0, len(problems), _PROBLEMS_PER_MESSAGE):
        yield problems[start : start + _PROBLEMS_PER_MESSAGE]
