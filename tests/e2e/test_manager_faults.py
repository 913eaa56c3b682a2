"""The manager when its helpers are slow, stopped or dead, and when the trainer forks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt.errors import BusyError, CkptError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import read_manifest
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.runs import Live, Place, stop_server
from tests.support.server import eventually

WAIT_S = 30.0


pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def flusher_pid(manager: CheckpointManager) -> int:
    return manager._pipeline._flusher.pid


# --- a slow flusher ---


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_busy_saves_are_skipped_when_asked_for(place: Place, mode: Any) -> None:
    """Case I65."""
    live = Live.new()
    with place.started(live, on_busy="skip", mode=mode) as manager:
        manager.save(1).upload_completion.result(WAIT_S)
        with stopped(flusher_pid(manager)):
            manager.save(2)
            skipped = manager.save(3)
            assert skipped.skipped
            assert isinstance(skipped.upload_completion.exception(0), BusyError)
            assert manager.step(3) is None  # a skipped save is no failure
        manager.wait_until_finished(WAIT_S)
        again = manager.save(3)  # the step was not used up
        assert not again.skipped
        again.upload_completion.result(WAIT_S)
        assert manager.all_steps() == [1, 2, 3]


def test_busy_saves_fail_when_asked_for_and_training_can_go_on(place: Place) -> None:
    """Case I65."""
    live = Live.new()
    with place.started(live, on_busy="fail") as manager:
        manager.save(1).upload_completion.result(WAIT_S)
        with stopped(flusher_pid(manager)):
            manager.save(2)
            with pytest.raises(BusyError) as caught:
                manager.save(3)
            assert caught.value.context["step"] == 3
            live.train(range(1))
        manager.wait_until_finished(WAIT_S)
        manager.save(3).upload_completion.result(WAIT_S)
        assert manager.all_steps() == [1, 2, 3]


def test_busy_saves_wait_by_default_and_say_for_how_long(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Case I65."""
    live = Live.new()
    with place.started(live) as manager:
        manager.save(1).upload_completion.result(WAIT_S)
        pid = flusher_pid(manager)
        with stopped(pid):
            first = manager.save(2)
            expected = live.state()
            timer = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
            timer.start()
            live.train(range(1))
            manager.save(3).upload_completion.result(WAIT_S)
            timer.join()
        assert first.local_completion.done()
        waited = next(r for r in caplog.records if getattr(r, "event", "") == "save.waited")
        assert waited.fields["waited_s"] > 0.05  # type: ignore[attr-defined]
        first.upload_completion.result(WAIT_S)
        manager.restore(2)  # the arena was not overwritten while it was read
        assert_same_bits(live.state(), expected)


def test_saves_that_are_faster_than_the_server_take_one_arena_and_are_published_in_their_order(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Case I65."""
    live = Live.new()
    with place.started(live, keep_local=1) as manager:
        manager._saver.backlog.behind_s = 0.0
        manager.save(1).upload_completion.result(WAIT_S)
        arena = manager._pipeline._arena
        with stopped(int(json.loads((place.staging / "server.json").read_text())["pid"])):
            for step in range(2, 8):
                manager.save(step).local_completion.result(WAIT_S)  # nothing has been uploaded
        behind = [r.fields for r in caplog.records if getattr(r, "event", "") == "save.behind"]  # type: ignore[attr-defined]
        assert behind[-1]["oldest_step"] == 2
        assert behind[-1]["waiting"] > 1
        manager.wait_until_finished(WAIT_S)
        assert manager._pipeline._arena is arena
        assert manager.all_steps() == list(range(1, 8))
    with contextlib.closing(open_store(place.url)) as store:
        times = [read_manifest(store, CheckpointId(step, 1)).committed_at for step in range(1, 8)]
    assert times == sorted(times)


def test_very_many_tensors_take_no_descriptor_each(tmp_path: Path) -> None:
    """Case I64: trainer, flusher and server with 256 descriptors, and 5000 tensors."""
    place = Place(f"file://{tmp_path}/store/run", tmp_path / "staging")
    many = {f"t{number}": torch.full((number % 3,), float(number)) for number in range(5000)}
    live = Live.new()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))  # the children inherit it
    try:
        with place.started(live, state={"many": many}) as manager:
            manager.save(1)
        expected = dict(many)
        many.update({name: torch.zeros(0) for name in many})
        with place.manager(live, state={"many": many}) as manager:
            assert manager.restore() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_same_bits(many, expected)
    stop_server(place.staging)


# --- a dead flusher ---


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_killed_flusher_is_an_error_at_the_next_call_and_the_save_after_that_commits(
    place: Place, mode: Any
) -> None:
    """Case I58."""
    live = Live.new()
    with place.started(live, mode=mode) as manager:
        manager.save(1).upload_completion.result(WAIT_S)
        pid = flusher_pid(manager)
        with stopped(pid):
            lost = manager.save(2)
            lost.staging_completion.result(WAIT_S)
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableError) as caught:
            lost.local_completion.result(WAIT_S)
        assert caught.value.context["step"] == 2
        assert caught.value.context["exit_code"] == -signal.SIGKILL
        with pytest.raises(UnavailableError):
            manager.step(2)
        live.train(range(1))
        expected = live.state()
        manager.save(3).upload_completion.result(WAIT_S)
        assert manager.all_steps() == [1, 3]
        assert flusher_pid(manager) != pid
        live.train(range(1, 2))
        manager.restore()
        assert_same_bits(live.state(), expected)


def test_flusher_killed_between_two_saves_costs_nothing(place: Place) -> None:
    live = Live.new()
    with place.started(live) as manager:
        manager.save(1).upload_completion.result(WAIT_S)
        os.kill(flusher_pid(manager), signal.SIGKILL)
        eventually(lambda: not manager._pipeline._flusher_alive)
        manager.save(2).upload_completion.result(WAIT_S)
        assert manager.all_steps() == [1, 2]


def test_background_errors_may_only_be_warnings_but_waiting_raises_them(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Case I58."""
    live = Live.new()
    manager = place.started(live, on_error="warn")
    _lose_a_save(manager, 1)
    assert manager.step(5) is None
    assert "save.background_error" in caplog.text
    manager.save(2).upload_completion.result(WAIT_S)
    _lose_a_save(manager, 3)
    with pytest.raises(UnavailableError):
        manager.wait_until_finished(WAIT_S)
    manager.wait_until_finished(WAIT_S)  # told once
    manager.close()


def _lose_a_save(manager: CheckpointManager, step: int) -> None:
    pid = flusher_pid(manager)
    with stopped(pid):
        handle = manager.save(step)
        handle.staging_completion.result(WAIT_S)
        os.kill(pid, signal.SIGKILL)
    assert isinstance(handle.upload_completion.exception(WAIT_S), UnavailableError)


def test_save_whose_flusher_died_after_the_seal_is_still_followed_to_its_commit(tmp_path: Path) -> None:
    place = Place(f"file://{tmp_path}/store/run", tmp_path / "staging")
    live = Live.new()
    manager = place.started(live, keep_local=1)
    manager.save(1).upload_completion.result(WAIT_S)
    server = int(json.loads((place.staging / "server.json").read_text())["pid"])
    with stopped(server):
        followed = manager.save(2)
        followed.local_completion.result(WAIT_S)
        os.kill(flusher_pid(manager), signal.SIGKILL)
        eventually(lambda: not manager._pipeline._flusher_alive)
    for step in (3, 4):  # retention removes the local copy of 2 meanwhile
        manager.save(step).upload_completion.result(WAIT_S)
    local = place.segments(followed.ident)[0].parent
    eventually(lambda: not local.exists(), timeout_s=WAIT_S, what="local copy of step 2 is removed")
    manager.wait_until_finished(WAIT_S)
    followed.upload_completion.result(0)
    assert manager.all_steps() == [1, 2, 3, 4]
    manager.close()
    stop_server(place.staging)


# --- memory ---


def test_first_save_finds_an_arena_that_was_made_for_the_optimizers_state_as_well(place: Place) -> None:
    """Case I108."""
    torch.manual_seed(0)
    model = torch.nn.Linear(800, 800)  # state of 8 MiB with Adam's: more than the slack of an arena
    optimizer = torch.optim.AdamW(model.parameters())
    made = {"model": model, "optimizer": optimizer, "staging_dir": place.staging}
    with CheckpointManager(place.url, **made) as manager:
        manager.restore()
        model(torch.ones(1, 800)).sum().backward()
        optimizer.step()
        assert manager._pipeline._prefault is not None
        arena = manager._pipeline._prefault.result(WAIT_S)
        manager.save(1)
        assert manager._pipeline._arena is arena


def test_state_that_grows_and_shrinks_between_saves_is_saved_as_it_is(place: Place) -> None:
    live = Live.new()
    big: dict[str, Any] = {}
    with place.started(live, state={"extra": live.extra, "big": big}) as manager:
        for step, rows in ((1, 1), (2, 3_000_000), (3, 0), (4, 10)):
            big["t"] = torch.full((rows,), float(step))
            big["n"] = step
            manager.save(step)
        manager.wait_until_finished(WAIT_S)
        for step, rows in ((2, 3_000_000), (3, 0), (1, 1), (4, 10)):
            manager.restore(step)
            assert big["n"] == step
            assert big["t"].shape == (rows,)
            assert (big["t"] == step).all()


# --- forks ---


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.timeout(60)
def test_forked_data_loader_workers_neither_hang_nor_disturb_the_saves(place: Place) -> None:
    """Cases I93, I121."""
    live = Live.new()
    data = TensorDataset(torch.arange(40).view(20, 2) % 13)
    with place.started(live, mode="overlapped", save_interval_steps=2) as manager:
        manager.save(1)  # a copy may be running while the workers are forked
        done = 1
        for _ in range(2):
            loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
            for (tokens,) in loader:
                live.optimizer.zero_grad()
                live.model(tokens).square().mean().backward()
                live.optimizer.step()
                manager.step(done)
                done += 1
        expected = live.state()
        manager.save(done + 1).upload_completion.result(WAIT_S)
        manager.restore()
        assert_same_bits(live.state(), expected)


_FORKING_TRAINER = """
import os, sys, threading
import torch
from pathlib import Path
from tests.support.runs import Live, Place, capture_held

root = Path(sys.argv[1])
place = Place(f"file://{root}/store/run", root / "staging")
live = Live.new()
manager = place.started(live, mode="overlapped")
with capture_held(manager) as gate:
    handle = manager.save(1)
    child = os.fork()
    if child == 0:
        sys.exit(7)  # runs the exit handlers of a process whose capture thread is gone
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    gate.set()
handle.upload_completion.result(30)
assert manager.all_steps() == [1]
live.train(range(1))  # the hooks are still there
manager.save(2)
# No close(): leaving the interpreter must do.
"""


def test_child_that_leaves_through_exit_handlers_and_trainer_that_never_closes(tmp_path: Path) -> None:
    """Cases I59, I121."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / name) for name in ("", "proto", "server", "trainer_hooks")]
    script = subprocess.run(
        [sys.executable, "-c", _FORKING_TRAINER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert script.returncode == 0, script.stderr
    live = Live.new(seed=3)
    with Place(f"file://{tmp_path}/store/run", tmp_path / "staging").manager(live) as manager:
        assert manager.restore() == 2
    stop_server(tmp_path / "staging")


# --- what the log says ---


def test_step_number_that_looks_off_by_one_is_said_once_it_is_given(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ckpt")
    live = Live.new()
    with place.started(live) as manager:
        live.train(range(3))
        manager.save(2)
        assert "save.step_looks_off_by_one" in caplog.text
        caplog.clear()
        manager.save(3)
        assert "off_by_one" not in caplog.text


def test_errors_of_the_store_reach_the_handle_or_the_wait(tmp_path: Path) -> None:
    """The store's folder cannot be made: something else has its name."""
    place = Place(f"file://{tmp_path}/store/run", tmp_path / "staging")
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(CkptError):
        place.started(Live.new())
    stop_server(place.staging)
