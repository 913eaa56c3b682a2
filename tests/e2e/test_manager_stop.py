"""Stops on request in one process: without leaving, in a long phase, beside a due save and other handlers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager, StopTraining
from tests.support.runs import Live, Place

WAIT_S = 30.0
STOP = signal.SIGUSR2  # not a usual one: managers that other tests of this process left open would end it


def started(place: Place, live: Live, **more: object) -> CheckpointManager:
    return place.started(live, stop_signals=[STOP.name], **more)


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline


def train_until_stopped(live: Live, manager: CheckpointManager, start: int = 0) -> StopTraining:
    """Train on and on from ``start``; returns the exit that ends it."""
    step = start
    try:
        while True:
            live.train(range(step, step + 1), manager)
            step += 1
    except StopTraining as found:
        return found


def test_flag_lets_the_loop_end_by_itself_after_the_common_step_was_saved(place: Place) -> None:
    live = Live.new()
    with started(place, live, on_stop="flag") as manager:
        os.kill(os.getpid(), STOP)
        step = 0
        while not manager.should_stop:
            live.train(range(step, step + 1), manager)
            step += 1
        reason = manager.stop_reason
        assert reason is not None
        assert (reason.step, reason.achieved, reason.exit_code) == (step, "committed", 75)
        live.train(range(step, step + 2), manager)  # nobody is kept from going on
        assert manager.latest_step() == step


def test_long_phase_between_two_steps_can_be_left(place: Place) -> None:
    """Case I61."""
    live = Live.new()
    manager = started(place, live)
    live.train(range(3), manager)
    os.kill(os.getpid(), STOP)

    def evaluate() -> bool:
        try:
            manager.check_stop()
        except StopTraining as found:
            stopped.append(found)
        return bool(stopped)

    stopped: list[StopTraining] = []
    until(evaluate)
    manager.close()
    assert (stopped[0].code, stopped[0].reason.step) == (75, 3)
    assert manager.latest_step() == 3


def test_save_that_is_due_at_the_common_step_is_made_once(place: Place) -> None:
    live = Live.new()
    manager = started(place, live, save_interval_steps=1)
    os.kill(os.getpid(), STOP)
    found = train_until_stopped(live, manager)
    manager.close()
    assert manager.all_steps()[-1] == found.reason.step


def test_notice_file_that_appears_is_a_request(place: Place, tmp_path: Path) -> None:
    live = Live.new()
    notice = tmp_path / "preempted"
    manager = started(place, live, notice_file=notice)
    live.train(range(2), manager)
    notice.touch()
    found = train_until_stopped(live, manager, 2)
    manager.close()
    assert (found.code, found.reason.cause) == (75, "notice")


def test_handler_of_the_program_is_called_too_and_is_back_at_the_end(place: Place) -> None:
    heard: list[int] = []

    def mine(number: int, _: object) -> None:
        heard.append(number)

    signal.signal(STOP, mine)
    try:
        live = Live.new()
        manager = started(place, live)
        os.kill(os.getpid(), STOP)
        train_until_stopped(live, manager)
        assert heard == [STOP]
        manager.close()
        assert signal.getsignal(STOP) is mine
    finally:
        signal.signal(STOP, signal.SIG_DFL)


def test_signals_are_left_alone_where_that_is_wanted(place: Place) -> None:
    with place.started(Live.new(), stop_signals=()):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("wrong", [{"grace_s": 0.0}, {"on_stop": "never"}, {"stop_signals": ["SIGKILL"]}])
def test_wrong_options_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    staging = tmp_path / "staging"
    with pytest.raises(InvalidInputError):
        CheckpointManager(tmp_path / "run", model=Live.new().model, staging_dir=staging, **wrong)  # type: ignore[arg-type]
    assert not staging.exists()
