"""How a run stops on request, and what it says of that: options, exit codes, the reason file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Literal

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.signals import parse_signals

__all__ = [
    "EXIT_DO_NOT_RESTART",
    "EXIT_NOT_SAVED",
    "EXIT_SAVED",
    "SAVED",
    "Achieved",
    "StopOptions",
    "StopReason",
    "StopTraining",
    "write_reason",
]

# Source: the contract that launchers are told; 75 is EX_TEMPFAIL of sysexits.h, 93 NVRx's "no restart".
EXIT_SAVED = 75
EXIT_NOT_SAVED = 76
EXIT_DO_NOT_RESTART = 93

Achieved = Literal["committed", "replicated", "sealed", "copied", "nothing"]
SAVED: tuple[Achieved, ...] = ("committed", "replicated", "sealed")
"""What a restart can rely on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """What the reason file says.

    Attributes:
        cause: "SIGTERM", "SIGUSR1", "notice", ... or "no-progress".
        achieved: how far the save got: "committed" in the store; "replicated": sealed on this node's disk and
            on as many others as ``replication_factor`` says; "sealed" on this node's disk alone, from where
            the staging server goes on; "copied" to memory of the flusher; "nothing".
        step: that was saved for the stop; None where none was.
        last_saved: the newest step this rank has handed over before, which a restart may find.
        absent: ranks that did not answer, so that no common step could be had.
        exit_code: 75 saved, 76 not saved, 93 do not restart.
    """

    cause: str
    asked_by_rank: int
    rank: int
    world_size: int
    attempt: int
    achieved: Achieved
    step: int | None
    last_saved: int | None
    absent: tuple[int, ...]
    exit_code: int
    url: str
    node: str
    at: float
    message: str


class StopTraining(SystemExit):
    """Ends the process with the exit code of :attr:`reason`, unless somebody catches it.

    A SystemExit, so that ``except Exception`` in a training loop lets it pass.
    """

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.exit_code)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions:
    """How a run stops on request.

    Attributes:
        signals: that ask for a stop; empty: none.
        notice_file: its appearance asks for a stop; looked for by a thread, about four times per second.
        grace_s: from the request to the end of the process. torchrun and Kubernetes kill after 30 s.
        on_stop: "exit" raises StopTraining from step(); "flag" only sets ``should_stop``, at the same
            step on all ranks.
        max_no_progress: so many starts in a row may resume from one checkpoint without saving; 0: any number.
        reason_file: where the first rank of each node writes what was achieved, besides the staging
            directory.
    """

    signals: tuple[Signals, ...] = ()
    notice_file: Path | None = None
    grace_s: float = 25.0
    on_stop: Literal["exit", "flag"] = "exit"
    reason_file: Path | None = None
    max_no_progress: int = 0

    def __post_init__(self) -> None:
        if self.on_stop not in ("exit", "flag"):
            raise InvalidInputError("not one of the allowed values", option="on_stop", value=self.on_stop)
        if not self.grace_s > 0:
            raise InvalidInputError("grace_s must be above 0", value=self.grace_s)

    @classmethod
    def of(
        cls,
        *,
        signals: Collection[str] | None,
        notice_file: str | os.PathLike[str] | None,
        grace_s: float | None,
        on_stop: Literal["exit", "flag"],
    ) -> StopOptions:
        """Complete what was not given from the environment. Raises InvalidInputError."""
        env = os.environ
        notice = notice_file or env.get("CKPT_NOTICE_FILE")
        reason = env.get("CKPT_REASON_FILE")
        grace = _number("CKPT_STOP_GRACE_S", "25") if grace_s is None else grace_s
        return cls(
            signals=parse_signals(signals, env.get("CKPT_STOP_SIGNALS")),
            notice_file=Path(notice) if notice else None,
            grace_s=grace,
            on_stop=on_stop,
            reason_file=Path(reason) if reason else None,
            max_no_progress=int(_number("CKPT_MAX_NO_PROGRESS", "0")),
        )


def _number(variable: str, default: str) -> float:
    try:
        return float(os.environ.get(variable, default))
    except ValueError:
        raise InvalidInputError("not a number", variable=variable, value=os.environ[variable]) from None


def write_reason(path: Path, reason: StopReason) -> None:
    """Write the reason file: one JSON object, replaced whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{reason.rank}")
    tmp.write_text(json.dumps(asdict(reason), indent=1) + "\n")
    tmp.replace(path)
