"""How the trainers of an attempt ended: one small JSON file per rank, written by its flusher.

``<staging>/runs/<run key>/lives/a000003.rank-00017.json``. The next start of the run reads what the one
before left on its node, and so knows when that failed. Facts for people and timings; nothing is decided by
them, but that a stop need not wait for a rank that has died.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["Life", "read_lives", "sweep_lives", "write_life"]

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


def write_life(staging: StagingDir, run_key: str, life: Life) -> None:
    """Write or replace the record. Atomic, not durable. Raises UnavailableError."""
    path = _folder(staging, run_key) / f"a{life.attempt:06d}.rank-{life.rank:05d}.json"
    tmp = path.with_suffix(".tmp")
    with os_errors("the record of a rank cannot be written", path=path):
        path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        tmp.write_text(json.dumps(asdict(life)) + "\n")
        tmp.replace(path)


def read_lives(staging: StagingDir, run_key: str) -> list[Life]:
    """The records of the newest attempt that left some here, by rank; unreadable ones are left out."""
    found = _names(staging, run_key)
    newest = max((attempt for attempt, _ in found), default=0)
    lives = []
    for attempt, path in found:
        if attempt == newest:
            try:
                lives.append(Life(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):  # half-written by another version; only facts for people
                continue
    return sorted(lives, key=lambda life: life.rank)


def sweep_lives(staging: StagingDir, run_key: str, *, before: int) -> None:
    """Delete the records of attempts below ``before``."""
    for attempt, path in _names(staging, run_key):
        if attempt < before:
            path.unlink(missing_ok=True)


def _folder(staging: StagingDir, run_key: str) -> Path:
    return staging.run_dir(run_key) / "lives"


def _names(staging: StagingDir, run_key: str) -> list[tuple[int, Path]]:
    folder = _folder(staging, run_key)
    if not folder.is_dir():
        return []
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return [(int(match[1]), path) for match, path in found if match is not None]
