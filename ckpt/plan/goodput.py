"""The goodput ledger: every second of a run in one class. Pure arithmetic over what is known of each start.

============ ==============================================================================================
productive   steps that count: what the newest line of the run was trained with
data         waiting for data (``with ckpt.phase("data")``), in steps that count or not
save         the training thread held up by saves, the last one of a stop included
lost         steps that were made again later, or never counted, and the part of a step at a failure
restart      from a failure to the end of the first step after it; the first start likewise
down         nobody knew of the run: from the last sign of one start to the first of the next
unknown      training of a start of which no rank's record is left
============ ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["CLASSES", "Ledger", "LedgerRow", "Start", "account"]

CLASSES = ("productive", "data", "save", "lost", "restart", "down", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the run. Times are Unix seconds; None: nobody has told.

    Attributes:
        attempt: its number.
        from_step: what it resumed from; 0 for a fresh start.
        cause: why it was started; see :class:`ckpt.ops.recovery.RankRecovery`.
        began_at: when the attempt before failed; where that is not known, when this one's process began.
        claimed_at: when it took its attempt number, while it restored.
        first_step_at: when its first step was complete.
        phases: seconds of that time, by name.
        ended_at: when it stopped getting on, or was seen last.
        is_running: it has not ended.
        step: optimizer steps completed at ``ended_at``; None: nobody has told.
        save_s, data_s: that the training thread was held up, after the first step.
        partial_s: before ``ended_at``, in a step that was never complete.
    """

    attempt: int
    from_step: int = 0
    cause: str = "start"
    began_at: float | None = None
    claimed_at: float | None = None
    first_step_at: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    ended_at: float | None = None
    is_running: bool = False
    step: int | None = None
    save_s: float = 0.0
    data_s: float = 0.0
    partial_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """What became of one start's time.

    Attributes:
        steps: that it completed; None: not known.
        lost_steps: of them those that did not count in the end.
        seconds: by class, of CLASSES; they add up to ``ended_at - began_at``, with "down" before it.
        phases: of "restart", as far as they are known.
    """

    attempt: int
    cause: str
    from_step: int
    steps: int | None
    lost_steps: int
    began_at: float
    ended_at: float
    is_running: bool
    seconds: Mapping[str, float]
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All starts, and their sum.

    Attributes:
        rows: oldest first; starts that left no trace of time are left out.
        seconds: by class; they add up to ``wall_s``.
    """

    rows: Sequence[LedgerRow]
    seconds: Mapping[str, float]
    wall_s: float

    @property
    def effective_ratio(self) -> float:
        """Effective training time ratio: productive seconds by all seconds."""
        return self.seconds["productive"] / self.wall_s if self.wall_s > 0 else 0.0


def account(starts: Sequence[Start]) -> Ledger:
    """Book every second between the first sign of the run and the last.

    Args:
        starts: of one run, by attempt, oldest first.
    """
    rows: list[LedgerRow] = []
    cursor: float | None = None
    for i, start in enumerate(starts):
        later = starts[i + 1 :]
        known = [at for at in (start.began_at, cursor, start.claimed_at) if at is not None]
        signs = [at for at in (_end(start, later), start.claimed_at) if at is not None]
        if not known or not (signs or start.first_step_at is not None):
            continue
        began, ended = known[0], max(signs, default=None)
        kept = min((other.from_step for other in later), default=None)
        row = _row(start, began=began, ended=ended, cursor=cursor, kept=kept)
        rows.append(row)
        cursor = row.ended_at
    seconds = {name: sum(row.seconds[name] for row in rows) for name in CLASSES}
    return Ledger(rows=rows, seconds=seconds, wall_s=sum(seconds.values()))


def _end(start: Start, later: Sequence[Start]) -> float | None:
    """When ``start`` ended: as the next one that knows of it says, else as it was seen last."""
    for other in later:
        if other.began_at is not None and other.cause != "start":
            return other.began_at
        if other.ended_at is not None:
            break
    return start.ended_at


def _row(
    start: Start, *, began: float, ended: float | None, cursor: float | None, kept: int | None
) -> LedgerRow:
    down = max(0.0, began - cursor) if cursor is not None else 0.0
    began = max(began, cursor) if cursor is not None else began  # clocks of nodes differ
    first = start.first_step_at if start.first_step_at is not None else ended
    assert first is not None
    first = max(first, began)
    ended = max(ended, first) if ended is not None else first
    seconds = dict.fromkeys(CLASSES, 0.0) | {"down": down, "restart": first - began}
    lost_steps = 0
    if start.step is None:
        seconds["unknown"] = ended - first
    else:
        top = start.step if kept is None else max(start.from_step, min(start.step, kept))
        lost_steps = start.step - top
        _book_training(seconds, start, ended - first, lost_steps)
    return LedgerRow(
        attempt=start.attempt,
        cause=start.cause,
        from_step=start.from_step,
        steps=None if start.step is None else start.step - start.from_step,
        lost_steps=lost_steps,
        began_at=began,
        ended_at=ended,
        is_running=start.is_running,
        seconds=seconds,
        phases=dict(start.phases),
    )


def _book_training(seconds: dict[str, float], start: Start, training_s: float, lost_steps: int) -> None:
    """Divide the time after the first step. Steps of one start are taken to be of one length."""
    assert start.step is not None
    save = min(start.save_s, training_s)
    data = min(start.data_s, training_s - save)
    rest = training_s - save - data
    partial = 0.0 if start.is_running else min(start.partial_s, rest)
    steps = start.step - start.from_step - 1  # the first one is part of the restart
    per_step = (rest - partial) / steps if steps > 0 else 0.0
    lost = min(rest, partial + lost_steps * per_step)
    seconds |= {"save": save, "data": data, "lost": lost, "productive": rest - lost}
