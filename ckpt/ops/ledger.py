"""The records behind the goodput ledger: how the ranks of each start did, per node, in the run's store.

``ledger/999996.000003/node-<node id>.json`` holds what the flushers of the node's ranks wrote last
(:mod:`ckpt.storage.lives`). The node's server puts it when they have ended, and every few minutes while they
run. JSON, because people read it, and because nothing depends on it. Nothing deletes it but people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ckpt.clock import Clock, SystemClock
from ckpt.errors import CorruptError
from ckpt.ops.attempts import Attempt, list_attempts, read_attempt
from ckpt.ops.ends import ends_of, summary_of
from ckpt.ops.recovery import RankRecovery, all_recoveries, attempt_order, local_recoveries, summarize
from ckpt.plan.goodput import Ledger, Start, account
from ckpt.storage.base import Store
from ckpt.storage.lives import Life, all_lives, lives_folder
from ckpt.storage.peerfile import node_id
from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["ledger_to_publish", "load_ledger", "put_ledger"]

LEDGER = "ledger/"
_KEY = re.compile(r"ledger/\d{6}\.(\d{6})/node-([0-9a-f]{16})\.json", re.ASCII)
_EVERY_S = 300.0  # while ranks run; what a node knows that is lost with its disk is at most so old
_WORKERS = 16
_SAVES = ("save", "stop")
_DATA = ("data",)
_STEPS = ("train", "optimizer")
_Told = TypeVar("_Told", Life, RankRecovery)


# --- in the staging directory ---


def ledger_to_publish(staging: StagingDir, run_key: str, clock: Clock) -> list[Life]:
    """What a node should put next, of one attempt; empty: nothing.

    That is: records of an attempt whose ranks have ended here, or that a newer one has followed, once; of
    the others what is newer than the last put, every five minutes.
    """
    found = all_lives(staging, run_key)
    newest = max(found, default=0)
    for attempt, lives in sorted(found.items()):
        seen_at = max(life.seen_at for life in lives)
        put_seen_at, put_at = _last_put(staging, run_key, attempt)
        is_over = attempt < newest or all(life.ended_at is not None for life in lives)
        if seen_at > put_seen_at and (is_over or clock.now() - put_at >= _EVERY_S):
            return lives
    return []


def put_ledger(
    store: Store, staging: StagingDir, run_key: str, lives: Sequence[Life], *, clock: Clock | None = None
) -> None:
    """Put a node's records of one attempt. Idempotent."""
    attempt = lives[0].attempt
    body = {"ranks": [asdict(life) for life in lives]}
    key = f"{LEDGER}{attempt_order(attempt)}/node-{node_id(staging)}.json"
    store.put(key, json.dumps(body, indent=1).encode() + b"\n")
    path = _put_path(staging, run_key, attempt)
    with os_errors("the ledger cannot be marked as put", path=path):
        now = (clock or SystemClock()).now()
        path.write_text(json.dumps([max(life.seen_at for life in lives), now]))


def _last_put(staging: StagingDir, run_key: str, attempt: int) -> tuple[float, float]:
    """(newest record in it, when) of the last put; zeros: there was none."""
    try:
        seen_at, at = json.loads(_put_path(staging, run_key, attempt).read_text())
        return float(seen_at), float(at)
    except (OSError, ValueError, TypeError):
        return 0.0, 0.0


def _put_path(staging: StagingDir, run_key: str, attempt: int) -> Path:
    return lives_folder(staging, run_key) / f"a{attempt:06d}.put"


# --- the ledger ---


def load_ledger(store: Store, staging: StagingDir, run_key: str) -> Ledger:
    """Book the time of a run, from the store and what this node's staging directory knows besides.

    Raises:
        CorruptError: a record cannot be read.
        UnavailableError: the store cannot be reached.
    """
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-ledger") as pool:
        lives = _merged(_lives_in(store, pool), all_lives(staging, run_key))
        local: dict[int, list[RankRecovery]] = {}
        for record in local_recoveries(staging, run_key):
            local.setdefault(record.attempt, []).append(record)
        recoveries = _merged(all_recoveries(store, pool.map), local)
        numbers = sorted(list_attempts(store))
        attempts = list(pool.map(lambda number: read_attempt(store, number), numbers))
    return account(
        [
            _start(
                attempt,
                recoveries.get(attempt.number, []),
                lives.get(attempt.number, []),
                newest=attempt is attempts[-1],
            )
            for attempt in attempts
        ]
    )


def _merged(store: Mapping[int, list[_Told]], here: Mapping[int, list[_Told]]) -> dict[int, list[_Told]]:
    """Of each rank of each attempt one record, this node's own first: it is newer."""
    found: dict[int, dict[int, _Told]] = {}
    for told in (store, here):
        for attempt, records in told.items():
            found.setdefault(attempt, {}).update({record.rank: record for record in records})
    return {attempt: [ranks[rank] for rank in sorted(ranks)] for attempt, ranks in found.items()}


def _lives_in(store: Store, pool: ThreadPoolExecutor) -> dict[int, list[Life]]:
    names = [(match, info.key) for info in store.list_keys(LEDGER) if (match := _KEY.fullmatch(info.key))]

    def read(key: str) -> list[Life]:
        try:
            bodies = json.loads(store.get(key))["ranks"]
            known = Life.__dataclass_fields__  # a newer version may have written more
            return [Life(**{name: body[name] for name in known if name in body}) for body in bodies]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError("a record of the ledger cannot be read", code="ledger", key=key) from error

    found: dict[int, list[Life]] = {}
    for (match, _), lives in zip(names, pool.map(read, [key for _, key in names]), strict=True):
        found.setdefault(int(match[1]), []).extend(lives)
    return found


def _start(
    attempt: Attempt, recoveries: Sequence[RankRecovery], lives: Sequence[Life], *, newest: bool
) -> Start:
    """What is known of one start, over all ranks that have told."""
    told = summarize(recoveries) if recoveries else None
    ends = ends_of([summary_of(lives)])
    is_running = newest and any(life.ended_at is None for life in lives)
    ended_at = ends.failed_at if ends is not None else None
    if is_running:
        ended_at = max(life.seen_at for life in lives)
    return Start(
        attempt=attempt.number,
        from_step=attempt.parent.step if attempt.parent else 0,
        claimed_at=attempt.started_at,
        cause=told.cause if told is not None else "start",
        began_at=told.failed_at if told is not None else None,
        first_step_at=told.failed_at + told.wall_s if told is not None else None,
        phases={phase.name: phase.critical_s for phase in told.phases} if told is not None else {},
        ended_at=ended_at,
        is_running=is_running,
        step=ends.step if ends is not None else None,
        # Ranks wait for the slowest, so the longest of them is what the job was held up.
        save_s=max((_spent(life, _SAVES, ended_at) for life in lives), default=0.0),
        data_s=max((_spent(life, _DATA, ended_at) for life in lives), default=0.0),
        partial_s=min((_in_step(life, ended_at) for life in lives if not life.closed), default=0.0),
    )


def _spent(life: Life, phases: Sequence[str], ended_at: float | None) -> float:
    """Seconds in these phases until ``ended_at``: the trainer's last word, and what came or went since."""
    found = sum(life.spent_s.get(phase, 0.0) for phase in phases)
    if ended_at is None or life.phase not in phases:
        return found
    # A hang ends before the last word on it: what the phase took after its beginning is not counted then.
    since = max(life.moved_at, life.spent_at)
    return found + max(ended_at - since, min(0.0, life.moved_at - life.spent_at))


def _in_step(life: Life, ended_at: float | None) -> float:
    """How long the rank had been in a step that was never complete."""
    return max(0.0, ended_at - life.moved_at) if ended_at is not None and life.phase in _STEPS else 0.0
