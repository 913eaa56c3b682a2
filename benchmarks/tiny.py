"""What very many tiny tensors cost: each step of a save, first and later, without any process or disk."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.report import Report
from ckpt.collector import collector_paused
from ckpt_trainer_hooks.arena import Arena, arena_nbytes
from ckpt_trainer_hooks.layout import LayoutBuilder
from ckpt_trainer_hooks.snapshot import Binding, SnapshotPlan, plan_snapshot
from ckpt_trainer_hooks.state import TrainState

__all__ = ["STEPS", "TinySaves", "run"]

STEPS = ("flatten", "plan", "index", "bind", "copies", "copy", "check")
_PER_MODULE = 10


@dataclass(slots=True)
class TinySaves:
    """A model of ``count`` parameters of four elements each, and saves of it into an arena.

    Attributes:
        seconds: CPU time of each step, one entry per save. Not wall time: other work on the machine is not
            what is measured.
    """

    count: int
    seconds: list[dict[str, float]] = field(default_factory=list)
    _model: nn.Module = field(init=False)
    _state: TrainState = field(init=False)
    _plan: SnapshotPlan | None = field(init=False, default=None)
    _binding: Binding | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._model = nn.Module()
        for number in range(self.count // _PER_MODULE):
            child = nn.Module()
            for k in range(_PER_MODULE):
                child.register_parameter(f"p{k}", nn.Parameter(torch.full((4,), float(k))))
            self._model.add_module(f"m{number}", child)
        self._state = TrainState({"model": self._model}, LayoutBuilder(0, 1), rank=0)

    @collector_paused()  # as SavePipeline.save
    def save(self) -> float:
        """Do what the training thread does for a save; return the CPU seconds of it all."""
        clock = _Clock()
        flat = self._state.flatten()
        clock.lap("flatten")
        if self._plan is None or not self._plan.fits(flat.leaves):
            self._plan = plan_snapshot(flat.leaves, 0)
        clock.lap("plan")
        index = self._plan.constant_index + flat.values.SerializeToString()
        clock.lap("index")
        if self._binding is None or self._binding.plan is not self._plan:
            nbytes = arena_nbytes(self._plan.save.nbytes, len(index), len(self._plan.layout_bytes))
            self._binding = Binding(self._plan, Arena(nbytes))
        clock.lap("bind")
        copies = self._binding.copies(flat.leaves)
        clock.lap("copies")
        for each in copies:
            each.run()
        clock.lap("copy")
        for each in copies:
            each.check_unchanged()
        clock.lap("check")
        self.seconds.append(clock.laps)
        return sum(clock.laps.values())

    def forget(self) -> None:
        """Make the next save a first one."""
        self._state = TrainState({"model": self._model}, LayoutBuilder(0, 1), rank=0)
        self._plan = None


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps[name] = now - self._last
        self._last = now


def run(*, quick: bool, folder: Path | None) -> Report:
    """Measure first and later saves of 20,000 tensors of 16 bytes (``folder`` is not used)."""
    del folder
    torch.set_num_threads(1)
    count, repeats = (2_000, 3) if quick else (20_000, 7)
    saves = TinySaves(count)
    first = []
    for _ in range(repeats):
        saves.forget()
        first.append(saves.save())
    split = len(saves.seconds)
    later = [saves.save() for _ in range(repeats)]
    report = Report("tiny", f"{count} parameters of 16 bytes, one rank, CPU time of one thread")
    for name, total, laps in (
        ("first", first, saves.seconds[:split]),
        ("later", later, saves.seconds[split:]),
    ):
        each = min(total) / count * 1e6
        whole = report.add(f"{name} save", total, note=f"{each:.1f} us per tensor at best")
        for step in STEPS:
            report.add(f"{name}: {step}", [lap[step] for lap in laps], over=whole)
    return report
