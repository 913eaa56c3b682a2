"""Ranks that die and start again: where the time went, told by the product and checked from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.ops.recovery import PHASES
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import end_node, poll
from tests.support.cli import NOT_FOUND, Cli
from tests.support.models import barrier
from tests.support.ranks import run_ranks

WORLD = 2
SAVED, REACHED = 3, 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("recovery")
    (path / "store").mkdir()
    try:
        yield path
    finally:
        end_node(path / "staging")


def url_of(root: Path) -> str:
    return f"file://{root}/store/run"


def manager_of(root: Path) -> tuple[CheckpointManager, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return (
        CheckpointManager(url_of(root), model=model, optimizer=optimizer, staging_dir=root / "staging"),
        model,
        optimizer,
    )


def step_once(manager: CheckpointManager, model: Any, optimizer: Any, iteration: int) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(1))
    manager.step(iteration)


def die(rank: int, world: int, root: Path) -> None:
    manager, model, optimizer = manager_of(root)
    manager.restore()
    for iteration in range(REACHED):
        step_once(manager, model, optimizer, iteration)
        if iteration + 1 == SAVED:
            manager.save(SAVED).upload_completion.result(60)
    barrier()
    # Its flusher writes down every two seconds how it does; a rank is not killed before it was seen.
    lives = root / "staging" / "runs"
    poll(lambda: len(list(lives.glob("*/lives/*.json"))) == world, what="the flushers have seen all ranks")
    barrier()
    if rank == 1:
        (root / "died").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):  # the other end is gone
        dist.all_reduce(torch.zeros(1))
    os._exit(1)


def come_back(rank: int, world: int, root: Path) -> tuple[int, float]:
    manager, model, optimizer = manager_of(root)
    step = manager.restore()
    step_once(manager, model, optimizer, step)
    at = time.time()
    barrier()
    manager.close()
    return step, at


def test_phases_of_a_restart_sum_to_the_wall_time_and_bytes_are_told_by_tier(root: Path) -> None:
    cli = Cli(root / "staging")
    cli.run("recovery", url_of(root), code=NOT_FOUND)

    run_ranks(WORLD, die, root, may_die=frozenset(range(WORLD)))
    back = run_ranks(WORLD, come_back, root)

    assert [step for step, _ in back] == [SAVED] * WORLD
    observed_s = max(at for _, at in back) - float((root / "died").read_text())
    found = cli.json("recovery", url_of(root))
    assert (found["attempt"], found["cause"], found["ranks"]) == (2, "crash", WORLD)
    assert found["lost_steps"] == REACHED - SAVED
    assert found["checkpoint"] == "000000000003.a000001"
    assert [phase["name"] for phase in found["phases"]] == list(PHASES)
    assert found["wall_s"] == pytest.approx(sum(phase["critical_s"] for phase in found["phases"]))
    # Flushers run at low priority, and hear of a death some time late on a machine that is busy.
    assert found["wall_s"] == pytest.approx(observed_s, rel=0.02, abs=0.15)
    for record in found["by_rank"]:
        assert sum(record["phases"].values()) == pytest.approx(record["first_step_at"] - record["failed_at"])
        assert all(seconds >= 0 for seconds in record["phases"].values())
    by_name = {phase["name"]: phase["critical_s"] for phase in found["phases"]}
    assert min(by_name["re-init"], by_name["locate"], by_name["read"]) > 0
    assert found["nbytes"]["local"] > 0
    assert found["nbytes"].get("remote", 0) == 0
    shown = cli.run("recovery", url_of(root)).stdout
    assert "attempt" in shown
    assert " local" in shown.splitlines()[-1]

    # The server has put it into the store: it can be seen from anywhere.
    far = Cli(root / "nowhere")
    poll(lambda: list((root / "store" / "run" / "recovery").glob("999997.000002/*.json")), what="it is there")
    assert far.json("recovery", url_of(root))["wall_s"] == found["wall_s"]
    assert far.json("recovery", url_of(root), "--attempt", "1")["cause"] == "start"
    far.run("recovery", url_of(root), "--attempt", "9", code=NOT_FOUND)
