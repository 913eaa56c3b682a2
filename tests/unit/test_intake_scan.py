"""The server's scan costs a look at what changed, however many steps wait in the staging directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ckpt.clock import SystemClock
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import run_key
from ckpt.storage.base import Store
from ckpt.storage.memory import MemoryStore
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import staging_pb2
from ckpt_server.intake import Intake
from ckpt_server.runs import Run, Runs
from ckpt_server.steps import StepTable
from tests.support.sealing import make_world, seal

URL = "memory://scan/run"
KEY = run_key(URL)
STEPS = 40


class Watched(StagingDir):
    """Notes whose folder is listed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.looked_at: list[int] = []

    def sealed_ranks(self, run_key: str, ident: CheckpointId) -> list[int]:
        self.looked_at.append(ident.step)
        return super().sealed_ranks(run_key, ident)


class Jobs:
    def __init__(self) -> None:
        self.uploads: list[tuple[int, int]] = []
        self.published: list[int] = []

    def upload(self, run: Run, ident: CheckpointId, rank: int) -> None:
        self.uploads.append((ident.step, rank))

    def publish(self, run: Run, ident: CheckpointId) -> None:
        self.published.append(ident.step)


def open_memory(url: str, options: Mapping[str, str] | None) -> Store:
    return MemoryStore(url)


class Node:
    """A staging directory with sealed steps that were written a while ago, and a server's intake."""

    def __init__(self, path: Path) -> None:
        self.staging = Watched(path)
        self.staging.ensure()
        self.staging.write_run_config(KEY, RunConfig(url=URL))
        self.world = make_world(rows=4, columns=4)
        for step in range(1, STEPS + 1):
            self.seal(step, 0)
        clock = SystemClock()
        self.table, self.jobs = StepTable(), Jobs()
        runs = Runs(self.staging, workers=1, clock=clock, opener=open_memory)
        self.intake = Intake(self.staging, runs, self.table, self.jobs, clock)

    def seal(self, step: int, rank: int, *, age_s: float = 60.0) -> None:
        ident = CheckpointId(step, 1)
        seal(self.staging, KEY, ident, self.world, rank)
        self.touch(ident, age_s)

    def touch(self, ident: CheckpointId, age_s: float) -> None:
        at = SystemClock().now() - age_s
        os.utime(self.staging.checkpoint_dir(KEY, ident), (at, at))

    def scan(self) -> list[int]:
        """Scan; the steps whose folders were listed."""
        self.staging.looked_at.clear()
        self.intake.scan()
        return self.staging.looked_at


def test_a_second_scan_lists_no_folder_that_did_not_change(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.scan() == list(range(1, STEPS + 1))
    assert len(node.jobs.uploads) == STEPS
    assert node.scan() == []


def test_what_changed_is_found_and_only_that(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.scan()
    node.seal(7, 1, age_s=30.0)
    node.seal(STEPS + 1, 0)
    assert node.scan() == [7, STEPS + 1]
    record = node.table.get(KEY, CheckpointId(7, 1))
    assert record is not None
    assert record.sealed == {0, 1}
    node.staging.mark_committed(KEY, CheckpointId(9, 1))
    node.touch(CheckpointId(9, 1), 20.0)
    node.scan()
    record = node.table.get(KEY, CheckpointId(9, 1))
    assert record is not None
    assert record.state == staging_pb2.StepStatus.STATE_COMMITTED
    node.staging.remove_checkpoint(KEY, CheckpointId(7, 1))
    assert node.scan() == []


def test_a_folder_that_changed_a_moment_ago_is_looked_at_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.seal(5, 1, age_s=0.0)
    node.scan()
    assert node.scan() == [5]
