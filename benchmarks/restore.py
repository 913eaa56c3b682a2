"""Time of a restore into live tensors, warm, next to one memory copy and to peers."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.report import Report
from benchmarks.training import make_training, state_tensors
from ckpt_trainer_hooks import CheckpointManager

__all__ = ["run"]


def run(*, quick: bool, folder: Path | None) -> Report:
    """One rank; every row verifies nothing but ckpt's, which checks the digest of every chunk."""
    torch.set_num_threads(1)
    training = make_training(*((1024, 8) if quick else (1536, 12)))
    training.step()
    tensors = state_tensors(training)
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    repeats = 2 if quick else 7
    report = Report("restore", f"one rank, {nbytes >> 20} MiB, page cache warm")
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        root = Path(name)
        torch.save(tensors, root / "a.pt")
        save_file(tensors, root / "a.safetensors")
        dcp.save(dict(tensors), checkpoint_id=root / "dcp", no_dist=True)
        target = {key: torch.zeros_like(value) for key, value in tensors.items()}
        rows: dict[str, Callable[[], None]] = {
            "one memory copy": lambda: _copy(target, tensors),
            "torch.load and copy": lambda: _copy(target, torch.load(root / "a.pt")),
            "safetensors and copy": lambda: _copy(target, load_file(root / "a.safetensors")),
            "torch.distributed.checkpoint": lambda: dcp.load(
                target, checkpoint_id=root / "dcp", no_dist=True
            ),
        }
        times: dict[str, list[float]] = {}
        with _manager(root, training) as manager:
            manager.restore()
            manager.save(1)
            manager.wait_until_finished()
        for _ in range(repeats + 1):
            for what, read in rows.items():
                _append(times, what, read)
            for what in ("ckpt: local NVMe", "ckpt: store (directory)"):
                if "store" in what:
                    shutil.rmtree(root / "staging" / "runs")
                with _manager(root, training) as manager:
                    _append(times, what, manager.restore)
                shutil.rmtree(root / "staging" / "runs", ignore_errors=True)
                _seal_again(root, training)
    limit = report.add("one memory copy", times.pop("one memory copy")[1:], note="the limit")
    for what, seconds in times.items():
        report.add(what, seconds[1:], over=limit)
    return report


def _manager(root: Path, training) -> CheckpointManager:  # type: ignore[no-untyped-def]
    return CheckpointManager(
        str(root / "store" / "run"),
        model=training.model,
        optimizer=training.optimizer,
        staging_dir=root / "staging",
    )


def _seal_again(root: Path, training) -> None:  # type: ignore[no-untyped-def]
    """Put a local copy of a newer step there, so that the next restore finds one."""
    with _manager(root, training) as manager:
        step = manager.restore()
        manager.save(step + 1)
        manager.wait_until_finished()


def _append(times: dict[str, list[float]], what: str, read: Callable[[], object]) -> None:
    began = time.perf_counter()
    read()
    times.setdefault(what, []).append(time.perf_counter() - began)


def _copy(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    for key, value in source.items():
        target[key].copy_(value)
