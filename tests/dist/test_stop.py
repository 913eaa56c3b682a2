"""Signals and notice files stop all ranks at one step, saved; exit code and reason file say how it went."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.format.keys import run_key
from ckpt.ops.catalog import latest
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import CheckpointManager, StopTraining
from tests.support.chain import FLUSHER, end_node, poll, processes
from tests.support.models import barrier
from tests.support.ranks import run_ranks

WORLD = 4
Sketch = dict[str, Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("stop")
    (path / "store").mkdir()
    try:
        yield path
    finally:
        for staging in path.glob("staging*"):
            end_node(staging)


def make(root: Path, run: str, staging: str = "staging", **more: Any) -> tuple[CheckpointManager, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = CheckpointManager(
        f"file://{root}/store/{run}", model=model, optimizer=optimizer, staging_dir=root / staging, **more
    )
    return manager, model, optimizer


def train_until_stopped(
    manager: CheckpointManager, model: Any, optimizer: Any, start: int, *, together: bool = True
) -> StopTraining:
    """Lock-step training; returns the exit that ends it."""
    step = start
    try:
        while True:
            time.sleep(random.random() * 0.01)
            if together and dist.is_initialized():
                dist.all_reduce(torch.zeros(1))
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            manager.step(step)
            step += 1
    except StopTraining as found:
        return found


def later(seconds: float, do: Any) -> None:
    threading.Timer(seconds, do).start()


def sketch(root: Path, run: str, staging: str, rank: int, found: StopTraining) -> Sketch:
    """What a rank ended with, and what its reason file says."""
    reason = found.reason
    path = root / staging / "runs" / run_key(f"file://{root}/store/{run}") / "stop"
    file = json.loads((path / f"a{reason.attempt:06d}" / f"reason-{rank:05d}.json").read_text())
    return {"code": found.code, "file": file, "step": reason.step, "cause": reason.cause}


def stop_four_ways(rank: int, world: int, root: Path) -> dict[str, Sketch]:
    random.seed(rank)
    found = {}
    own = os.getpid()
    for name in ("one", "all", "notice", "grace"):
        # "one": two nodes; what they agree on goes through the key-value store.
        staging = f"staging-{rank // 2}" if name == "one" else "staging"
        notice = root / f"notice-{name}"
        more: dict[str, Any] = {"notice_file": notice, "grace_s": 3.0 if name == "grace" else 30.0}
        manager, model, optimizer = make(root, name, staging, mode="blocking", **more)
        start = manager.restore()
        barrier()
        if name == "one" and rank == 2:
            later(0.2 + random.random(), lambda: os.kill(own, signal.SIGTERM))
        elif name == "all":
            later(0.2 + random.random() * 0.3, lambda: os.kill(own, signal.SIGUSR1))
        elif name == "notice" and rank == 0:
            later(0.3, notice.touch)
        elif name == "grace":
            for pid in processes(FLUSHER, root / staging, parent=own):
                os.kill(pid, signal.SIGSTOP)
            if rank == 3:
                later(0.2, lambda: os.kill(own, signal.SIGTERM))
        stopped = train_until_stopped(manager, model, optimizer, start)
        found[name] = sketch(root, name, staging, rank, stopped)
        found[name]["handlers"] = [
            getattr(signal.getsignal(number), "__name__", "?") for number in (signal.SIGTERM, signal.SIGUSR1)
        ]
        for pid in processes(FLUSHER, root / staging, parent=own):
            os.kill(pid, signal.SIGCONT)
        manager.close()
        found[name]["after"] = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
        barrier()
    return found


@pytest.fixture(scope="module")
def stopped(root: Path) -> list[dict[str, Sketch]]:
    reason_file = root / "reasons" / "reason.json"
    return run_ranks(WORLD, stop_four_ways, root, env={"CKPT_REASON_FILE": str(reason_file)})


def committed(root: Path, run: str) -> int | None:
    store = open_store(f"file://{root}/store/{run}")
    try:
        found = latest(store)
        return None if found is None else found.step
    finally:
        store.close()


@pytest.mark.parametrize(("name", "cause"), [("one", "SIGTERM"), ("all", "SIGUSR1"), ("notice", "notice")])
def test_all_ranks_save_the_same_step_commit_it_and_leave_with_75(
    stopped: list[dict[str, Sketch]], root: Path, name: str, cause: str
) -> None:
    """I40: a signal to one rank of two nodes; to all ranks within 300 ms; a notice file on one node."""
    found = [ranks[name] for ranks in stopped]
    (step,) = {sketch["step"] for sketch in found}
    assert {sketch["code"] for sketch in found} == {75}
    assert {sketch["cause"] for sketch in found} == {cause}
    for rank, sketch in enumerate(found):
        file = sketch["file"]
        assert (file["achieved"], file["step"], file["rank"], file["absent"]) == ("committed", step, rank, [])
        assert (file["exit_code"], file["world_size"]) == (75, WORLD)
    if name == "one":
        assert {sketch["file"]["asked_by_rank"] for sketch in found} == {2}
    assert committed(root, name) == step


def test_too_little_grace_is_code_76_and_what_was_copied_becomes_a_checkpoint_all_the_same(
    stopped: list[dict[str, Sketch]], root: Path
) -> None:
    found = [ranks["grace"] for ranks in stopped]
    (step,) = {sketch["step"] for sketch in found}
    assert {sketch["code"] for sketch in found} == {76}
    assert {sketch["file"]["achieved"] for sketch in found} == {"copied"}
    poll(lambda: committed(root, "grace") == step, what="the flushers have finished it")


def test_reason_file_of_the_node_is_written_where_the_environment_says(
    stopped: list[dict[str, Sketch]], root: Path
) -> None:
    reason = json.loads((root / "reasons" / "reason.json").read_text())
    assert (reason["achieved"], reason["exit_code"], reason["rank"]) == ("copied", 76, 0)


def test_handlers_are_as_before_once_the_manager_is_closed(stopped: list[dict[str, Sketch]]) -> None:
    for ranks in stopped:
        for sketch in ranks.values():
            assert sketch["handlers"] == ["_handle", "_handle"]
            assert sketch["after"] == [signal.SIG_DFL, signal.SIG_DFL]


# --- a store that cannot be had ---


def stop_without_a_store(rank: int, world: int, root: Path) -> Sketch:
    """Two nodes that keep replicas for each other; nothing gets into the store once the run has begun."""
    del world
    os.environ["CKPT_FAILURE_DOMAIN"] = f"rack-{rank}"
    staging, data = f"lonely-{rank}", root / "store" / "away" / "data"
    manager, model, optimizer = make(
        root, "away", staging, mode="blocking", replication_factor=2, grace_s=10.0, on_error="warn"
    )
    start = manager.restore()
    if rank == 0:
        data.symlink_to(data)  # a loop: whoever writes fails, and tries again
    barrier()
    if rank == 1:
        later(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    found = sketch(root, "away", staging, rank, train_until_stopped(manager, model, optimizer, start))
    manager.close()
    return found


def test_what_is_sealed_and_replicated_is_told_apart_and_is_code_75(root: Path) -> None:
    """Case I61."""
    listening = {"CKPT_PEER_LISTEN": "127.0.0.1:0", "CKPT_INSECURE": "1"}
    try:
        found = run_ranks(2, stop_without_a_store, root, env=listening)
    finally:
        for rank in range(2):
            end_node(root / f"lonely-{rank}")
    assert {sketch["file"]["achieved"] for sketch in found} == {"replicated"}
    assert {sketch["code"] for sketch in found} == {75}
    assert committed(root, "away") is None


# --- a rank that cannot take part ---


def stop_beside_a_stopped_rank(rank: int, world: int, root: Path) -> None:
    manager, *_ = make(root, "absent", mode="blocking", grace_s=60.0)
    start = manager.restore()
    manager.save(start + 1).upload_completion.result(60)
    (root / f"absent-{rank}").write_text(str(os.getpid()))
    barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    poll(lambda: state_of(int((root / "absent-1").read_text())) == "T", what="rank 1 is stopped")
    later(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    dist.all_reduce(torch.zeros(1))  # for ever: rank 1 does not come, and no handler of Python runs
    raise AssertionError("unreachable")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_rank_that_hangs_in_a_collective_with_a_stopped_one_ends_soon_and_names_it(root: Path) -> None:
    ends: list[BaseException] = []

    def run() -> None:
        try:
            run_ranks(2, stop_beside_a_stopped_rank, root, may_die=frozenset({0, 1}))
        except BaseException as error:
            ends.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    key = run_key(f"file://{root}/store/absent")
    path = root / "staging" / "runs" / key / "stop" / "a000001" / "reason-00000.json"
    poll(path.exists, what="the reason file is there")
    reason = json.loads(path.read_text())
    poll(lambda: not alive(int((root / "absent-0").read_text())), timeout_s=20.0, what="rank 0 has left")
    os.kill(int((root / "absent-1").read_text()), signal.SIGKILL)
    runner.join(60)

    assert ends == []
    assert (reason["achieved"], reason["exit_code"], reason["absent"]) == ("nothing", 76, [1])
    assert reason["last_saved"] == 1


def alive(pid: int) -> bool:
    try:
        return state_of(pid) not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
