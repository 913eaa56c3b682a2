"""Segment files of retired steps, kept to be overwritten.

Overwriting blocks that a file has is quicker than allocating new ones: the file system marks fresh blocks
as written one extent at a time, and memory file systems have to find and clear pages. So local retention
leaves the newest retired segment of each rank at ``runs/<run key>/spare/segment-<rank>.safetensors``, and
the flusher writes its next segment into that file.

A spare is never taken for a segment of the step that it was: it leaves that step's folder only after the
sealed marker is durably gone, and enters the next step's folder under the name of an unfinished segment.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["drop_spares", "is_ours_alone", "retire_checkpoint", "spare_nbytes", "spare_path", "take_spare"]

_log = get_logger("storage.spares")
_F_SETLEASE = getattr(fcntl, "F_SETLEASE", None)  # Linux


def spare_path(staging: StagingDir, run_key: str, rank: int) -> Path:
    """Where the spare of ``rank`` is, if there is one."""
    return staging.run_dir(run_key) / "spare" / keys.local_segment_name(rank)


def retire_checkpoint(staging: StagingDir, run_key: str, ident: CheckpointId) -> None:
    """Delete the folder of a checkpoint as :meth:`StagingDir.remove_checkpoint`, but keep its segments as
    spares, in place of older ones. A crash in the middle leaves unsealed debris, never a sealed step.
    """
    ranks = staging.sealed_ranks(run_key, ident)
    staging.unseal(run_key, ident)  # durable, before the bytes may change
    for rank in ranks:
        spare = spare_path(staging, run_key, rank)
        with os_errors("a spare segment cannot be kept", path=spare), contextlib.suppress(FileNotFoundError):
            spare.parent.mkdir(mode=0o700, exist_ok=True)
            staging.segment_path(run_key, ident, rank).replace(spare)
    staging.remove_checkpoint(run_key, ident)


def take_spare(staging: StagingDir, run_key: str, rank: int, target: Path) -> bool:
    """Move the spare of ``rank`` to ``target`` (an unfinished segment) unless something is there; return
    whether it was moved. It may still be open or mapped elsewhere: see :func:`is_ours_alone`.
    """
    spare = spare_path(staging, run_key, rank)
    try:
        os.link(spare, target)  # not a rename, which would replace what another flusher is writing
    except OSError:  # none there, something in the way, or a file system without links: do without
        return False
    with contextlib.suppress(OSError):  # its second name keeps it from being overwritten
        spare.unlink()
    return True


def spare_nbytes(staging: StagingDir, run_key: str) -> int:
    """Size of the spares of a run: room that the next save finds although it is not free."""
    with os_errors("spare segments cannot be read", path=staging.path):
        return sum(path.stat().st_size for path in _spares(staging, run_key))


def drop_spares(staging: StagingDir, run_key: str, *, unused_since: float | None = None) -> int:
    """Delete the spares of a run; return how many. A failure is logged: it costs room, nothing else.

    Args:
        staging: where.
        run_key: of the run.
        unused_since: only those that became spares before this time, in seconds since the epoch.
    """
    dropped = 0
    try:
        with os_errors("spare segments cannot be removed", staging=staging.path):
            for path in _spares(staging, run_key):
                with contextlib.suppress(FileNotFoundError):  # a flusher has taken it
                    if unused_since is None or path.stat().st_ctime < unused_since:
                        path.unlink()
                        dropped += 1
    except CkptError as error:
        event(_log, logging.WARNING, "spares.not_dropped", run=run_key, error=error)
    return dropped


def _spares(staging: StagingDir, run_key: str) -> list[Path]:
    folder = staging.run_dir(run_key) / "spare"
    return list(folder.iterdir()) if folder.is_dir() else []


def is_ours_alone(fd: int) -> bool:
    """Whether nobody else can see the file behind ``fd`` change: no other name, descriptor or mapping.

    Whoever opened a segment before its step was retired (a restore, a user's safetensors reader) must go on
    seeing what was sealed. The kernel grants a write lease only to the sole opener, mappings counted; where
    the file system knows no leases the answer is no.
    """
    if _F_SETLEASE is None or os.fstat(fd).st_nlink != 1:
        return False
    try:
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, _F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
