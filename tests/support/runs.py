"""A small training run with everything that can be part of its state, and managers over it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt.flusher import embedded
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import OddNet, full_state, train

__all__ = ["Live", "Place", "assert_equal_runs", "capture_held", "save_steps", "seed_all", "stop_server"]


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(slots=True)
class Live:
    """The live objects of a run; each step draws from every generator."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    extra: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def new(cls, seed: int = 0) -> Live:
        seed_all(seed)
        model = OddNet(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7)
        return cls(
            model, optimizer, scheduler, {"noise": [], "pair": (1, (2.5, None)), 7: 2**80, "nan": np.nan}
        )

    def items(self) -> dict[str, Any]:
        """Arguments of a manager."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "state": {"extra": self.extra},
        }

    def train(self, steps: range, manager: CheckpointManager | None = None) -> list[float]:
        """Train; tells ``manager`` of every step."""
        losses = []
        for step in steps:
            losses += train(self.model, self.optimizer, range(step, step + 1))
            self.scheduler.step()
            self.extra["noise"].append((random.random(), float(np.random.rand()), torch.rand(()).item()))
            self.extra["last"] = torch.tensor(losses[-1], dtype=torch.float64)
            if manager is not None:
                manager.step(step)
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of model and optimizer."""
        return full_state(self.model, self.optimizer)


def assert_equal_runs(found: Live, expected: Live) -> None:
    """Every part equal, tensors by bits."""
    assert_same_bits(found.state(), expected.state())
    assert found.scheduler.state_dict() == expected.scheduler.state_dict()
    for mine, theirs in zip(found.optimizer.param_groups, expected.optimizer.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
    assert found.extra.keys() == expected.extra.keys()
    assert found.extra["noise"] == expected.extra["noise"]
    assert found.extra["pair"] == expected.extra["pair"]
    assert found.extra[7] == expected.extra[7]
    assert np.isnan(found.extra["nan"])
    if "last" in expected.extra:
        assert_same_bits({"last": found.extra["last"]}, {"last": expected.extra["last"]})


@dataclass(frozen=True, slots=True)
class Place:
    """Where one run keeps its checkpoints."""

    url: str
    staging: Path

    def manager(self, live: Live, **more: Any) -> CheckpointManager:
        return CheckpointManager(self.url, **{**live.items(), "staging_dir": self.staging, **more})

    def started(self, live: Live, **more: Any) -> CheckpointManager:
        """A manager of a run that was empty until now."""
        manager = self.manager(live, **more)
        assert manager.restore() == 0
        return manager

    def segments(self, ident: CheckpointId) -> tuple[Path, Path]:
        """Rank 0's segment: (local copy, object)."""
        root = Path(self.url.removeprefix("file://"))
        local = StagingDir(self.staging).segment_path(keys.run_key(self.url), ident, 0)
        return local, root / keys.segment_key(ident, 0)


def save_steps(
    place: Place, steps: list[int], **more: Any
) -> tuple[Live, dict[int, dict[str, torch.Tensor]]]:
    """Train and save at each of ``steps``; returns the objects and the state at each."""
    live, states, done = Live.new(), {}, 0
    with place.manager(live, **more) as manager:
        manager.restore()
        for step in steps:
            live.train(range(done, step))
            done = step
            states[step] = live.state()
            manager.save(step).upload_completion.result(30)
    return live, states


@contextlib.contextmanager
def capture_held(manager: CheckpointManager) -> Iterator[threading.Event]:
    """Occupy the capture thread until the event is set, at the latest until the end of the block."""
    gate, running = threading.Event(), threading.Event()

    def hold() -> None:
        running.set()
        gate.wait(60)

    manager._pipeline._threads.submit(hold)
    assert running.wait(30)
    try:
        yield gate
    finally:
        gate.set()


def stop_server(staging: Path) -> None:
    """End the embedded server of a staging directory and those that wait to take over, all started here."""
    mine = [child for child in embedded._children if str(staging) in child.args]  # type: ignore[operator]
    for child in mine:
        child.terminate()
    for child in mine:
        child.wait(30)
