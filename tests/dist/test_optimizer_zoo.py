"""Optimizers over sharded parameters: resumed bitwise on the same layout, restored bit by bit on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import build, full_state, train
from tests.support.optimizers import FactoredMoments
from tests.support.ranks import run_ranks

SAVES = (0, 1, 3)
MORE = 5

Make = Callable[[list[torch.Tensor]], list[torch.optim.Optimizer]]
ZOO: dict[str, Make] = {
    "adam_amsgrad": lambda p: [torch.optim.Adam(p, lr=0.01, amsgrad=True)],
    "adamw_tensor_lr": lambda p: [torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False)],
    "sgd": lambda p: [torch.optim.SGD(p, lr=0.01, momentum=0.9)],
    "nadam": lambda p: [torch.optim.NAdam(p, lr=0.01)],
    "radam": lambda p: [torch.optim.RAdam(p, lr=0.01)],
    "asgd": lambda p: [torch.optim.ASGD(p, lr=0.01, t0=2)],
    "adagrad": lambda p: [torch.optim.Adagrad(p, lr=0.01)],
    "rmsprop": lambda p: [torch.optim.RMSprop(p, lr=0.01, momentum=0.5)],
    "factored": lambda p: [FactoredMoments(p)],
    "muon_adamw": lambda p: [
        torch.optim.Muon([each for each in p if each.ndim == 2], lr=0.01),
        torch.optim.AdamW([each for each in p if each.ndim != 2], lr=0.01),
    ],
}
# torch 2.13 mixes tensors and DTensors in these where some parameters are not sharded (TP).
FSDP_ONLY: dict[str, Make] = {
    "adamw_foreach": lambda p: [torch.optim.AdamW(p, lr=0.01, foreach=True)],
    "adamw_fused": lambda p: [torch.optim.AdamW(p, lr=0.01, fused=True)],
}


class _Runs:
    """One model for each optimizer of the zoo, all under one manager, each with an average of its weights."""

    def __init__(self, layout: str, world: int, seed: int) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        for name, make in (ZOO | FSDP_ONLY).items():
            if name in FSDP_ONLY and layout == "tp":
                continue
            self.models[name] = build(layout, world, seed=seed)[0]
            self.optimizers[name] = make(list(self.models[name].parameters()))

    def manager(self, root: Path, world: int) -> CheckpointManager:
        return CheckpointManager(
            f"file://{root}/store/run",
            optimizer={
                f"{name}_{n}": each
                for name, several in self.optimizers.items()
                for n, each in enumerate(several)
            },
            state={f"model_{name}": model for name, model in self.models.items()},
            staging_dir=root / f"staging-{world}",
            timeout_s=100,
        )

    def train(self, steps: range) -> list[float]:
        losses = []
        for name, model in self.models.items():
            losses += train(model, _All(self.optimizers[name]), steps)  # type: ignore[arg-type]
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{n}.{key}": value
            for name, model in self.models.items()
            for n, optimizer in enumerate(self.optimizers[name])
            for key, value in full_state(model, optimizer).items()
        }


class _All:
    """Several optimizers in one call."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def _save_and_resume(rank: int, world: int, root: Path, layout: str) -> None:
    plain = _Runs(layout, world, seed=0)
    for step in range(max(SAVES) + MORE):
        plain.train(range(step, step + 1))
    at_the_end = plain.state()

    runs = _Runs(layout, world, seed=0)
    states, losses = {}, []
    with runs.manager(root, world) as manager:
        assert manager.restore() == 0
        for step in range(max(SAVES) + MORE):
            if step in SAVES:
                manager.save(step)
            losses.append(runs.train(range(step, step + 1)))
            states[step + 1] = runs.state()
    assert_same_bits(states[max(SAVES) + MORE], at_the_end)
    if rank == 0:
        torch.save(states[max(SAVES)], root / "expected.pt")

    live = _Runs(layout, world, seed=5)
    with live.manager(root, world) as manager:
        for step in (3, 0, 1):  # never stepped; then with state to be replaced, or to go
            assert manager.restore(step) == step
            for each in range(step, step + MORE):
                assert live.train(range(each, each + 1)) == losses[each], (step, each)
            assert_same_bits(live.state(), states[step + MORE])


def _restore_elsewhere(rank: int, world: int, root: Path, layout: str, skipped: frozenset[str]) -> None:
    live = _Runs(layout, world, seed=5)
    for name in skipped:
        del live.models[name], live.optimizers[name]
    with live.manager(root, world) as manager:
        assert manager.restore(max(SAVES), allow_unexpected=True) == max(SAVES)
        found = live.state()
        expected = torch.load(root / "expected.pt")
        assert_same_bits(found, {name: expected[name] for name in found})
        live.train(range(max(SAVES), max(SAVES) + 1))


@pytest.mark.parametrize(
    ("layout", "world", "others"),
    [
        ("fsdp2", 2, (("single", 1), ("fsdp2", 3))),
        ("tp", 2, (("fsdp2", 2),)),
        ("single", 1, (("fsdp2", 2), ("tp", 2))),
    ],
)
def test_I16_I28_resumed_run_is_bitwise_the_uninterrupted_one_with_every_optimizer(
    tmp_path: Path, layout: str, world: int, others: tuple[tuple[str, int], ...]
) -> None:
    run_ranks(world, _save_and_resume, tmp_path, layout)
    for other, ranks in others:
        gone = frozenset(FSDP_ONLY) if layout == "tp" else frozenset()
        run_ranks(ranks, _restore_elsewhere, tmp_path, other, gone)


def _sendable(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Arrays: a tensor is sent as a handle that its process would have to outlive."""
    return {key: value.numpy() for key, value in state.items()}


def _averaged(layout: str, world: int, seed: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """torch cannot copy a sharded model, so the average is made before it and the model are sharded."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    elif layout == "fsdp2":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh)
        fully_shard(average.module, mesh=mesh)
    return model, average, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _average_on(rank: int, world: int, root: Path, layout: str, saved_from: str) -> dict[str, dict[str, Any]]:
    def run(live: tuple[nn.Module, Any, torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            live[2].zero_grad()
            live[0](torch.full((2, 6), 0.1 * step)).square().mean().backward()
            live[2].step()
            live[1].update_parameters(live[0])

    def full(live: tuple[nn.Module, Any, torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in live[1].state_dict().items()
        }

    def manager(live: tuple[nn.Module, Any, torch.optim.Optimizer]) -> CheckpointManager:
        return CheckpointManager(
            f"file://{root}/store/{saved_from}",
            model=live[0],
            optimizer=live[2],
            state={"ema": live[1]},
            staging_dir=root / f"staging-{world}",
            timeout_s=100,
        )

    states = {}
    if layout == saved_from:
        live = _averaged(layout, world, seed=0)
        with manager(live) as saving:
            saving.restore()
            run(live, range(3))
            saving.save(3)
            states["saved"] = full(live)
            run(live, range(3, 6))
            states["end"] = full(live)
    other = _averaged(layout, world, seed=1)
    with manager(other) as restoring:
        assert restoring.restore() == 3
        states["restored"] = full(other)
        run(other, range(3, 6))
        states["resumed"] = full(other)
    return {name: _sendable(state) for name, state in states.items()}


@pytest.mark.parametrize(("layout", "onto"), [("fsdp2", "ddp"), ("ddp", "fsdp2")])
def test_average_of_the_weights_is_sharded_and_restored_like_a_model(
    tmp_path: Path, layout: str, onto: str
) -> None:
    here = run_ranks(2, _average_on, tmp_path, layout, layout)[0]
    there = run_ranks(3, _average_on, tmp_path, onto, layout)[0]
    tensors = {
        name: {key: torch.from_numpy(value) for key, value in state.items()} for name, state in here.items()
    }
    assert int(tensors["saved"]["n_averaged"]) == 3
    assert_same_bits(tensors["restored"], tensors["saved"])
    assert_same_bits(tensors["resumed"], tensors["end"])
    assert_same_bits(
        {key: torch.from_numpy(value) for key, value in there["restored"].items()}, tensors["saved"]
    )
