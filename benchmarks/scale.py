"""What does not grow with the ranks: plan, commit, manifest, restore plan; the planner of DCP beside it.

Ranks are simulated: group indexes with every summary a real job would have, in a store in memory, and no
tensor data. So the times are the software's own; requests are counted, which in a real store is what matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.report import Report
from ckpt.clock import SystemClock
from ckpt.format.keys import manifest_key
from ckpt.format.layout import LayoutSet, Mesh, Replicate, Shard, TensorLayout, owned_region
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.known_groups import KnownGroups
from ckpt.plan.read import Want, plan_read
from ckpt.plan.save import plan_save
from tests.support.builders import CountingStore, build_group_indexes, memory_store

__all__ = ["run"]

RANKS = (1, 10, 100, 1000, 10_000, 100_000)
GROUP, TENSORS = 8, 300
DCP_LIMIT_S = 60.0

T = TypeVar("T")


def run(*, quick: bool, folder: Path | None) -> Report:
    """Measure every number of ranks once (``folder`` is not used); DCP as far as it gets in a minute."""
    del folder
    sizes = RANKS[:4] if quick else RANKS
    report = Report("scale", f"simulated ranks x {TENSORS} tensors, {GROUP} ranks a node; store in memory")
    for ranks in sizes:
        _ours(report, ranks)
    began = time.perf_counter()
    for ranks in sizes:
        if not _dcp(report, ranks, DCP_LIMIT_S / (60 if quick else 1) - (time.perf_counter() - began)):
            break
    return report


def _ours(report: Report, ranks: int) -> None:
    layouts, plan_s = _timed(lambda: _layouts(ranks))
    report.add(f"layouts, {ranks} ranks", [plan_s], note="of one rank, from the list of ranks")
    rank = ranks // 2
    _, plan_s = _timed(lambda: plan_save(layouts.values(), rank))
    report.add(f"save plan of one rank, {ranks} ranks", [plan_s], note="first time; later saves keep it")
    wants = [
        Want(name, region, number)
        for number, (name, layout) in enumerate(_layouts(max(ranks // 2, 1)).items())
        if (region := owned_region(layout, 0)) is not None
    ]
    _, plan_s = _timed(lambda: plan_read(layouts, wants))
    report.add(f"restore plan of one rank, {ranks} ranks", [plan_s], note="onto half as many ranks")
    _commits(report, ranks)


def _commits(report: Report, ranks: int) -> None:
    store, known = CountingStore(memory_store()), KnownGroups()
    times, requests = [], []
    for step in range(1, 4):
        ident = build_group_indexes(
            store,
            world_size=ranks,
            group_size=GROUP,
            tensors=TENSORS,
            step=step,
            state_of=lambda _, s=step: s,
        )
        store.reset()
        result, commit_s = _timed(lambda i=ident: try_commit(store, i, known=known, clock=SystemClock()))
        if result.state is not CommitState.COMMITTED:
            raise RuntimeError(f"the simulated job did not commit: {result}")
        times.append(commit_s)
        requests.append(store.total)
        size = len(store.get(manifest_key(ident)))
    report.add(f"first commit, {ranks} ranks", times[:1], note=f"{requests[0]} requests")
    report.add(f"later commit, {ranks} ranks", times[1:], note=f"{requests[-1]} requests")
    report.add(f"manifest, {ranks} ranks", [size], unit="bytes")


def _layouts(ranks: int) -> LayoutSet:
    inner = 8 if ranks >= 8 and ranks % 8 == 0 else 1
    mesh = Mesh.from_ranks((ranks // inner, inner), ("dp", "tp"), list(range(ranks)))
    return LayoutSet(
        TensorLayout(
            f"layers.{i}.w",
            "float32",
            (131_072 + i % 7, 512),
            mesh,
            (Shard(0), Shard(1) if i % 2 else Replicate()),
        )
        for i in range(TENSORS)
    )


def _dcp(report: Report, ranks: int, left_s: float) -> bool:
    """Time DCP's global plan, made anew from every rank's plan; False where it would not end in time.

    What it takes per item is known from the size before, so that no run is started in vain.
    """
    before = [row.values[0] for row in report.rows if row.what.startswith("DCP global plan")]
    if before and before[-1] * 10 * 1.5 > left_s:
        return False
    properties = TensorProperties(dtype=torch.float32)
    plans = [
        SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(f"layers.{i}.w", torch.Size((rank, 0)), rank),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(torch.Size((rank, 0)), torch.Size((1, 512))),
                        properties=properties,
                        size=torch.Size((ranks, 512)),
                    ),
                )
                for i in range(TENSORS)
            ]
        )
        for rank in range(ranks)
    ]
    _, plan_s = _timed(lambda: create_default_global_save_plan(plans))
    report.add(f"DCP global plan, {ranks} ranks", [plan_s], note="one coordinator; without gather and pickle")
    return True


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began
