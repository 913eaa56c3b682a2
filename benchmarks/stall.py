"""What a save costs the training thread: blocked time against one warmed copy of the same bytes.

Also the honest figure: stall plus the sum of the slow-down of the steps that follow until the step is
committed, over the ideal copy time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import Report
from benchmarks.training import make_training
from ckpt_trainer_hooks import CheckpointManager

__all__ = ["run"]


def run(*, quick: bool, folder: Path | None) -> Report:
    """Measure one rank with a model whose state (weights and Adam moments) is some hundred MiB."""
    torch.set_num_threads(1)
    width, layers = (1024, 8) if quick else (1536, 12)
    repeats = 3 if quick else 7
    training = make_training(width, layers)
    model, optimizer, step = training.model, training.optimizer, training.step
    step()
    state = [p.detach() for p in model.parameters()]
    state += [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    nbytes = sum(t.numel() * t.element_size() for t in state)
    report = Report("stall", f"one rank, {nbytes >> 20} MiB in {len(state)} tensors, 1 compute thread")
    copy = report.add("one warmed copy of the state", _copies(state, repeats), note="the limit")
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as root:
        idle = _idle_steps(step, 3 * repeats)
        base = report.add("training step, idle", idle)
        for mode in ("blocking", "overlapped"):
            _measure(report, Path(root) / mode, mode, model, optimizer, step, repeats, copy, base)
    return report


def _measure(report, root, mode, model, optimizer, step, repeats, copy, base):  # type: ignore[no-untyped-def]
    first, later, extra = [], [], []
    with CheckpointManager(
        root / "store" / "run", model=model, optimizer=optimizer, staging_dir=root / "staging", mode=mode
    ) as manager:
        manager.restore()
        for _ in range(3):
            step()  # the arena is pre-faulted meanwhile
        for number in range(repeats + 1):
            began = time.perf_counter()
            handle = manager.save(number)
            stall = time.perf_counter() - began
            (later if number else first).append(stall)
            slow = stall
            while not handle.done():
                started = time.perf_counter()
                step()
                slow += time.perf_counter() - started - base.median
            if number:
                extra.append(max(0.0, slow))
    report.add(f"{mode}: first save blocks", first, over=copy)
    report.add(f"{mode}: later saves block", later, over=copy)
    if mode == "overlapped":
        report.add("overlapped: later saves block", later, over=base, note="share of a step")
    report.add(f"{mode}: stall and slow-down until committed", extra, over=copy, note="file:// store")


def _copies(state: list[torch.Tensor], repeats: int) -> list[float]:
    target = [torch.zeros_like(t) for t in state]
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for a, b in zip(target, state, strict=True):
            a.copy_(b)
        times.append(time.perf_counter() - began)
    return times[1:]


def _idle_steps(step, count: int) -> list[float]:  # type: ignore[no-untyped-def]
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times
