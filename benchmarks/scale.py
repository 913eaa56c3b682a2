"""What does not grow: plan and commit with the ranks, list and latest with the checkpoints."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Report
from ckpt.clock import SystemClock
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import manifest_key
from ckpt.format.layout import LayoutSet, Mesh, Replicate, Shard, TensorLayout
from ckpt.ops import catalog
from ckpt.ops.commit import CommitState, try_commit
from ckpt.plan.save import plan_save
from ckpt.storage.local import LocalStore
from tests.support.builders import build_checkpoint, build_group_indexes, memory_store

__all__ = ["run"]

RANKS, GROUP, TENSORS, CHECKPOINTS = 4096, 8, 300, 10_000


def run(*, quick: bool, folder: Path | None) -> Report:
    """Simulated ranks without tensor data; real checkpoints (tiny ones) in a directory store."""
    ranks, checkpoints = (512, 1000) if quick else (RANKS, CHECKPOINTS)
    report = Report("scale", f"{ranks} simulated ranks x {TENSORS} tensors; {checkpoints} checkpoints")
    layouts = _layouts(ranks)
    plans = []
    for rank in (0, 1, ranks // 2, ranks - 1):
        began = time.perf_counter()
        plan_save(layouts.values(), rank)
        plans.append(time.perf_counter() - began)
    report.add("plan of one rank", plans, note="first time; later saves keep it")
    report.add("commit", [_commit(ranks) for _ in range(3)], note="memory store; group indexes to manifest")
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as root:
        _listing(report, Path(root) / "run", checkpoints)
    return report


def _layouts(ranks: int) -> LayoutSet:
    mesh = Mesh.from_ranks((ranks // 8, 8), ("dp", "tp"), list(range(ranks)))
    return LayoutSet(
        TensorLayout(
            f"layers.{i}.w",
            "float32",
            (8192 + i % 7, 512),
            mesh,
            (Shard(0), Shard(1) if i % 2 else Replicate()),
        )
        for i in range(TENSORS)
    )


def _commit(ranks: int) -> float:
    store = memory_store()
    ident = build_group_indexes(store, world_size=ranks, group_size=GROUP, tensors=TENSORS)
    began = time.perf_counter()
    result = try_commit(store, ident, clock=SystemClock())
    elapsed = time.perf_counter() - began
    if result.state is not CommitState.COMMITTED:
        raise RuntimeError(f"the simulated job did not commit: {result}")
    return elapsed


def _listing(report: Report, root: Path, checkpoints: int) -> None:
    store = LocalStore(root)
    built = build_checkpoint(store, 1, world_size=1)
    body = store.get(manifest_key(built.ident))
    for step in range(2, checkpoints + 1):
        (root / manifest_key(CheckpointId(step, 1))).write_bytes(body)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        catalog.latest(store)
        times.append(time.perf_counter() - began)
    report.add("latest", times, note="two listings limited to one key")
    times = []
    for _ in range(3):
        began = time.perf_counter()
        command = [sys.executable, "-m", "ckpt.cli", "list", str(root), "--all"]
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    report.add("ckpt list, whole process", times)
