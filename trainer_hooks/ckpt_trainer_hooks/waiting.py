"""Waiting for the arena, and until saves are committed or have failed (as heard, or seen on disk)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from ckpt.errors import BusyError, CkptError, NotFoundError, TimeoutExceededError
from ckpt.events import event, get_logger
from ckpt.format.keys import run_key
from ckpt.ops import catalog
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.pipeline import SavePipeline

__all__ = ["arena_is_free", "wait_for_saves", "wait_until_sealed"]

_log = get_logger("manager")
_POLL_S = 0.2


def arena_is_free(pipeline: SavePipeline, on_busy: str, step: int) -> bool:
    """Apply ``on_busy`` while the save before is still being written; return whether the arena is free now.

    Raises:
        BusyError: it is not, and ``on_busy`` is "fail".
    """
    if on_busy == "fail":
        raise BusyError("the save before is still being written to NVMe", step=step)
    if on_busy == "skip":
        event(
            _log, logging.WARNING, "save.skipped", step=step, reason="the save before is still being written"
        )
        return False
    started = time.perf_counter()
    pipeline.wait_until_free(None)
    event(
        _log,
        logging.WARNING,
        "save.waited",
        step=step,
        reason="the save before was still being written to NVMe; save less often or use faster storage",
        waited_s=time.perf_counter() - started,
    )
    return True


def wait_for_saves(
    pending: Callable[[], list[SaveHandle]],
    config: RunConfig,
    staging: StagingDir,
    timeout_s: float | None = None,
) -> None:
    """Block until none of the saves that ``pending`` returns is under way.

    Raises:
        TimeoutExceededError: some still are after ``timeout_s``.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while left := [handle for handle in pending() if not _is_over(handle, config, staging)]:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutExceededError(
                "saves are not committed yet: another rank's part is missing, or the staging server or "
                "the store cannot be reached. What is sealed stays on NVMe and is committed later",
                steps=[handle.step for handle in left],
                waited_s=timeout_s,
            )
        with contextlib.suppress(CkptError, TimeoutError):
            left[0].upload_completion.result(_POLL_S)


def wait_until_sealed(handles: Sequence[SaveHandle], timeout_s: float) -> None:
    """Block until each of ``handles`` is sealed on NVMe, or has failed, or ``timeout_s`` has passed."""
    deadline = time.monotonic() + timeout_s
    for handle in handles:
        with contextlib.suppress(CkptError, TimeoutError):
            handle.local_completion.result(max(0.0, deadline - time.monotonic()))


def _is_over(handle: SaveHandle, config: RunConfig, staging: StagingDir) -> bool:
    """Done, or committed according to the staging directory (a new flusher does not follow old saves)."""
    if handle.done():
        return True
    key = run_key(config.url)
    if staging.is_committed(key, handle.ident):
        handle.settle(handle.local_completion)
        handle.settle(handle.upload_completion)
    elif handle.local_completion.done() and not staging.checkpoint_dir(key, handle.ident).exists():
        _settle_by_store(handle, config)
    return handle.done()


def _settle_by_store(handle: SaveHandle, config: RunConfig) -> None:
    """What was sealed leaves the staging directory once it is committed, or given up."""
    with contextlib.closing(open_store(config.url, config.store_options)) as store:
        if catalog.exists(store, handle.ident):
            handle.settle(handle.upload_completion)
        else:
            handle.fail(NotFoundError("neither on NVMe nor in the store any more", step=handle.step))
