"""Pipeline schedules of torch: save between their steps, restore onto another split of the layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import bits_of
from tests.support.ranks import run_ranks
from tests.support.snapshot_trip import put_back, take, train_state

LAYERS, WIDTH, MICROBATCHES = 7, 6, 4
STEPS = 2
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}

State = dict[str, bytes]


class Part(nn.Module):
    """Some of the layers under their global names; the first part has an embedding, the last one a head."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__()
        bounds = [LAYERS * i // count for i in range(count + 1)]
        if number == 0:
            self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleDict(
            {str(i): nn.Linear(WIDTH, WIDTH) for i in range(bounds[number], bounds[number + 1])}
        )
        if number == count - 1:
            self.head = nn.Linear(WIDTH, 5)
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed"):
            hidden = self.embed(hidden)
        for layer in self.layers.values():
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden) if hasattr(self, "head") else hidden


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


class Run:
    """One rank of a pipeline: its chunks, an AdamW over them, and a schedule (or none, on one rank)."""

    def __init__(self, rank: int, world: int, kind: str, *, per_rank: int = 1) -> None:
        count = world * per_rank
        numbers = range(rank, count, world)
        self.chunks = [Part(number, count) for number in numbers]
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.rank, self.world = rank, world
        self.schedule: Any = None
        if world > 1:
            stages = [
                PipelineStage(chunk, number, count, torch.device("cpu"))
                for chunk, number in zip(self.chunks, numbers, strict=True)
            ]
            made: Callable[..., Any] = SCHEDULES[kind]
            self.schedule = made(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=_loss)

    @property
    def has_last(self) -> bool:
        return self.rank == self.world - 1

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 11, (8,), generator=generator)
            target = tokens % 5
            self.optimizer.zero_grad()
            losses.append(self._pass(tokens, target))
            self.optimizer.step()
        return losses

    def _pass(self, tokens: torch.Tensor, target: torch.Tensor) -> float:
        if self.schedule is None:
            loss = _loss(self.chunks[0](tokens), target)
            loss.backward()
            return loss.item()
        found: list[torch.Tensor] = []
        inputs = (tokens,) if self.rank == 0 else ()
        wanted = {"target": target, "losses": found} if self.has_last else {}
        self.schedule.step(*inputs, **wanted)
        return torch.stack(found).mean().item() if found else 0.0

    def state(self) -> State:
        found = {}
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                found[name] = bits_of(parameter)
                for key, value in self.optimizer.state[parameter].items():
                    found[f"{name}.{key}"] = bits_of(value)
        return found

    def manager(self, root: Path, run: str) -> CheckpointManager:
        return CheckpointManager(
            f"file://{root}/store/{run}",
            model=self.chunks,
            optimizer=self.optimizer,
            staging_dir=root / f"staging-{self.world}",
            timeout_s=60,
        )


def _save(rank: int, world: int, root: Path, kinds: dict[str, int]) -> dict[str, tuple[State, list[float]]]:
    outcomes = {}
    for kind, per_rank in kinds.items():
        run = Run(rank, world, kind, per_rank=per_rank)
        with run.manager(root, f"{kind}-{world}") as manager:
            manager.restore()
            run.train(range(STEPS))
            manager.save(STEPS)
            outcomes[kind] = run.state(), run.train(range(STEPS, STEPS + 3))
    return outcomes


def _restore(
    rank: int, world: int, root: Path, runs: list[str], kind: str, per_rank: int
) -> dict[str, tuple[State, list[float]]]:
    outcomes = {}
    for name in runs:
        run = Run(rank, world, kind, per_rank=per_rank)
        with torch.no_grad():
            for chunk in run.chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(7.0)
        with run.manager(root, name) as manager:
            assert manager.restore(STEPS) == STEPS
        outcomes[name] = run.state(), run.train(range(STEPS, STEPS + 3))
    return outcomes


def _united(outcomes: list[dict[str, tuple[State, list[float]]]]) -> dict[str, tuple[State, list[float]]]:
    """State of all ranks together, losses of the last one."""
    names = outcomes[0].keys()
    states: dict[str, State] = {name: {} for name in names}
    for outcome in outcomes:
        for name, (state, _) in outcome.items():
            assert not states[name].keys() & state.keys()
            states[name].update(state)
    return {name: (states[name], outcomes[-1][name][1]) for name in names}


@pytest.mark.slow
def test_I24_I49_schedules_restore_onto_any_other_split_and_onto_one_process(tmp_path: Path) -> None:
    saved: dict[str, tuple[State, list[float]]] = {}
    for world, kinds in ((2, {"gpipe": 1, "1f1b": 1, "interleaved": 2}), (3, {"1f1b": 1, "interleaved": 2})):
        outcomes = _united(run_ranks(world, _save, tmp_path, kinds))
        saved |= {f"{kind}-{world}": outcome for kind, outcome in outcomes.items()}
    runs = list(saved)
    for world, kind, per_rank in ((1, "none", 1), (2, "interleaved", 3), (3, "gpipe", 1), (4, "1f1b", 1)):
        restored = _united(run_ranks(world, _restore, tmp_path, runs, kind, per_rank))
        for name in runs:
            assert restored[name][0] == saved[name][0], (name, world, kind)
            assert restored[name][1] == pytest.approx(saved[name][1], rel=1e-4), (name, world, kind)


def _save_inside(rank: int, world: int, root: Path) -> tuple[str, str]:
    """Save from a forward hook, and from a backward hook; then as one should."""
    run = Run(rank, world, "1f1b")
    codes: list[str] = []
    with run.manager(root, "inside") as manager:
        manager.restore()

        def attempt(*_: object) -> None:
            try:
                manager.save(1)
            except InvalidInputError as error:
                codes.append(error.code)

        hooks = [run.chunks[0].register_forward_hook(attempt)]
        run.train(range(1))
        hooks.pop().remove()
        forward, codes[:] = set(codes), []
        first = next(iter(run.chunks[0].parameters()))
        first.register_hook(attempt)
        run.train(range(1, 2))
        backward = set(codes)
        manager.save(2)
    return ",".join(forward), ",".join(backward)


def test_save_from_inside_a_schedule_is_refused(tmp_path: Path) -> None:
    assert run_ranks(2, _save_inside, tmp_path) == [("inside-schedule", "inside-schedule")] * 2


# --- several chunks on one rank ---


def _tied() -> tuple[Part, Part]:
    first, last = Part(0, 2), Part(1, 2)
    last.embed = first.embed
    return first, last


def test_chunks_are_saved_under_global_names_and_restored_onto_the_whole_model() -> None:
    chunks = [Part(number, 3) for number in (0, 1, 2)]
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()])
    taken = take(train_state(model=chunks, optimizer=optimizer))
    whole = Part(0, 1)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    put_back(taken, train_state(model=whole, optimizer=torch.optim.AdamW(whole.parameters())))
    found = {name: bits_of(p) for name, p in whole.named_parameters()}
    assert found == {name: bits_of(p) for chunk in chunks for name, p in chunk.named_parameters()}


def test_I53_weight_that_two_chunks_share_is_stored_once_and_still_shared() -> None:
    chunks = _tied()
    taken = take(train_state(model=list(chunks)))
    assert "model.embed.weight" in taken.layouts
    others = _tied()
    with torch.no_grad():
        others[0].embed.weight.zero_()
    put_back(taken, train_state(model=list(others)))
    assert others[1].embed is others[0].embed
    assert bits_of(others[1].embed.weight) == bits_of(chunks[0].embed.weight)


def test_chunks_with_the_same_names_are_refused() -> None:
    chunks = [nn.Linear(2, 3), nn.Linear(2, 3)]
    with pytest.raises(InvalidInputError, match="must name their parameters as the whole model does"):
        take(train_state(model=chunks))


@pytest.mark.parametrize("item", [[], [nn.Linear(2, 2), "text"]])
def test_list_of_anything_but_modules_is_refused(item: list[object]) -> None:
    with pytest.raises(InvalidInputError, match="must be of modules"):
        train_state(model=item)
