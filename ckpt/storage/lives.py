"""How the trainers of an attempt ended: one small JSON file per rank, written by its flusher.

``<staging>/runs/<run key>/lives/a000003.rank-00017.json``. The next start of the run reads what the one
before left on its node, and so knows when that failed. The server puts them into the store, where they are
the ledger of the run's time (:mod:`ckpt.ops.ledger`). Facts for people and timings; nothing is decided by
them, but that a stop need not wait for a rank that has died.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["FAILED_PHASE", "Life", "all_lives", "lives_folder", "read_lives", "sweep_lives", "write_life"]

FAILED_PHASE = "failed"
"""Phase of a trainer that closes its manager because of an error."""

_NAME = re.compile(r"a(\d{6})\.rank-(\d{5,})\.json", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One rank of one attempt, as its flusher last saw it. Times are Unix seconds of that node's clock.

    Attributes:
        step: optimizer steps completed.
        moved_at: when the training thread last got on.
        seen_at: when this was written.
        ended_at: when the process ended; None: it has not, or nobody was left to see it.
        closed: it closed its manager before.
        step_s: median duration of its steps.
        spent_s: seconds by phase since its first step was complete, as of ``spent_at``.
    """

    attempt: int
    rank: int
    world_size: int
    node: str
    step: int
    phase: str
    moved_at: float
    seen_at: float
    ended_at: float | None
    closed: bool
    step_s: float
    spent_s: Mapping[str, float] = field(default_factory=dict)
    spent_at: float = 0.0


def write_life(staging: StagingDir, run_key: str, life: Life) -> None:
    """Write or replace the record. Atomic, not durable. Raises UnavailableError."""
    path = lives_folder(staging, run_key) / f"a{life.attempt:06d}.rank-{life.rank:05d}.json"
    tmp = path.with_suffix(".tmp")
    with os_errors("the record of a rank cannot be written", path=path):
        path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        tmp.write_text(json.dumps(asdict(life)) + "\n")
        tmp.replace(path)


def read_lives(staging: StagingDir, run_key: str) -> list[Life]:
    """The records of the newest attempt that left some here, by rank; unreadable ones are left out."""
    found = all_lives(staging, run_key)
    return found[max(found)] if found else []


def all_lives(staging: StagingDir, run_key: str) -> dict[int, list[Life]]:
    """The records of every attempt that left some here, by rank; unreadable ones are left out."""
    found: dict[int, list[Life]] = {}
    for attempt, path in _names(staging, run_key):
        with contextlib.suppress(OSError, ValueError, TypeError):  # half-written by another version
            found.setdefault(attempt, []).append(Life(**json.loads(path.read_text())))
    return {attempt: sorted(lives, key=lambda life: life.rank) for attempt, lives in found.items()}


def sweep_lives(staging: StagingDir, run_key: str, *, before: int) -> None:
    """Delete the records of attempts below ``before``, and the notes that they were put."""
    folder = lives_folder(staging, run_key)
    for path in folder.iterdir() if folder.is_dir() else []:
        if path.name < f"a{before:06d}" and path.name.startswith("a"):
            path.unlink(missing_ok=True)


def lives_folder(staging: StagingDir, run_key: str) -> Path:
    """Where the records of a run are."""
    return staging.run_dir(run_key) / "lives"


def _names(staging: StagingDir, run_key: str) -> list[tuple[int, Path]]:
    folder = lives_folder(staging, run_key)
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return [(int(match[1]), path) for match, path in found if match is not None]
