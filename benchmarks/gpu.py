"""What a save costs a training step on a GPU: ``python -m benchmarks.gpu [--gib N]``. Under five minutes.

Three things: the copy from the device into page-locked memory against the speed of the link; the stall of an
overlapped save in a real transformer step in bfloat16, for this project, for torch.distributed.checkpoint
(async, pinned staging) and for torch_checkpointing; and the slow-down of the steps that follow, until the
library says that it is done (ours: sealed).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.report import RESULTS, Report, Row
from examples.gpt import GPT, GPTConfig

__all__ = ["SAVERS", "GpuTraining", "config_for", "main", "measure"]

_DURABLE_S = 60.0
_VOCAB, _CONTEXT = 32_000, 1024


def config_for(nbytes: int) -> GPTConfig:
    """Return a GPT whose fp32 weights and both moments take about ``nbytes`` bytes."""
    dim = 2048 if nbytes >= 4 << 30 else 1024 if nbytes >= 1 << 30 else 256
    vocab = _VOCAB if dim > 256 else 256
    blocks = nbytes / 12 - 2 * vocab * dim
    layers = max(1, round(blocks / (12 * dim**2)))
    context = _CONTEXT if dim > 256 else 64
    return GPTConfig(vocab, context=context, dim=dim, heads=max(1, dim // 128), layers=layers, hidden=4 * dim)


@dataclass(slots=True)
class GpuTraining:
    """fp32 weights, bfloat16 arithmetic, fused AdamW: what most runs do.

    Attributes:
        device: where it runs; the parts that need no GPU are tested on "cpu".
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    device: str

    @classmethod
    def make(cls, nbytes: int, device: str, batch: int) -> GpuTraining:
        config = config_for(nbytes)
        torch.manual_seed(0)
        model = GPT(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(config.vocab, (batch, config.context + 1), device=device)
        return cls(model, optimizer, tokens, device)

    def forward_backward(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def tensors(self) -> list[torch.Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values() if v.dim()]
        return [p.detach() for p in self.model.parameters()] + moments

    def plain_state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class OurSaver:
    title = "ckpt, overlapped"

    def __init__(self, training: GpuTraining, folder: Path) -> None:
        from ckpt_trainer_hooks import CheckpointManager

        self._manager = CheckpointManager(
            (folder / "store" / "run").as_uri(),
            model=training.model,
            optimizer=training.optimizer,
            staging_dir=folder / "staging",
            server=f"unix:{folder}/no-server.sock",
            on_error="warn",
            mode="overlapped",
        )
        self._manager.restore()
        self._number = 0

    def save(self, path: Path) -> Callable[[], bool]:
        self._number += 1
        return self._manager.save(self._number).local_completion.done

    def before_update(self) -> None:
        """Nothing: the hook of the optimizer makes the training stream wait."""

    def close(self) -> None:
        self._manager.close()


class DcpSaver:
    title = "DCP async, pinned and cached"

    def __init__(self, training: GpuTraining, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        from benchmarks.peers.base import single_process_group

        single_process_group()
        on_gpu = training.device == "cuda"
        self._training, self._dcp = training, dcp
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_non_blocking_copy=on_gpu,
                use_shared_memory=False,
                use_async_staging=True,
            )
        )
        self._staged: Any = None

    def save(self, path: Path) -> Callable[[], bool]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        response: Any = self._dcp.async_save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=path, async_stager=self._stager
        )
        self._staged = response.staging_completion
        done: Callable[[], bool] = response.upload_completion.done
        return done

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def close(self) -> None:
        self._stager.close()


class MetaSaver:
    title = "torch_checkpointing"

    def __init__(self, training: GpuTraining, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._training = training
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager.Config(storage_config=storage).build()
        self._manager.prewarm_staging(training.plain_state())

    def save(self, path: Path) -> Callable[[], bool]:
        saved: Any = self._manager.save(str(path), self._training.plain_state())
        done: Callable[[], bool] = saved.done
        return done

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def close(self) -> None:
        self._manager.close()


SAVERS: dict[str, Callable[[GpuTraining, Path], Any]] = {
    each.title: each for each in (OurSaver, DcpSaver, MetaSaver)
}


def measure(report: Report, training: GpuTraining, folder: Path, *, repeats: int) -> None:
    """Fill the report: plain steps, then every saver that can be had, first save and later ones."""
    plain = [_timed(training, lambda: _step(training, None)) for _ in range(repeats + 3)][3:]
    step = report.add("training step, bf16", plain, note="synchronised at its end")
    for title, make in SAVERS.items():
        try:
            saver = make(training, folder / title.replace(" ", "-"))
        except ImportError as error:
            report.absent(title, f"not installed: {error.name}")
            continue
        stalls, slowed = [], []
        for number in range(repeats + 1):
            for _ in range(2):
                _step(training, saver)
            training.synchronize()
            stall, slow = _one_save(
                training, saver, folder / f"{title}-{number}".replace(" ", "-"), step.median
            )
            stalls.append(stall)
            slowed.append(slow)
        report.add(f"{title}: first save blocks", stalls[:1], over=step)
        ours = title == OurSaver.title
        report.add(f"{title}: later saves block", stalls[1:], over=step, bar="<= 0.01" if ours else "")
        report.add(f"{title}: stall and slow-down until done", slowed[1:], over=step)
        saver.close()


def _one_save(training: GpuTraining, saver: Any, path: Path, step_s: float) -> tuple[float, float]:
    """Return seconds that the host was blocked, and the extra time of all steps until the save is done."""
    began = time.perf_counter()
    done = saver.save(path)
    stall = time.perf_counter() - began
    extra, deadline = stall, time.monotonic() + _DURABLE_S
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a save is not done after {_DURABLE_S:.0f} s")
        extra += _timed(training, lambda: _step(training, saver)) - step_s
    return stall, extra


def _step(training: GpuTraining, saver: Any) -> None:
    training.forward_backward()
    if saver is not None:
        saver.before_update()
    training.update()


def _timed(training: GpuTraining, work: Callable[[], None]) -> float:
    training.synchronize()
    began = time.perf_counter()
    work()
    training.synchronize()
    return time.perf_counter() - began


def measure_link(report: Report, training: GpuTraining, *, repeats: int) -> Row:
    """Copy the state into page-locked memory on a side stream; beside one large copy, the limit."""
    sources = training.tensors()
    nbytes = sum(tensor.nbytes for tensor in sources)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    views, start = [], 0
    for tensor in sources:
        views.append(pinned[start : start + tensor.nbytes])
        start += tensor.nbytes

    def one_large() -> None:
        pinned.copy_(flat, non_blocking=True)

    def each_tensor() -> None:
        with torch.cuda.stream(stream):
            for view, tensor in zip(views, sources, strict=True):
                view.copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)

    whole = [_timed(training, one_large) for _ in range(repeats)]
    parts = [_timed(training, each_tensor) for _ in range(repeats)]
    limit = report.add("link: one copy of as many bytes", whole, note=_rate(nbytes, min(whole)))
    return report.add(
        "every tensor, side stream, pinned arena",
        parts,
        over=limit,
        inverse=True,
        bar=">= 0.95",
        note=_rate(nbytes, min(parts)),
    )


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.1f} GB/s at best"


def main(argv: list[str] | None = None) -> int:
    """Measure on the first GPU. Returns 2 where there is none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the state")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the NVMe to write to")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device, and torch sees none here", file=sys.stderr)
        return 2
    training = GpuTraining.make(int(options.gib * 2**30), "cuda", options.batch)
    training.forward_backward()
    training.update()
    report = Report("gpu", f"{torch.cuda.get_device_name()}, {options.gib} GiB state, batch {options.batch}")
    measure_link(report, training, repeats=options.repeats)
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as name:
        measure(report, training, Path(name), repeats=options.repeats)
    report.publish(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
