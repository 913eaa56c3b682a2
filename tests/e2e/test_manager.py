"""The manager from end to end: real flusher child, real embedded server, real files; one process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import (
    RefusedError,
    SnapshotTornError,
    TimeoutExceededError,
    UnavailableError,
)
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits, bits_of
from tests.support.runs import Live, Place, assert_equal_runs, capture_held, save_steps, seed_all
from tests.support.server import eventually

WAIT_S = 30.0


pytestmark = pytest.mark.usefixtures("one_thread")


# --- exactness ---


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_restored_run_goes_on_exactly_like_the_one_that_was_never_interrupted(
    place: Place, mode: Any
) -> None:
    reference = Live.new()
    seed_all(1)
    expected = reference.train(range(26))

    live = Live.new()
    with place.manager(live, mode=mode, save_interval_steps=6) as manager:
        assert manager.restore() == 0
        seed_all(1)
        losses = live.train(range(8), manager)
        assert manager.attempt == 1
    assert losses == expected[:8]

    at_save = Live.new()
    seed_all(1)
    at_save.train(range(6))

    other = Live.new(seed=9)
    other.train(range(3))
    other.extra["leftover"] = 1
    with place.manager(other, mode=mode, save_interval_steps=6) as manager:
        assert manager.restore() == 6
        assert manager.attempt == 2
        assert_equal_runs(other, at_save)
        assert other.train(range(6, 26), manager) == expected[6:]
    assert_equal_runs(other, reference)


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
@pytest.mark.parametrize("save_at", [0, 1])
def test_saving_before_and_after_the_first_step_changes_nothing(
    place: Place, mode: Any, save_at: int
) -> None:
    reference = Live.new()
    expected = reference.train(range(5))

    live = Live.new()
    with place.started(live, mode=mode) as manager:
        losses = live.train(range(save_at))
        manager.save(save_at)
        losses += live.train(range(save_at, 5))
    assert losses == expected
    assert_equal_runs(live, reference)

    other = Live.new(seed=3)
    with place.manager(other) as manager:
        assert manager.restore() == save_at
    assert other.train(range(save_at, 5)) == expected[save_at:]


def test_I78_restore_right_after_a_save_in_the_same_process_gets_that_save(place: Place) -> None:
    live = Live.new()
    with place.started(live) as manager:
        live.train(range(2))
        expected = live.state()
        manager.save(2)
        live.train(range(2, 4))
        assert manager.restore() == 2
        assert_same_bits(live.state(), expected)


def test_two_runs_of_one_process_are_saved_in_turn_and_do_not_meet(tmp_path: Path, staging: Path) -> None:
    """Case I66."""
    places = [Place(f"file://{tmp_path}/store/{name}", staging) for name in ("one", "two")]
    lives = [Live.new(seed) for seed in (1, 2)]
    with contextlib.ExitStack() as stack:
        managers = [
            stack.enter_context(place.started(live, mode="overlapped"))
            for place, live in zip(places, lives, strict=True)
        ]
        expected: list[dict[str, torch.Tensor]] = []
        for step in (1, 2, 3):
            for live in lives:
                live.train(range(step - 1, step))
            expected = [live.state() for live in lives]
            for manager in managers:  # nobody waits for the other's save
                manager.save(step)
    for place, state in zip(places, expected, strict=True):
        other = Live.new(seed=5)
        with place.manager(other) as manager:
            assert manager.restore() == 3
            assert_same_bits(other.state(), state)
            assert manager.all_steps() == [1, 2, 3]


def test_going_back_to_an_earlier_step_begins_an_attempt_that_latest_follows(place: Place) -> None:
    live, states = save_steps(place, [1, 3])
    with place.manager(live) as manager:
        assert manager.restore(1) == 1
        assert_same_bits(live.state(), states[1])
        assert manager.attempt == 2
        assert manager.latest_step() == 1
        live.train(range(1, 2))
        manager.save(2).upload_completion.result(WAIT_S)
        assert manager.latest_step() == 2
        assert manager.all_steps() == [1, 2, 3]
        assert manager.restore("000000000003.a000001") == 3
        assert_same_bits(live.state(), states[3])


def test_plain_state_is_restored_in_the_callers_own_dict_and_stateful_objects_by_their_loader(
    place: Place,
) -> None:
    """Case I85."""

    class Loader:
        def __init__(self) -> None:
            self.position: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.position

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state

    loader = Loader()
    loader.position = {"queue": [torch.arange(3), (torch.ones(0), {"a": torch.tensor(True)})], (1, "k"): b"x"}
    plain: dict[Any, Any] = {"epoch": 3, "list": [1, 2]}
    live = Live.new()
    with place.started(live, dataloader=loader, state={"extra": live.extra, "plain": plain}) as manager:
        manager.save(0)
        loader.position["queue"][0].add_(1)  # at once after the save: what was stored must be a copy
        plain["list"].append(3)

    other = Loader()
    mine: dict[Any, Any] = {"epoch": 0, "gone": 1}
    with place.manager(live, dataloader=other, state={"extra": live.extra, "plain": mine}) as manager:
        manager.restore()
    assert mine == {"epoch": 3, "list": [1, 2]}
    assert other.position["queue"][0].tolist() == [0, 1, 2]
    assert other.position["queue"][1][0].shape == (0,)
    assert other.position["queue"][1][1]["a"].dtype == torch.bool
    assert other.position[1, "k"] == b"x"


# --- overlapped ---


def test_snapshot_of_a_state_that_changed_meanwhile_is_thrown_away_and_taken_again(place: Place) -> None:
    live = Live.new()
    with place.started(live, mode="overlapped") as manager:
        live.train(range(1))
        with capture_held(manager) as gate:
            handle = manager.save(1)
            assert not handle.staging_completion.done()
            with torch.no_grad():
                live.model.up.weight.mul_(2)
            gate.set()
            with pytest.raises(SnapshotTornError) as caught:
                handle.staging_completion.result(WAIT_S)
        assert caught.value.code == "torn"
        assert "model.up.weight" in str(caught.value)
        assert isinstance(handle.upload_completion.exception(WAIT_S), SnapshotTornError)

        live.train(range(1, 2))
        expected = live.state()
        retaken = manager.step(1)  # no interval: taken because the last was torn
        assert retaken is not None
        assert retaken.staging_completion.done()  # blocking
        assert manager.step(2) is None
        retaken.upload_completion.result(WAIT_S)
        assert manager.all_steps() == [2]
    other = Live.new(seed=4)
    with place.manager(other) as manager:
        manager.restore()
    assert_same_bits(other.state(), expected)


def test_average_that_the_loop_updates_after_the_save_tears_one_snapshot_only(place: Place) -> None:
    live = Live.new()
    average = torch.optim.swa_utils.AveragedModel(live.model)
    with place.started(live, mode="overlapped", state={"ema": average}) as manager:
        for step in range(3):
            live.train(range(step, step + 1))
            with capture_held(manager) as gate:
                handle = manager.save(step + 1)
                average.update_parameters(live.model)  # in place, no optimizer step
                gate.set()
                outcome = handle.staging_completion.exception(WAIT_S)
            assert isinstance(outcome, SnapshotTornError) is (step == 0)


def test_same_step_may_be_saved_again_when_its_snapshot_was_torn(place: Place) -> None:
    """Case I66."""
    live = Live.new()
    with place.started(live, mode="overlapped") as manager:
        with capture_held(manager):
            torn = manager.save(1)
            with torch.no_grad():
                live.model.up.weight.zero_()
        assert isinstance(torn.upload_completion.exception(WAIT_S), SnapshotTornError)
        manager.save(1).upload_completion.result(WAIT_S)
        with pytest.raises(RefusedError):
            manager.save(1)


def test_torn_snapshot_that_nobody_took_again_is_an_error_at_the_end(place: Place) -> None:
    live = Live.new()
    manager = place.started(live, mode="overlapped")
    with capture_held(manager), torch.no_grad():
        manager.save(1)
        live.model.up.weight.zero_()
    with pytest.raises(SnapshotTornError), manager:
        pass


def test_edit_under_the_lock_waits_for_the_copy_and_tears_nothing(place: Place) -> None:
    live = Live.new()
    with place.started(live, mode="overlapped") as manager:
        expected = live.state()
        with capture_held(manager) as gate:
            handle = manager.save(1)

            def edit() -> None:
                with manager.lock(), torch.no_grad():
                    live.model.up.weight.zero_()

            editor = threading.Thread(target=edit)
            editor.start()
            editor.join(0.2)
            assert editor.is_alive()
            gate.set()
            editor.join(WAIT_S)
        handle.upload_completion.result(WAIT_S)
        assert not live.model.up.weight.any()
        manager.restore()
        assert_same_bits(live.state(), expected)


def test_optimizer_step_waits_for_the_copy_and_forward_and_backward_do_not(place: Place) -> None:
    live = Live.new()
    with place.started(live, mode="overlapped") as manager:
        live.train(range(2))
        expected = live.state()
        with capture_held(manager) as gate:
            handle = manager.save(2)
            tokens = torch.zeros(1, 3, dtype=torch.long)
            live.model(tokens).square().sum().backward()  # also changes the buffer `seen`
            stepper = threading.Thread(target=live.optimizer.step)
            stepper.start()
            stepper.join(0.2)
            assert stepper.is_alive()
            gate.set()
            stepper.join(WAIT_S)
        handle.upload_completion.result(WAIT_S)
        assert bits_of(live.model.up.weight) != bits_of(expected["model.up.weight"])
        assert bits_of(live.model.seen) != bits_of(expected["model.seen"])
        manager.restore()
        assert_same_bits(live.state(), expected)


def test_running_statistics_are_those_of_the_moment_of_the_save(place: Place) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = {"model": model, "optimizer": optimizer, "staging_dir": place.staging}
    with CheckpointManager(place.url, **made) as manager:
        manager.restore()
        for n in range(3):
            model(torch.randn(8, 3) + n).sum().backward()
            optimizer.step()
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with capture_held(manager):
            handle = manager.save(3)
            model(torch.randn(8, 3) + 9)
        handle.upload_completion.result(WAIT_S)
        assert model[1].num_batches_tracked == 4
        manager.restore()
        assert_same_bits(model.state_dict(), expected)


def test_training_does_not_wait_for_the_capture_thread(place: Place) -> None:
    live = Live.new()
    with place.started(live, mode="overlapped") as manager, capture_held(manager):
        handle = manager.save(1)
        assert not handle.staging_completion.done()
        assert manager.should_save(1) is False


# --- the end of the block ---


def test_with_block_waits_for_the_commit(place: Place) -> None:
    """Case I59."""
    live = Live.new()
    with place.started(live) as manager:
        handle = manager.save(1)
    assert handle.done()
    assert manager.all_steps() == [1]


def test_exception_in_the_block_does_not_lose_what_was_handed_over(place: Place) -> None:
    """Case I59."""
    live = Live.new()
    manager = place.started(live, mode="overlapped")
    expected = live.state()
    with pytest.raises(ZeroDivisionError), manager:
        manager.save(1 // (manager.save(1).step - 1))
    eventually(lambda: manager.all_steps() == [1], timeout_s=WAIT_S)
    other = Live.new(seed=2)
    with place.manager(other) as manager:
        assert manager.restore() == 1
    assert_same_bits(other.state(), expected)


def test_nobody_hangs_on_the_handle_of_a_manager_that_was_closed(place: Place) -> None:
    live = Live.new()
    manager = place.started(live)
    handle = manager.save(1)
    manager.close()
    handle.local_completion.result(WAIT_S)
    with contextlib.suppress(UnavailableError):  # unless the commit was faster than the close
        handle.upload_completion.result(WAIT_S)
    eventually(lambda: manager.all_steps() == [1], timeout_s=WAIT_S)


def test_waiting_has_a_limit_when_asked_for(place: Place) -> None:
    live = Live.new()
    manager = place.started(live)
    manager.save(1).upload_completion.result(WAIT_S)
    pid = manager._pipeline._flusher.pid
    try:
        os.kill(pid, signal.SIGSTOP)
        manager.save(2)
        with pytest.raises(TimeoutExceededError) as caught:
            manager.wait_until_finished(0.1)
        assert caught.value.context["steps"] == [2]
    finally:
        os.kill(pid, signal.SIGCONT)
    manager.wait_until_finished(WAIT_S)
    manager.close()
    assert manager.all_steps() == [1, 2]


def test_retention_keeps_the_newest_and_every_nth(place: Place) -> None:
    live = Live.new()
    with place.started(live, keep_last=2, keep_every=4) as manager:
        for step in range(1, 8):
            manager.save(step).upload_completion.result(WAIT_S)
        eventually(lambda: manager.all_steps() == [4, 6, 7], timeout_s=WAIT_S)
