"""Ranks that see the store differently or slowly: one decision, one listing, no wait in a collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt.errors import CkptError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import end_node
from tests.support.faultproxy import FaultProxy
from tests.support.ranks import run_ranks
from tests.support.s3 import Ministack

COLLECTIVE_S = 2.0  # the time-out of the program's own process group
READ_S = 5.0

Outcome = tuple[Any, ...]


class Views:
    """A way to the store for each rank; what goes wrong on it depends on the phase the ranks have begun."""

    def __init__(self, root: Path, server: Ministack, stack: ExitStack) -> None:
        self.root = root
        self.proxies = [stack.enter_context(FaultProxy(server.port)) for _ in range(2)]
        self.env = server.env
        self.url = f"s3://{server.make_bucket()}/run"
        self.listed: dict[str, list[int]] = {}
        self._slept = threading.Lock()
        for rank, proxy in enumerate(self.proxies):
            proxy.fault = lambda method, path, rank=rank: self.fault(rank, method, path)  # type: ignore[misc]

    def fault(self, rank: int, method: str, path: str) -> int | str | None:
        phase = (self.root / "phase").read_text() if (self.root / "phase").exists() else ""
        if "list-type=2" in path:
            self.listed.setdefault(phase, [0, 0])[rank] += 1
        if phase == "late" and rank == 1 and "/manifests/" in path:
            return 404
        if phase == "throttled" and rank == 0 and "list-type=2" in path:
            return 503
        if phase == "slow" and rank == 1 and "/data/" in path and self._slept.acquire(blocking=False):
            time.sleep(READ_S)  # the fault itself: a store that takes its time
        return None

    @property
    def endpoints(self) -> list[str]:
        return [proxy.endpoint for proxy in self.proxies]


def restore(rank: int, url: str, endpoints: list[str], root: Path, phase: str, **more: Any) -> Outcome:
    """Begin a phase together, and restore into new live objects."""
    dist.barrier()
    if rank == 0:
        (root / "phase").write_text(phase)
    dist.barrier()
    if phase == "slow":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), None)
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=COLLECTIVE_S))
    model = new_model(rank + 5)
    manager = manager_of(rank, url, endpoints, root / "staging-new", model)
    began = time.monotonic()
    try:
        outcome: Outcome = (manager.restore(), time.monotonic() - began, model.weight.detach().sum().item())
    except CkptError as error:
        outcome = (type(error).__name__, error.code)
    manager.close()
    return outcome


def manager_of(
    rank: int, url: str, endpoints: list[str], staging: Path, model: nn.Module, **more: Any
) -> CheckpointManager:
    options = {"endpoint_url": endpoints[rank], "region": "us-east-1", "retries": "1"}
    return CheckpointManager(
        url,
        model=model,
        staging_dir=staging,
        store_options=options,
        timeout_s=60.0,
        pending_wait_s=1.0,
        **more,
    )


def new_model(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(512, 1024)


def live(rank: int, world: int, url: str, endpoints: list[str], root: Path) -> dict[str, Outcome]:
    with manager_of(rank, url, endpoints, root / "staging-old", model := new_model(0)) as manager:
        manager.restore()
        for step in (1, 2):
            with torch.no_grad():
                model.weight.fill_(step)
            manager.save(step)
    phases = ("whole", "late", "throttled", "slow")
    return {phase: restore(rank, url, endpoints, root, phase) for phase in phases}


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory, s3_server: Ministack) -> Iterator[Views]:
    root = tmp_path_factory.mktemp("views")
    with ExitStack() as stack:
        yield Views(root, s3_server, stack)
        for staging in root.glob("staging-*"):
            end_node(staging)


@pytest.fixture(scope="module")
def told(views: Views) -> list[dict[str, Outcome]]:
    return run_ranks(2, live, views.url, views.endpoints, views.root, env=views.env)


def test_rank_that_does_not_see_the_newest_yet_goes_nowhere_alone(told: list[dict[str, Outcome]]) -> None:
    """Case I32."""
    assert [found["whole"][0] for found in told] == [2, 2]
    assert told[0]["late"] == told[1]["late"]
    assert told[0]["late"][0] != 0


def test_only_one_rank_lists_and_a_refused_listing_is_an_error_on_all(
    told: list[dict[str, Outcome]], views: Views
) -> None:
    """Case I113."""
    lists_of_0, lists_of_1 = views.listed["whole"]
    assert lists_of_0 > 0
    assert lists_of_1 == 0
    assert [found["throttled"] for found in told] == [("UnavailableError", "unavailable")] * 2


def test_long_read_of_one_rank_is_waited_for_outside_the_programs_collectives(
    told: list[dict[str, Outcome]],
) -> None:
    """Case I117."""
    for found in told:
        step, elapsed_s, _ = found["slow"]
        assert step == 2
        assert elapsed_s > READ_S > 2 * COLLECTIVE_S
