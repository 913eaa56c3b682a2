"""Ranks that die and start again: where the time went, told by the product and checked from outside."""

from __future__ import annotations

import contextlib
import json
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
STEP_S = 0.3


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


def step_once(manager: CheckpointManager, model: Any, optimizer: Any, iteration: int) -> float:
    """Return how long it took, in seconds."""
    began = time.monotonic()
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(1))
    time.sleep(STEP_S)
    manager.step(iteration)
    return time.monotonic() - began


def die(rank: int, world: int, root: Path, seen: Path) -> None:
    """Train 5 steps of which 3 are committed, then be killed; waits in between count as data."""
    manager, model, optimizer = manager_of(root)
    start = manager.restore()
    took, waited = [], 0.0
    for iteration in range(start, start + REACHED):
        took.append(step_once(manager, model, optimizer, iteration))
        if iteration + 1 == start + SAVED:
            handle, began = manager.save(iteration + 1), time.monotonic()
            with manager.phase("data"):
                handle.upload_completion.result(60)
            waited = time.monotonic() - began
    began = time.monotonic()
    with manager.phase("data"):
        barrier()
        # Its flusher writes down every two seconds how it does; a rank is not killed before it was seen.
        number = f"a{manager.attempt:06d}.*.json"
        lives = root / "staging" / "runs"
        poll(
            lambda: (
                {f'"step": {start + REACHED}' in p.read_text() for p in lives.glob(f"*/lives/{number}")}
                == {True}
                and len(list(lives.glob(f"*/lives/{number}"))) == world
            ),
            what="the flushers have seen all ranks' last step",
        )
        barrier()
    waited += time.monotonic() - began
    if rank == 1:
        seen.write_text(json.dumps({"died": time.time(), "took": took, "waited": waited}))
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

    run_ranks(WORLD, die, root, root / "died-1", may_die=frozenset(range(WORLD)))
    back = run_ranks(WORLD, come_back, root)

    assert [step for step, _ in back] == [SAVED] * WORLD
    observed_s = max(at for _, at in back) - json.loads((root / "died-1").read_text())["died"]
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


def test_ledger_books_every_second_of_a_run_with_kills(root: Path) -> None:
    """Goes on with the run of the test above: start, kill, restart, stop; here one more kill and restart."""
    cli = Cli(root / "staging")
    run_ranks(WORLD, die, root, root / "died-2", may_die=frozenset(range(WORLD)))
    back = run_ranks(WORLD, come_back, root)
    found = cli.json("goodput", url_of(root))
    first, _, third, fourth = found["starts"]
    assert [row["cause"] for row in found["starts"]] == ["start", "crash", "stop", "crash"]
    assert [row["from_step"] for row in found["starts"]] == [0, SAVED, SAVED, 2 * SAVED]
    assert [row["steps"] for row in found["starts"]] == [REACHED, 1, REACHED, 1]
    # The second start made one step and saved nothing, so its step was made again too.
    assert [row["lost_steps"] for row in found["starts"]] == [REACHED - SAVED, 1, REACHED - SAVED, 0]

    # Classes add up, and the whole is the time that passed outside.
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"])
    assert found["wall_s"] == pytest.approx(sum(sum(row["seconds"].values()) for row in found["starts"]))
    observed_s = max(at for _, at in back) - first["began_at"]
    assert found["wall_s"] == pytest.approx(observed_s, rel=0.02, abs=0.3)
    assert found["seconds"]["unknown"] == 0
    died = [json.loads((root / f"died-{number}").read_text()) for number in (1, 2)]
    for row, killed in zip((first, third), died, strict=True):
        assert row["ended_at"] == pytest.approx(killed["died"], abs=0.5)
        # Each step is taken to be as long as the others; until a death is seen, it seems to train.
        again, kept = sum(killed["took"][SAVED:]), sum(killed["took"][1:SAVED])
        assert row["seconds"]["lost"] == pytest.approx(again, rel=0.1, abs=0.3)
        assert row["seconds"]["productive"] == pytest.approx(kept, rel=0.1, abs=0.3)
        assert row["seconds"]["data"] == pytest.approx(killed["waited"], rel=0.1, abs=0.3)
        assert row["seconds"]["restart"] == pytest.approx(sum(row["phases"].values()), abs=0.01)
    assert found["effective_ratio"] == pytest.approx(found["seconds"]["productive"] / found["wall_s"])
    shown = cli.run("goodput", url_of(root)).stdout
    assert "effective training time" in shown
    print(shown)

    # The server has put it into the store: it can be seen from anywhere, and the end of each start is known.
    far = Cli(root / "nowhere")
    poll(
        lambda: len(list((root / "store" / "run" / "ledger").glob("*/node-*.json"))) == 4, what="all is there"
    )
    poll(lambda: not far.json("goodput", url_of(root))["starts"][-1]["is_running"], what="the end is known")
    again = far.json("goodput", url_of(root))
    assert again["seconds"] == pytest.approx(found["seconds"], abs=0.5)
    assert again["starts"][-1]["ended_at"] >= fourth["ended_at"]
