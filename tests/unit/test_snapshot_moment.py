"""A snapshot is the state at the call: memory of every kind, changed right after; a copy that ends late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.errors import CkptError, SnapshotTornError
from ckpt_trainer_hooks.arena import Arena, arena_nbytes
from ckpt_trainer_hooks.capture import Capture
from ckpt_trainer_hooks.snapshot import Binding, plan_snapshot
from ckpt_trainer_hooks.state import TrainState
from tests.support.snapshot_trip import train_state

COUNT = 4096


@dataclass(slots=True)
class _Taking:
    """A snapshot in flight; its background copy runs when ``let_run`` is called."""

    arena: Arena
    capture: Capture
    starts: dict[str, int]
    waiting: list[Callable[[], None]] = field(default_factory=list)
    outcome: list[CkptError | None] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)  # of the arena, at the moment the reader was told

    @classmethod
    def of(cls, state: TrainState, *, overlapped: bool) -> _Taking:
        flat = state.flatten()
        plan = plan_snapshot(flat.leaves, 0)
        arena = Arena(arena_nbytes(plan.save.nbytes, 0, 0))
        binding = Binding(plan, arena)
        volatile, deferred = binding.copies(flat.leaves)
        starts = {array.name: array.start for array in plan.save.arrays}
        capture = Capture(volatile, deferred, lambda error: taking._told(error))
        taking = cls(arena, capture, starts)
        capture.start(overlapped=overlapped, on_thread=taking.waiting.append)
        return taking

    def _told(self, error: CkptError | None) -> None:
        self.outcome.append(error)
        self.images.append(bytes(self.arena.view))

    def let_run(self) -> None:
        for work in self.waiting:
            work()

    def array(self, name: str) -> list[float]:
        """The tensor as the reader (the flusher) finds it."""
        start = self.starts[name]
        return np.frombuffer(self.images[0][start : start + 4 * COUNT], np.float32).tolist()


def _plain(_: Path) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32)


def _numpy(_: Path) -> torch.Tensor:
    return torch.from_numpy(np.arange(COUNT, dtype=np.float32))


def _shared(_: Path) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32).share_memory_()


def _mapped_file(folder: Path) -> torch.Tensor:
    file = folder / "weights"
    file.write_bytes(np.arange(COUNT, dtype=np.float32).tobytes())
    return torch.from_file(str(file), shared=True, size=COUNT, dtype=torch.float32)


def _mapped_array(folder: Path) -> torch.Tensor:
    file = folder / "array"
    file.write_bytes(np.arange(COUNT, dtype=np.float32).tobytes())
    return torch.from_numpy(np.memmap(file, np.float32, "r+"))


MEMORY = (_plain, _numpy, _shared, _mapped_file, _mapped_array)
EXPECTED = np.arange(COUNT, dtype=np.float32).tolist()


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("make", MEMORY)
def test_I75_buffers_and_plain_tensors_are_those_of_the_call(
    make: Callable[[Path], torch.Tensor], overlapped: bool, tmp_path: Path
) -> None:
    tensor, plain = make(tmp_path), make(tmp_path).clone()
    model = nn.Linear(2, 2)  # something to copy later
    model.register_buffer("host", tensor)
    taking = _Taking.of(train_state(model=model, extra={"t": plain}), overlapped=overlapped)
    tensor.zero_()
    plain.numpy()[:] = -1  # behind torch's back
    taking.let_run()
    assert taking.outcome == [None]
    assert taking.array("model.host") == EXPECTED
    assert taking.array("extra.t") == EXPECTED


@pytest.mark.parametrize("make", MEMORY)
def test_I75_parameters_of_a_blocking_save_are_those_of_the_call(
    make: Callable[[Path], torch.Tensor], tmp_path: Path
) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(make(tmp_path))
    taking = _Taking.of(train_state(model=model), overlapped=False)
    with torch.no_grad():
        model.weight.zero_()
    assert taking.waiting == []
    assert taking.outcome == [None]
    assert taking.array("model.weight") == EXPECTED


@pytest.mark.parametrize("make", MEMORY)
def test_I75_parameter_changed_under_an_overlapped_copy_is_thrown_away_not_written(
    make: Callable[[Path], torch.Tensor], tmp_path: Path
) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(make(tmp_path))
    taking = _Taking.of(train_state(model=model), overlapped=True)
    with torch.no_grad():
        model.weight.zero_()
    taking.let_run()
    (error,) = taking.outcome
    assert isinstance(error, SnapshotTornError)
    assert error.context["tensors"] == ["model.weight"]


def test_I77_reader_is_told_only_after_a_copy_that_ends_late() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(COUNT, dtype=torch.float32))
    taking = _Taking.of(train_state(model=model), overlapped=True)
    fence_passed = threading.Event()

    def optimizer_step() -> None:
        taking.capture.before_optimizer_step()
        fence_passed.set()
        with torch.no_grad():
            model.weight.zero_()

    stepping = threading.Thread(target=optimizer_step)
    stepping.start()
    assert not fence_passed.wait(0.2)  # the copy has not even begun
    assert taking.images == []
    taking.let_run()
    stepping.join(30)
    assert fence_passed.is_set()
    assert taking.outcome == [None]
    assert taking.array("model.weight") == EXPECTED
