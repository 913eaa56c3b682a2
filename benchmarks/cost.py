"""The effective cost of a save: how much longer training takes because of it, until the state is durable.

One window: some steps with nothing else, then a save and steps until it is durable (at least as many), then
some steps again. Cost = time of the middle part - its number of steps x the mean step of the outer parts. It
holds the stall and all interference. The denominator is one copy of the state into warm memory, measured
between the windows in the same round.

Every library is brought to the same durability: where it does not sync what it wrote, the harness does it
from a thread and goes on counting.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.accounting import sync_tree, tree_cpu_s
from benchmarks.contestant import Stage, Turn, contestants, rounds
from benchmarks.options import Options
from benchmarks.peers import PEERS, SAVERS
from benchmarks.peers.ours import NO_LIBRARY, OURS, Copy
from benchmarks.report import Report

__all__ = ["TITLES", "run", "window"]

_MOST_STEPS = 500
_SLOW = {"DCP save", "DCP save, no crc32", "torch.save", "torch.save, no crc32", "safetensors"}
# The synchronous libraries are left out: their cost is their stall (benchmark "stall") and more.
TITLES = [title for title in SAVERS if title not in _SLOW]


def run(options: Options) -> Report:
    """All rows in every round, in random order."""
    nbytes = options.size(quick=24 << 20, full=256 << 20)
    steps = 2 if options.quick else 4
    count = options.repeats(quick=1, full=5)
    report = Report(
        options.name("cost"),
        f"one rank, {nbytes >> 20} MiB state, windows of {steps} steps before, during (at least) and after, "
        f"{options.threads} compute threads on {torch.get_num_threads()} cores, {options.place}",
    )
    with options.folder() as root:
        titles = options.chosen(TITLES, always=[Copy.title])
        with contestants(titles, root, report, nbytes=nbytes, threads=options.threads) as running:
            if Copy.title not in {each.title for each in running}:
                return report
            rounds(running, report, 1, window, lambda each, number: {"steps": 1})  # first saves are slower
            turns = rounds(
                running,
                report,
                count,
                window,
                lambda each, number: {"steps": steps},
                time_is_up=options.time_is_up,
            )
    _tabulate(report, turns)
    return report


def _tabulate(report: Report, turns: dict[str, list[Turn]]) -> None:
    copy = report.add(
        "ideal copy",
        [turn.value["stall_s"] for turn in turns[Copy.title]],
        note="the denominator: one copy of the state into warm memory, as many threads as the training",
    )
    report.add("training step alone", [t.value["step_s"] for turn in turns.values() for t in turn])
    ours = {each.title for each in OURS}
    for title in [*(each.title for each in NO_LIBRARY), *turns]:
        if title not in turns or title in {row.what for row in report.rows}:
            continue
        played = turns[title]
        peer = PEERS[title]
        durability = peer.durability if peer.durable else "fsync file+dir (by the harness)"
        stall = statistics.median(turn.value["stall_s"] for turn in played)
        after = statistics.median(turn.value["durable_s"] for turn in played)
        report.add(
            title,
            [turn.value["extra_s"] for turn in played],
            over=copy,
            bar="<= 1.3" if title in ours else "",
            durability=durability,
            cpu_s=[turn.value["extra_cpu_s"] for turn in played],
            foreign=max(turn.cost.foreign for turn in played),
            note=f"stall {stall * 1e3:.1f} ms, durable after {after:.2f} s",
        )


def window(stage: Stage, *, steps: int) -> dict[str, float]:
    """One window; seconds of stall, extra time, time to durable, and a plain step; extra CPU seconds."""
    before, cpu_before = _plain(stage, steps)
    path = stage.new_path()
    cpu_began, began = _cpu_s(), time.perf_counter()
    stall_s, durable_s, count = _saving(stage, path, steps)
    middle, cpu_middle = time.perf_counter() - began, _cpu_s() - cpu_began
    after, cpu_after = _plain(stage, steps)
    stage.peer.discard(path)
    step_s = (before + after) / 2 / steps
    step_cpu_s = (cpu_before + cpu_after) / 2 / steps
    return {
        "stall_s": stall_s,
        "extra_s": middle - count * step_s,
        "extra_cpu_s": cpu_middle - count * step_cpu_s,
        "durable_s": durable_s,
        "step_s": step_s,
    }


def _plain(stage: Stage, steps: int) -> tuple[float, float]:
    cpu, began = _cpu_s(), time.perf_counter()
    for _ in range(steps):
        stage.training.step()
    return time.perf_counter() - began, _cpu_s() - cpu


def _saving(stage: Stage, path: Path, steps: int) -> tuple[float, float, int]:
    """Save and train until the save is durable; return stall, seconds to durable, steps made."""
    peer, training = stage.peer, stage.training
    began = time.perf_counter()
    peer.save(path)
    stall_s = time.perf_counter() - began
    durable: Future[None] | None = None
    durable_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        for count in range(1, _MOST_STEPS):
            training.forward_backward()
            waits = time.perf_counter()
            peer.before_update()
            stall_s += time.perf_counter() - waits
            training.update()
            if durable is None and peer.done():
                durable = pool.submit(_make_durable, stage, path)
            if not durable_s and durable is not None and durable.done():
                durable.result()
                durable_s = time.perf_counter() - began
            if durable_s and count >= steps:
                return stall_s, durable_s, count
    raise RuntimeError(f"not durable after {_MOST_STEPS} steps")


def _make_durable(stage: Stage, path: Path) -> None:
    if not stage.peer.durable:
        sync_tree(path)


def _cpu_s() -> float:
    return tree_cpu_s(os.getpid())
