"""Each library in a process of its own, with its own training run; all at hand, one working at a time.

Libraries leave threads, patches and memory behind, so they must not share a process. Nor may one be measured
to the end before the next begins: the machine changes with the minutes. So every contestant is a process that
is told, in random order, round after round, to do its next turn.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.accounting import Cost, Meter, wait_until_idle
from benchmarks.peers import PEERS, Peer, make_importable, missing
from benchmarks.report import Report
from benchmarks.training import Training, make_training

__all__ = ["Contestant", "ContestantError", "Stage", "Turn", "contestants", "rounds"]

# Imported once by the process that all contestants are forked from: torch takes seconds of CPU.
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.checkpoint.staging",
    "benchmarks.peers",
]
_TURN_S = 120.0


class ContestantError(RuntimeError):
    """A contestant failed; the message says how."""


@dataclass(slots=True)
class Stage:
    """What a turn works on, in the contestant's process.

    Attributes:
        kept: what one turn leaves for the next.
    """

    training: Training
    peer: Peer
    folder: Path
    kept: dict[str, Any] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def new_path(self) -> Path:
        return self.folder / f"save-{next(self.numbers)}"


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one turn: what its function returned, and what it cost."""

    value: Any
    cost: Cost


class Contestant:
    """A process that plays the turns of one peer.

    Args:
        title: a key of ``PEERS``.
        folder: its own.
        nbytes: wanted size of the training state.
        threads: compute threads of the training.
        environment: added to the process's; it is forked from a server that may be older.
    """

    def __init__(
        self,
        title: str,
        folder: Path,
        *,
        nbytes: int,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.title = title
        self.peer = PEERS[title]
        folder.mkdir(parents=True)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, title, folder, nbytes, threads, dict(environment or {}))
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def play(self, turn: Callable[..., Any], /, **arguments: Any) -> Turn:
        """Run ``turn(stage, **arguments)``, a function importable by name, in the process.

        Raises:
            ContestantError: it raised, took longer than two minutes, or the process died.
        """
        with self._broken_is_an_error():
            self._connection.send((turn, arguments))
        return self.answer()

    def answer(self) -> Turn:
        """Wait for the next answer; the first says that the process is set up."""
        with self._broken_is_an_error():
            if not self._connection.poll(_TURN_S):
                raise ContestantError(f"no answer in {_TURN_S:.0f} s")
            outcome = self._connection.recv()
        if isinstance(outcome, Turn):
            return outcome
        raise ContestantError(outcome)

    @contextlib.contextmanager
    def _broken_is_an_error(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise ContestantError("its process died") from error

    def close(self) -> None:
        """Let it close its library, for ten seconds; then kill it and what it started."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
            self._connection.poll(10)
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(10)


@contextlib.contextmanager
def contestants(
    titles: Sequence[str],
    root: Path,
    report: Report,
    *,
    nbytes: int,
    threads: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[list[Contestant]]:
    """Start a contestant for each title; those that cannot be had become rows of the report that say why."""
    running: list[Contestant] = []
    try:
        for number, title in enumerate(titles):
            if absent := missing(PEERS[title]):
                report.absent(title, "not installed: " + ", ".join(absent))
                continue
            folder = root / f"contestant-{number}"
            each = Contestant(title, folder, nbytes=nbytes, threads=threads, environment=environment)
            try:
                each.answer()
            except ContestantError as error:
                report.absent(title, f"failed to start: {error}")
                each.close()
                continue
            running.append(each)
        # Some go on in the background when they are ready: a first save would be measured beside that.
        wait_until_idle()
        yield running
    finally:
        for each in running:
            each.close()
        shutil.rmtree(root, ignore_errors=True)


def rounds(
    running: list[Contestant],
    report: Report,
    count: int,
    turn: Callable[..., Any],
    arguments: Callable[[Contestant, int], dict[str, Any]] = lambda each, number: {},
    *,
    seed: int = 0,
    time_is_up: Callable[[], bool] = lambda: False,
) -> dict[str, list[Turn]]:
    """Play ``count`` rounds, each in a new random order; return the turns of each title, round by round.

    One that fails is out; the report names the reason. When the time is up, no round but the first begins.
    """
    order = random.Random(seed)
    turns: dict[str, list[Turn]] = {each.title: [] for each in running}
    for number in range(count):
        if number and time_is_up():
            break
        for each in order.sample(running, len(running)):
            try:
                turns[each.title].append(each.play(turn, **arguments(each, number)))
            except ContestantError as error:
                report.absent(each.title, f"failed: {error}")
                running.remove(each)
                del turns[each.title]
                each.close()
    return turns


def _next(connection: Connection) -> Any:
    """Return what to do next; None at the end, also where the benchmark ended without a word."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _serve(
    connection: Connection,
    title: str,
    folder: Path,
    nbytes: int,
    threads: int,
    environment: dict[str, str],
) -> None:
    """The contestant's process: set up, then turn after turn until it is told to stop."""
    import torch

    os.setsid()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # libraries say at every call that they run without accelerator
    quiet = os.open(folder / "output.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(threads)
    make_importable()
    stage: Stage | None = None
    try:
        with Meter() as meter:
            training = make_training(nbytes)
            stage = Stage(training, PEERS[title](training, folder), folder)
        connection.send(Turn(None, meter.cost))
        while (message := _next(connection)) is not None:
            turn, arguments = message
            with Meter() as meter:
                value = turn(stage, **arguments)
            connection.send(Turn(value, meter.cost))
        stage.peer.close()
        connection.send(Turn(None, meter.cost))
    except BaseException as error:  # noqa: BLE001  # told to the parent, whatever it is
        traceback.print_exc()
        line = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError):
            connection.send(line if len(line) < 300 else f"{line[:120]} ... {line[-160:]}")
    sys.stdout.flush()
    os._exit(0)  # some libraries leave threads that never end
