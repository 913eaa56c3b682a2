"""What writers that died left in a staging directory: temporary files of small durable writes, and the note
of what was expected beside a segment that has come and is sealed.

Unfinished segments are swept by the flusher of their run, and go with the folder of their step; the others
(``run.json``, layouts, the token, notes) lie in folders that stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ckpt.storage.durable import TEMP_PREFIX
from ckpt.storage.staging import ARRIVING, StagingDir, os_errors

__all__ = ["LEFTOVER_S", "sweep_leftovers"]

LEFTOVER_S = 3600.0
"""Age in seconds from which a temporary file is a crash: a live writer needs it for moments."""


def sweep_leftovers(staging: StagingDir, *, before: float) -> int:
    """Delete files of dead writers in ``staging``; return how many.

    Args:
        staging: a staging directory, or one of replicas. One that does not exist is empty.
        before: Unix seconds; younger files may belong to somebody.

    Raises:
        UnavailableError: the directory cannot be read or changed.
    """
    removed = 0
    for folder in _folders(staging):
        with os_errors("leftovers cannot be removed", path=folder):
            for path in (*folder.glob(f"{TEMP_PREFIX}*"), *_notes_of_sealed(folder)):
                with contextlib.suppress(FileNotFoundError):  # its writer lives, and has ended
                    if path.stat().st_mtime < before:
                        path.unlink()
                        removed += 1
    return removed


def _notes_of_sealed(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"segment-*.index{ARRIVING}"):
        if path.with_name(path.name.removesuffix(ARRIVING)).is_file():
            yield path


def _folders(staging: StagingDir) -> Iterator[Path]:
    yield staging.path
    yield staging.trainers_path()
    for run in (staging.path / "runs").glob("*"):
        yield run
        yield from (path for path in run.glob("*") if path.is_dir())
