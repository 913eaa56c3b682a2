"""How long a start of the run took, from the failure before it to its first step, phase by phase.

Each rank writes one record; the server of its node puts those of the node together into the store:
``recovery/999996.000003/group-00000-of-00001.json``, newest attempt first. JSON, because people read it, and
because nothing depends on it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.ids import MAX_ATTEMPT
from ckpt.storage.base import Store
from ckpt.storage.staging import StagingDir, os_errors

__all__ = [
    "PHASES",
    "PhaseTime",
    "RankRecovery",
    "Recovery",
    "all_recoveries",
    "attempt_order",
    "load_recovery",
    "local_recoveries",
    "put_recovery",
    "recoveries_to_publish",
    "summarize",
    "write_rank_recovery",
]

PHASES = ("detect", "decide", "reschedule", "re-init", "locate", "read", "reshard", "first step")
RECOVERY = "recovery/"
_KEY = re.compile(r"recovery/\d{6}\.(\d{6})/group-(\d{5})-of-(\d{5})\.json", re.ASCII)
_LOCAL = re.compile(r"a(\d{6})\.rank-(\d{5,})\.json", re.ASCII)
_PUBLISHED = ".published"
Each = Callable[[Callable[[str], list["RankRecovery"]], list[str]], Iterable[list["RankRecovery"]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecovery:
    """One rank's start. Times are Unix seconds of its clock, durations seconds.

    Attributes:
        group, group_count, group_ranks: its node group.
        cause: "crash", "hang", "stop" (the attempt before closed its managers in order), "restore" (the same
            process called restore() again), or "start" (there was none, or nothing is known of it: then the
            time begins with the process).
        failed_at: when the attempt before stopped getting on.
        lost_steps: completed by the attempt before and not in what was restored.
        first_step_at: when the first step of this attempt was complete.
        checkpoint: that was restored; None for a fresh start.
        phases: seconds by name, of PHASES; they add up to ``first_step_at - failed_at``.
        nbytes: that were read, by tier.
    """

    attempt: int
    rank: int
    world_size: int
    node: str
    group: int
    group_count: int
    group_ranks: list[int]
    cause: str
    failed_at: float
    first_step_at: float
    checkpoint: str | None
    lost_steps: int
    phases: dict[str, float]
    nbytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase over all ranks, in seconds.

    Attributes:
        critical_s: of the rank whose first step came last; these add up to the whole.
        max_s, spread_s: largest, and largest less smallest.
        rank: the one with the largest.
    """

    name: str
    critical_s: float
    max_s: float
    spread_s: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One start of the run, over all ranks that have told.

    Attributes:
        wall_s: from the failure to the last rank's first step.
        critical_rank: that rank.
        ranks: how many have told, of ``world_size``.
        nbytes: that were read, by tier, over all ranks.
    """

    attempt: int
    cause: str
    checkpoint: str | None
    lost_steps: int
    failed_at: float
    wall_s: float
    critical_rank: int
    ranks: int
    world_size: int
    phases: list[PhaseTime]
    nbytes: dict[str, int]


def summarize(records: Sequence[RankRecovery]) -> Recovery:
    """Put the records of one attempt together. Raises NotFoundError where there are none."""
    if not records:
        raise NotFoundError("no timing of a recovery is known", code="no-recovery")
    critical = max(records, key=lambda record: record.first_step_at - record.failed_at)
    nbytes: Counter[str] = Counter()
    for record in records:
        nbytes.update(record.nbytes)
    return Recovery(
        attempt=critical.attempt,
        cause=critical.cause,
        checkpoint=critical.checkpoint,
        lost_steps=max(record.lost_steps for record in records),
        failed_at=critical.failed_at,
        wall_s=critical.first_step_at - critical.failed_at,
        critical_rank=critical.rank,
        ranks=len(records),
        world_size=critical.world_size,
        phases=[_phase(name, critical, records) for name in PHASES],
        nbytes=dict(sorted(nbytes.items())),
    )


def _phase(name: str, critical: RankRecovery, records: Sequence[RankRecovery]) -> PhaseTime:
    times = {record.rank: record.phases.get(name, 0.0) for record in records}
    slowest = max(times, key=lambda rank: times[rank])
    return PhaseTime(
        name=name,
        critical_s=critical.phases.get(name, 0.0),
        max_s=times[slowest],
        spread_s=times[slowest] - min(times.values()),
        rank=slowest,
    )


# --- in the staging directory ---


def write_rank_recovery(staging: StagingDir, run_key: str, record: RankRecovery) -> None:
    """Leave a rank's record for the server of the node. Raises UnavailableError."""
    path = _folder(staging, run_key) / f"a{record.attempt:06d}.rank-{record.rank:05d}.json"
    tmp = path.with_suffix(".tmp")
    with os_errors("the timing of a recovery cannot be written", path=path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        tmp.write_text(json.dumps(asdict(record)) + "\n")
        tmp.replace(path)


def local_recoveries(staging: StagingDir, run_key: str, attempt: int | None = None) -> list[RankRecovery]:
    """The records of ``attempt`` (default: the newest) in this staging directory, by rank."""
    by_attempt: dict[int, list[RankRecovery]] = {}
    folder = _folder(staging, run_key)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (match := _LOCAL.fullmatch(path.name)) is not None:
            try:
                record = _parsed(json.loads(path.read_text()), str(path))
            except (OSError, ValueError, CorruptError):
                continue
            by_attempt.setdefault(int(match[1]), []).append(record)
    wanted = max(by_attempt, default=0) if attempt is None else attempt
    return by_attempt.get(wanted, [])


def recoveries_to_publish(staging: StagingDir, run_key: str) -> list[RankRecovery]:
    """The records of the newest attempt, once all ranks of this node have written theirs; else nothing."""
    records = local_recoveries(staging, run_key)
    if not records or _published_path(staging, run_key, records[0].attempt).exists():
        return []
    told = {record.rank for record in records}
    return records if told.issuperset(records[0].group_ranks) else []


# --- in the store ---


def put_recovery(store: Store, staging: StagingDir, run_key: str, records: Sequence[RankRecovery]) -> None:
    """Put the records of a node; forget those of older attempts here. Idempotent."""
    first = records[0]
    body = {"ranks": [asdict(record) for record in records]}
    key = _group_key(first.attempt, first.group, first.group_count)
    store.put(key, json.dumps(body, indent=1).encode() + b"\n")
    with os_errors("a recovery cannot be marked as published", run=run_key):
        _published_path(staging, run_key, first.attempt).touch()
        for path in _folder(staging, run_key).iterdir():
            if path.name < f"a{first.attempt:06d}" and path.name.startswith("a"):
                path.unlink(missing_ok=True)


def load_recovery(store: Store, attempt: int | None = None) -> list[RankRecovery]:
    """The records in the store of ``attempt``, by rank; default: the newest that has any.

    Raises:
        NotFoundError: there are none.
        CorruptError: one cannot be read.
    """
    prefix = RECOVERY if attempt is None else f"{RECOVERY}{attempt_order(attempt)}/"
    found: list[RankRecovery] = []
    seen: int | None = attempt
    for info in store.list_keys(prefix):
        match = _KEY.fullmatch(info.key)
        if match is None:
            continue
        seen = int(match[1]) if seen is None else seen
        if int(match[1]) != seen:
            break
        found += _group_records(store.get(info.key), info.key)
    if not found:
        raise NotFoundError(
            "no timing of a recovery is in the store", code="no-recovery", attempt=attempt or "any"
        )
    return sorted(found, key=lambda record: record.rank)


def all_recoveries(store: Store, each: Each = map) -> dict[int, list[RankRecovery]]:
    """The records in the store of every attempt. ``each``: as ``map``, or that of a pool of threads.

    Raises:
        CorruptError: one cannot be read.
    """
    keys = [info.key for info in store.list_keys(RECOVERY) if _KEY.fullmatch(info.key)]
    found: dict[int, list[RankRecovery]] = {}
    for records in each(lambda key: _group_records(store.get(key), key), keys):
        for record in records:
            found.setdefault(record.attempt, []).append(record)
    return found


def _group_records(data: bytes, key: str) -> list[RankRecovery]:
    try:
        return [_parsed(body, key) for body in json.loads(data)["ranks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError("the timing of a recovery cannot be read", code="recovery", key=key) from error


def _parsed(body: dict[str, object], where: str) -> RankRecovery:
    known = {name: body[name] for name in RankRecovery.__dataclass_fields__ if name in body}
    try:
        return RankRecovery(**known)  # type: ignore[arg-type]
    except TypeError as error:
        raise CorruptError("the timing of a recovery lacks fields", code="recovery", where=where) from error


def attempt_order(attempt: int) -> str:
    """``999996.000003``: newest attempt first. Raises InvalidInputError."""
    if not 0 < attempt <= MAX_ATTEMPT:
        raise InvalidInputError("not an attempt number", attempt=attempt)
    return f"{MAX_ATTEMPT - attempt:06d}.{attempt:06d}"


def _group_key(attempt: int, group: int, count: int) -> str:
    return f"{RECOVERY}{attempt_order(attempt)}/group-{group:05d}-of-{count:05d}.json"


def _folder(staging: StagingDir, run_key: str) -> Path:
    return staging.run_dir(run_key) / "recovery"


def _published_path(staging: StagingDir, run_key: str, attempt: int) -> Path:
    return _folder(staging, run_key) / f"a{attempt:06d}{_PUBLISHED}"
