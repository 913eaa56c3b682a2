"""What a save costs the training thread: blocked time against one warmed copy of the same bytes.

Also the honest figure: stall plus the sum of the slow-down of the steps that follow until the step is
committed, over the ideal copy time.
"""

from __future__ import annotations

import statistics
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
    width, layers = (1024, 8) if quick else (2304, 16)
    repeats = 3 if quick else 5
    training = make_training(width, layers)
    model, optimizer, step = training.model, training.optimizer, training.step
    step()
    state = [p.detach() for p in model.parameters()]
    state += [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    nbytes = sum(t.numel() * t.element_size() for t in state)
    report = Report("stall", f"one rank, {nbytes >> 20} MiB in {len(state)} tensors, 1 compute thread")
    target = [torch.zeros_like(tensor) for tensor in state]

    def copy_once() -> None:
        for a, b in zip(target, state, strict=True):
            a.copy_(b)

    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as root:
        for mode in ("blocking", "overlapped"):
            _measure(report, Path(root) / mode, mode, model, optimizer, step, repeats, copy_once)
    return report


def _measure(report, root, mode, model, optimizer, step, repeats, copy_once):  # type: ignore[no-untyped-def]
    copies, first, later, extra, idle = [], [], [], [], []
    copy_once()  # its memory is as warm as the arena
    with CheckpointManager(
        root / "store" / "run", model=model, optimizer=optimizer, staging_dir=root / "staging", mode=mode
    ) as manager:
        manager.restore()
        for _ in range(3):
            step()  # the arena is pre-faulted meanwhile
        for number in range(repeats + 1):
            idle += [_timed(step) for _ in range(3)]
            copies.append(_timed(copy_once))  # where a save would be: after a step, with its caches
            step()
            began = time.perf_counter()
            handle = manager.save(number)
            stall = time.perf_counter() - began
            (later if number else first).append(stall)
            slow = stall
            while not handle.done():
                slow += _timed(step) - statistics.median(idle)
            if number:
                extra.append(max(0.0, slow))
    base = report.add(f"{mode}: training step while nothing is saved", idle)
    copy = report.add(f"{mode}: one warmed copy, between the saves", copies, note="the limit")
    report.add(f"{mode}: first save blocks", first, over=copy)
    report.add(f"{mode}: later saves block", later, over=copy)
    if mode == "overlapped":
        report.add("overlapped: later saves block", later, over=base)
    report.add(f"{mode}: stall and slow-down until committed", extra, over=copy, note="file:// store")


def _timed(work) -> float:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
