"""Waiting for the arena, and until saves are committed or have failed (as heard, or seen on disk)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from ckpt.errors import BusyError, CkptError, InvalidInputError, NotFoundError, TimeoutExceededError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import run_key
from ckpt.ops import catalog
from ckpt.ops.groups import list_groups
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.pipeline import SavePipeline
from ckpt_trainer_hooks.session import Session

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
    session: Session,
    timeout_s: float | None = None,
) -> None:
    """Block until none of the saves that ``pending`` returns is under way.

    Raises:
        TimeoutExceededError: some still are after ``timeout_s``; it names the ranks whose part is missing.
        InvalidInputError: some can never be committed, since not all ranks have saved that step.
        NotFoundError: some are gone.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    given_up: list[CkptError] = []
    while left := [h for h in pending() if not _is_over(h, config, staging, session, given_up)]:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutExceededError(
                "saves are not committed yet: another rank's part is missing, or the staging server or "
                "the store cannot be reached. What is sealed stays on NVMe and is committed later",
                steps=[handle.step for handle in left],
                missing_ranks=_missing_ranks(left[0].ident, config, staging, session),
                waited_s=timeout_s,
            )
        with contextlib.suppress(CkptError, TimeoutError):
            left[0].upload_completion.result(_POLL_S)
    if given_up:
        raise given_up[0]


def wait_until_sealed(handles: Sequence[SaveHandle], timeout_s: float) -> None:
    """Block until each of ``handles`` is sealed on NVMe, or has failed, or ``timeout_s`` has passed."""
    deadline = time.monotonic() + timeout_s
    for handle in handles:
        with contextlib.suppress(CkptError, TimeoutError):
            handle.local_completion.result(max(0.0, deadline - time.monotonic()))


def _is_over(
    handle: SaveHandle, config: RunConfig, staging: StagingDir, session: Session, given_up: list[CkptError]
) -> bool:
    """Done, or committed according to the staging directory (a new flusher does not follow old saves)."""
    if handle.done():
        return True
    key = run_key(config.url)
    if staging.is_committed(key, handle.ident):
        handle.settle(handle.local_completion)
        handle.settle(handle.upload_completion)
    elif (reason := _lost(handle, key, staging, session)) is not None:
        # What was sealed leaves the staging directory also when it has been committed.
        with contextlib.closing(open_store(config.url, config.store_options)) as store:
            if catalog.exists(store, handle.ident):
                handle.settle(handle.upload_completion)
                return True
        handle.fail(reason)
        given_up.append(reason)
    return handle.done()


def _lost(handle: SaveHandle, key: str, staging: StagingDir, session: Session) -> CkptError | None:
    """Why it will not be committed any more, unless it has been."""
    if handle.local_completion.done() and not staging.checkpoint_dir(key, handle.ident).exists():
        return NotFoundError("neither on NVMe nor in the store any more", step=handle.step)
    if absent := _ranks_that_went_on(handle.ident, key, staging, session):
        return InvalidInputError(
            "this step can never be committed: some ranks have not saved it, and have saved a later one "
            "since. Call save() on every rank, with the same steps",
            code="not-on-all-ranks",
            step=handle.step,
            missing_ranks=absent,
        )
    return None


def _ranks_that_went_on(ident: CheckpointId, key: str, staging: StagingDir, session: Session) -> list[int]:
    """Ranks of this node without a segment of ``ident`` that have a later one: a rank's steps grow, and are
    sealed in order, so theirs of ``ident`` will never be. Only told once a later step is committed, which is
    when nobody can doubt that the job as a whole went on."""
    later = [i for i in staging.checkpoints(key) if i.attempt == ident.attempt and i.step > ident.step]
    for other in later:
        if staging.is_committed(key, other):
            sealed = set(staging.sealed_ranks(key, ident))
            went_on = set(staging.sealed_ranks(key, other))
            return [rank for rank in session.group.ranks if rank in went_on - sealed]
    return []


def _missing_ranks(
    ident: CheckpointId, config: RunConfig, staging: StagingDir, session: Session
) -> list[int]:
    """Ranks of this node that have not sealed ``ident``; ranks of nodes whose group is not in the store."""
    sealed = set(staging.sealed_ranks(run_key(config.url), ident))
    missing = [rank for rank in session.group.ranks if rank not in sealed]
    others = [number for number in range(len(session.nodes)) if number != session.group.index]
    if others:
        with contextlib.suppress(CkptError):  # as far as can be told
            found = _published_groups(ident, config)
            missing += [r for number in others if number not in found for r in session.nodes[number].ranks]
    return sorted(missing)


def _published_groups(ident: CheckpointId, config: RunConfig) -> set[int]:
    with contextlib.closing(open_store(config.url, config.store_options)) as store:
        return set(list_groups(store, ident).objects)
