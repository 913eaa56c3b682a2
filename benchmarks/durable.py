"""Time until a save is sealed (durable on the local disk) and committed, next to a raw writer and to peers.

Durability of each row: raw writer, torch.save and safetensors end with fdatasync of the file; ``sealed`` with
fsync of file, index and directory; ``committed`` adds the object (a second durable copy on the same disk) and
the manifest; torch.distributed.checkpoint syncs its files but not its directory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.report import Report
from benchmarks.training import make_training, state_tensors
from ckpt.storage.direct import DirectFile, aligned_buffer, write_chunks
from ckpt_trainer_hooks import CheckpointManager

__all__ = ["run"]


def run(*, quick: bool, folder: Path | None) -> Report:
    """One rank, state of some hundred MiB; the rows take turns in each repeat."""
    torch.set_num_threads(1)
    training = make_training(*((1024, 8) if quick else (1536, 12)))
    training.step()
    tensors = state_tensors(training)
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    repeats = 2 if quick else 7
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        root = Path(name)
        buffer = aligned_buffer(nbytes)
        buffer[:] = b"\1" * len(buffer)
        rows: dict[str, Callable[[Path], None]] = {
            "raw aligned direct writer": lambda path: _raw(path, buffer),
            "torch.save": lambda path: _synced(path, lambda: torch.save(tensors, path)),
            "safetensors": lambda path: _synced(path, lambda: save_file(tensors, path)),
            "torch.distributed.checkpoint": lambda path: _dcp(path, tensors),
        }
        with CheckpointManager(
            str(root / "store" / "run"),
            model=training.model,
            optimizer=training.optimizer,
            staging_dir=root / "staging",
            mode="blocking",
        ) as manager:
            manager.restore()
            manager.save(1)
            manager.wait_until_finished()
            for number in range(repeats):
                for what, write in rows.items():
                    path = root / "peer"
                    times.setdefault(what, []).append(_timed(lambda w=write, p=path: w(p)))
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                began = time.perf_counter()
                handle = manager.save(2 + number)
                handle.local_completion.result()
                times.setdefault("ckpt: sealed", []).append(time.perf_counter() - began)
                handle.upload_completion.result()
                times.setdefault("ckpt: committed (two copies)", []).append(time.perf_counter() - began)
    report = Report("durable", f"one rank, {nbytes >> 20} MiB; {folder or 'default temporary folder'}")
    limit = report.add("raw aligned direct writer", times.pop("raw aligned direct writer"), note="the limit")
    for what, seconds in times.items():
        report.add(what, seconds, over=limit)
    return report


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _raw(path: Path, buffer: memoryview) -> None:
    with DirectFile(path, os.O_WRONLY | os.O_CREAT) as file:
        write_chunks(file, buffer, len(buffer), chunk_nbytes=8 << 20, threads=4)
        os.fdatasync(file.fd)


def _synced(path: Path, write: Callable[[], None]) -> None:
    write()
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.close(fd)


def _dcp(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
