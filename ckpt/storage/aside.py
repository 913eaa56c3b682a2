"""Segments of another life of a run are set aside: kept, and never again taken for this run's.

A run that was deleted in the store and begun again at the same URL finds in the staging directory what its
first life left there, under the ids that it will use itself. Such segments go to

    <staging>/aside/<run key>/<run id>/<checkpoint id>/segment-00017.*

where nothing reads, uploads or deletes them: they may be all that is left of that life. A person removes
them, or moves a folder back below ``runs/<run key>/`` while the store has that life of the run.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.digest import digest_hex
from ckpt.errors import CkptError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId, same_run
from ckpt.storage.durable import fsync_dir, make_dirs
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import COMMITTED_NAME, StagingDir, os_errors

__all__ = ["SetAside", "aside_nbytes", "set_aside", "set_aside_others"]

_log = get_logger("staging.aside")
_FOLDER = "aside"
_UNKNOWN = "unknown"  # in place of a run id
_RUN_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SetAside:
    """What was set aside: segments of ``ranks`` of one checkpoint, now in the folder ``path``."""

    ident: CheckpointId
    ranks: tuple[int, ...]
    path: Path


def set_aside_others(staging: StagingDir, run_key: str, run_id: str, *, is_new: bool) -> list[SetAside]:
    """Set aside what is sealed on this node of other lives of a run, own segments and replicas, and say so.

    Blocks on the disk. To be called when the run's life is known and before anything of it is sealed here. A
    segment whose index cannot be read stays.

    Args:
        staging: of the node.
        run_key: the run's folder in it.
        run_id: of the life that goes on.
        is_new: that life begins now: also what says nothing of its life (an older version's) is another's.

    Raises:
        UnavailableError: the staging directory cannot be read or changed.
    """
    found = []
    for place in (staging, replicas_dir(staging)):
        for ident in place.checkpoints(run_key):
            others: dict[str, list[int]] = {}
            for rank in place.sealed_ranks(run_key, ident):
                with contextlib.suppress(CkptError):
                    other = place.read_index(run_key, ident, rank).run_id
                    if not same_run(other, run_id) or (is_new and not other):
                        others.setdefault(other, []).append(rank)
            found += [set_aside(place, run_key, ident, ranks, of=other) for other, ranks in others.items()]
    return found


def set_aside(
    place: StagingDir, run_key: str, ident: CheckpointId, ranks: Sequence[int], *, of: str
) -> SetAside:
    """Move the segments of ``ranks`` out of the way and log a warning. Idempotent; tolerates a rival.

    Args:
        place: a staging directory, or the one of a node's replicas.
        run_key: the run's folder in it.
        ident: the checkpoint.
        ranks: sealed there.
        of: run id of the life they belong to.

    Raises:
        UnavailableError: the directory cannot be changed.
    """
    source = place.checkpoint_dir(run_key, ident)
    # What is in an index may come from another node, and is part of a path here.
    life = of if _RUN_ID.fullmatch(of) else digest_hex(of.encode()) if of else _UNKNOWN
    target = place.path / _FOLDER / run_key / life / str(ident)
    with os_errors("segments of another life of the run cannot be set aside", path=source):
        make_dirs(target, mode=0o700)
        # First: it speaks of that life, and must not be believed of a segment that is sealed here next.
        with contextlib.suppress(FileNotFoundError):
            (source / COMMITTED_NAME).rename(target / COMMITTED_NAME)
        for rank in ranks:
            with contextlib.suppress(FileNotFoundError):
                _move(place, run_key, ident, rank, target)
        fsync_dir(target)
        _remove_if_empty(source)
    event(
        _log,
        logging.WARNING,
        "staging.set_aside",
        reason="these segments are of another life of this run, which was deleted and begun again; they are "
        "kept, and not used",
        run=run_key,
        checkpoint=ident,
        ranks=sorted(ranks),
        run_id=of or "unknown",
        path=target,
    )
    return SetAside(ident, tuple(sorted(ranks)), target)


def _move(place: StagingDir, run_key: str, ident: CheckpointId, rank: int, target: Path) -> None:
    """The segment has both names until its index has moved, so that no crash leaves one without the other."""
    index = place.index_path(run_key, ident, rank)
    beside = [place.segment_path(run_key, ident, rank), place.uploaded_path(run_key, ident, rank)]
    for path in beside:
        linked = target / path.name
        with contextlib.suppress(FileNotFoundError):
            if not (linked.exists() and linked.samefile(path)):
                linked.unlink(missing_ok=True)
                linked.hardlink_to(path)
    fsync_dir(target)
    index.rename(target / index.name)  # from here on it is not sealed here any more
    fsync_dir(index.parent)
    for path in beside:
        with contextlib.suppress(FileNotFoundError):
            if path.samefile(target / path.name):  # not what somebody has sealed here since
                path.unlink()


def _remove_if_empty(folder: Path) -> None:
    """Remove a checkpoint's folder that nothing sealed or arriving is left in."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return
    if any(name.startswith("segment-") for name in names):
        return
    for name in names:  # whose the replicas were
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has just come
        folder.rmdir()
        fsync_dir(folder.parent)


def aside_nbytes(staging: StagingDir) -> int:
    """Return the bytes that are set aside on this node. Raises UnavailableError."""
    total = 0
    for place in (staging, replicas_dir(staging)):
        folder = place.path / _FOLDER
        with os_errors("what was set aside cannot be looked at", path=folder):
            for path in folder.rglob("segment-*"):
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
    return total
