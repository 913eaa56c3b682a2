"""Real ranks that are stopped, hang, deadlock or are slow: the right one is named, with its stack, soon."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.client import StagingClient
from ckpt.errors import UnavailableError
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import end_node, poll
from tests.support.cli import DONE, Cli
from tests.support.ranks import run_ranks

WORLD = 3
NAMED_S = 5.0  # the promise
UNHEALTHY = 6
Found = dict[int, Any]
State = staging_pb2.RankHealth.State


# --- the job ---


def lockstep(rank: int, world: int, root: Path) -> int:
    """Steps with one collective each, until the file "end" is there; files make ranks misbehave."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    with CheckpointManager(
        f"file://{root}/store/run", model=model, optimizer=optimizer, staging_dir=root / "staging"
    ) as manager:
        step = manager.restore()
        while True:
            with manager.phase("data"):
                load_batch(root, rank)
            if (root / f"recv-{rank}").exists():
                receive_what_nobody_sends(root, rank)
            ends = torch.tensor([float((root / "end").exists())])
            dist.all_reduce(ends)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            manager.step(step)
            step += 1
            if ends.item() > 0:
                return step


def load_batch(root: Path, rank: int) -> None:
    time.sleep(0.11 if (root / f"slow-{rank}").exists() else 0.01)
    while (root / f"stuck-{rank}").exists():
        wait_for_a_file_server(0.05)


def wait_for_a_file_server(seconds: float) -> None:
    time.sleep(seconds)


def receive_what_nobody_sends(root: Path, rank: int) -> None:
    dist.recv(torch.zeros(1), src=WORLD - 1)


def _brief(found: Found) -> str:
    return "; ".join(f"{rank}: {State.Name(h.state)} {h.age_s:.1f} s {h.reason}" for rank, h in found.items())


class Job:
    """The ranks, run by a thread of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.staging = root / "staging"
        (root / "store").mkdir()
        self._pool = ThreadPoolExecutor(1)
        self._ranks: Future[list[Any]] = self._pool.submit(
            run_ranks, WORLD, lockstep, root, timeout_s=120.0, may_die=frozenset(range(WORLD))
        )

    def pid(self, rank: int) -> int:
        return int((self.root / f"pid-{rank}").read_text())

    def health(self, code: int = DONE) -> dict[str, Any]:
        """Document of ``ckpt health --json``, which must end with ``code``."""
        found: dict[str, Any] = Cli(self.staging).json("health", code=code)
        return found

    def await_states(self, *, timeout_s: float = 60.0, **states: str) -> Found:
        """Wait until the ranks of these names (``r1="hung"``) are in these states; returns all."""

        def reached() -> Found | None:
            if self._ranks.done():
                self._ranks.result()
            last.clear()
            with contextlib.suppress(UnavailableError):
                last.update({item.pulse.rank: item for item in client.status().ranks})
            seen = {f"r{rank}": State.Name(item.state)[6:].lower() for rank, item in last.items()}
            return last if states.items() <= seen.items() else None

        last: Found = {}
        with StagingClient(StagingDir(self.staging).socket_target()) as client:
            poll(reached, timeout_s=timeout_s, what=lambda: f"{states}, seen {_brief(last)}{self.logs()}")
        return last

    def await_healthy(self) -> Found:
        return self.await_states(**{f"r{rank}": "ok" for rank in range(WORLD)})

    def touch(self, name: str) -> None:
        (self.root / name).touch()

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def server_log(self) -> str:
        return (self.staging / "server.log").read_text()

    def logs(self) -> str:
        return "".join(f"\n--- {p.name}\n{p.read_text()[-3000:]}" for p in self.staging.glob("*.log"))

    def end(self) -> list[Any]:
        self.touch("end")
        return self._ranks.result(100)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    running = Job(tmp_path_factory.mktemp("liveness"))
    try:
        poll(lambda: (running.staging / "server.json").exists(), what="there is a server")
        running.await_healthy()
        yield running
    finally:
        running.end()
        end_node(running.staging)


@pytest.fixture
def calm(job: Job) -> Iterator[Job]:
    """The job, healthy before and after."""
    yield job
    for rank in range(WORLD):
        os.kill(job.pid(rank), signal.SIGCONT)
        for name in (f"stuck-{rank}", f"slow-{rank}"):
            job.remove(name)
    job.await_healthy()


@pytest.mark.fault(
    "Hangs and stops",
    "one rank of four stopped in a collective",
    "SIGSTOP",
    "named within 5 s; ranks that wait for it are not",
)
def test_stopped_rank_is_named_in_under_five_seconds_and_those_that_wait_are_not(calm: Job) -> None:
    os.kill(calm.pid(1), signal.SIGSTOP)

    found = calm.await_states(r1="hung", timeout_s=NAMED_S)

    assert "stopped" in found[1].reason
    assert found[1].pulse.kernel.startswith("state T")
    assert found[1].pulse.stacks.startswith("Training thread, as last seen:")
    assert "in lockstep" in found[1].pulse.stacks
    found = calm.await_states(r0="waiting", r1="hung", r2="waiting")
    assert "for rank 1" in found[0].reason
    assert "all_reduce" in found[2].pulse.where
    document = calm.health(UNHEALTHY)
    assert (document["verdict"], document["culprits"]) == ("unhealthy", [1])
    poll(lambda: "rank.trouble state=hung" in calm.server_log(), what="the log says so")
    os.kill(calm.pid(1), signal.SIGCONT)
    calm.await_healthy()
    poll(lambda: "rank.recovered was=hung" in calm.server_log(), what="the log says so")


@pytest.mark.fault(
    "Hangs and stops", "one rank stuck outside of collectives", "the rank sleeps", "named with its stack"
)
def test_rank_stuck_outside_collectives_is_named_with_its_stack(calm: Job) -> None:
    calm.touch("stuck-2")

    found = calm.await_states(r0="waiting", r1="waiting", r2="hung")

    assert "phase data" in found[2].reason
    assert "wait_for_a_file_server" in found[2].pulse.where
    assert "in wait_for_a_file_server" in found[2].pulse.stacks
    assert "most recent call first" in found[2].pulse.stacks  # of all threads, as faulthandler writes them
    assert "for rank 2" in found[0].reason
    shown = Cli(calm.staging).run("health", "--stacks", code=UNHEALTHY).stdout
    assert "ranks to look at: 2" in shown
    assert "in wait_for_a_file_server" in shown


@pytest.mark.fault(
    "Hangs and stops", "a slow rank", "the rank sleeps in each step", "named with the phase it is slow in"
)
def test_straggler_is_named_by_its_phase(calm: Job) -> None:
    calm.touch("slow-1")

    found = calm.await_states(r0="ok", r1="slow", r2="ok")

    assert found[1].reason.startswith(("data takes", "own work takes"))
    assert calm.health()["verdict"] == "healthy"


def test_rank_in_another_collective_than_the_others_is_named_with_its_stack_then_dead_ones(job: Job) -> None:
    """The last test of the job: a deadlock is for ever."""
    job.touch("recv-0")

    found = job.await_states(r0="hung", r1="waiting", r2="waiting")

    assert "recv" in found[0].pulse.where
    assert "in receive_what_nobody_sends" in found[0].pulse.stacks
    assert "for rank 0" in found[1].reason
    for rank in range(WORLD):
        os.kill(job.pid(rank), signal.SIGKILL)
    found = job.await_states(r0="dead", r1="dead", r2="dead")
    assert job.health(UNHEALTHY)["culprits"] == [0, 1, 2]
