"""Optimizers over sharded parameters: resumed bitwise on the same layout, restored bit by bit on others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager, declare_local_state
from tests.support.bits import assert_same_bits
from tests.support.models import build, full_state, train
from tests.support.optimizers import BlockwiseMomentum, FactoredMoments
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
    ("layout", "others"),
    [("fsdp2", (("single", 1), ("tp", 2), ("fsdp2", 3))), ("tp", (("fsdp2", 2),))],
)
def test_I16_I28_resumed_run_is_bitwise_the_uninterrupted_one_with_every_optimizer(
    tmp_path: Path, layout: str, others: tuple[tuple[str, int], ...]
) -> None:
    run_ranks(2, _save_and_resume, tmp_path, layout)
    for other, world in others:
        gone = frozenset(FSDP_ONLY) if "tp" in (layout, other) and other != "tp" else frozenset()
        run_ranks(world, _restore_elsewhere, tmp_path, other, gone)


# --- state in plain tensors ---


def _linear(layout: str, world: int, rows: int, columns: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    if layout != "single":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    return model


def _block_wise(model: nn.Module, *, flat: bool, declare: bool = True) -> BlockwiseMomentum:
    optimizer = BlockwiseMomentum(model.parameters(), block_size=16, flat=flat)
    if declare:
        declare_local_state(
            optimizer, shards=["state1"], scales=["absmax1"], block_size=16, replicated=["qmap1"]
        )
    return optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    columns = next(iter(model.parameters())).shape[1]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(3, columns, generator=generator)).square().mean().backward()
        optimizer.step()


def _local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    (parameter,) = model.parameters()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    tensors = {key: value for key, value in optimizer.state[parameter].items() if key != "step"}
    return {"weight": local.detach().clone(), **copy.deepcopy(tensors)}


SHAPES = {"rows-of-blocks": (7, 32), "blocks-of-rows": (12, 8), "cut": (5, 10)}


def _blocks(rank: int, world: int, root: Path, flat: bool) -> None:
    """Save every shape, resume each, restore onto the single process' way where no block is cut."""
    for name, (rows, columns) in SHAPES.items():
        model = _linear("fsdp2", world, rows, columns, seed=0)
        optimizer = _block_wise(model, flat=flat)
        with _block_manager(root, name, world, model, optimizer) as manager:
            manager.restore()
            _step(model, optimizer, range(3))
            manager.save(3)
            _step(model, optimizer, range(3, 6))
        live = _linear("fsdp2", world, rows, columns, seed=1)
        fresh = _block_wise(live, flat=flat)
        with _block_manager(root, name, world, live, fresh) as manager:
            assert manager.restore() == 3
            assert _step_of(live, fresh) == 3
            _step(live, fresh, range(3, 6))
        assert_same_bits(_local_state(live, fresh), _local_state(model, optimizer))


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return int(optimizer.state[next(iter(model.parameters()))]["step"])


def _block_manager(root: Path, name: str, world: int, model: nn.Module, optimizer: Any) -> CheckpointManager:
    return CheckpointManager(
        f"file://{root}/store/{name}",
        model=model,
        optimizer=optimizer,
        staging_dir=root / f"staging-{world}",
        timeout_s=100,
    )


def _blocks_elsewhere(
    rank: int, world: int, root: Path, layout: str, refused: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (rows, columns) in SHAPES.items():
        model = _linear(layout, world, rows, columns, seed=1)
        optimizer = _block_wise(model, flat=False, declare=layout != "single")
        before = copy.deepcopy(model.state_dict())
        with _block_manager(root, name, world, model, optimizer) as manager:
            if name in refused:
                with pytest.raises(InvalidInputError, match="cut blocks of 16 elements"):
                    manager.restore(strict=False)
                assert not optimizer.state
                after = model.state_dict()
                assert all(torch.equal(_whole(after[key]), _whole(value)) for key, value in before.items())
                continue
            assert manager.restore() == 3
            found[name] = _sendable(_local_state(model, optimizer))
            _step(model, optimizer, range(3, 6))
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_block_wise_state_is_exact_on_its_layout_and_cut_only_at_block_borders(tmp_path: Path) -> None:
    run_ranks(2, _blocks, tmp_path, False)
    (single,) = run_ranks(1, _blocks_elsewhere, tmp_path, "single", ("cut",))
    four = run_ranks(4, _blocks_elsewhere, tmp_path, "fsdp2", ("blocks-of-rows", "cut"))
    assert single.keys() == {"rows-of-blocks", "blocks-of-rows"}
    _assert_parts(four, single, "rows-of-blocks")


def test_block_wise_state_of_one_process_is_spread_over_ranks_at_block_borders(tmp_path: Path) -> None:
    (saved,) = run_ranks(1, _save_single, tmp_path)
    two = run_ranks(2, _blocks_elsewhere, tmp_path, "fsdp2", ("cut",))
    for name in ("rows-of-blocks", "blocks-of-rows"):
        _assert_parts(two, saved, name)


def _save_single(rank: int, world: int, root: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (rows, columns) in SHAPES.items():
        model = _linear("single", world, rows, columns, seed=0)
        optimizer = _block_wise(model, flat=False, declare=False)
        with _block_manager(root, name, world, model, optimizer) as manager:
            manager.restore()
            _step(model, optimizer, range(3))
            manager.save(3)
            found[name] = _sendable(_local_state(model, optimizer))
    return found


def _sendable(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Arrays: a tensor is sent as a handle that its process would have to outlive."""
    return {key: value.numpy() for key, value in state.items()}


def _assert_parts(ranks: list[Any], whole: dict[str, dict[str, Any]], name: str) -> None:
    for key in ("weight", "state1", "absmax1"):
        parts = [torch.from_numpy(part[name][key]) for part in ranks]
        assert_same_bits({key: torch.cat(parts)}, {key: torch.from_numpy(whole[name][key])})


def test_flat_block_wise_state_is_exact_on_its_layout(tmp_path: Path) -> None:
    run_ranks(2, _blocks, tmp_path, True)


def _undeclared(rank: int, world: int, root: Path) -> None:
    model = _linear("fsdp2", world, 8, 16, seed=0)
    optimizer = _block_wise(model, flat=False, declare=False)
    with _block_manager(root, "undeclared", world, model, optimizer) as manager:
        manager.restore()
        with pytest.raises(InvalidInputError, match="declare_local_state") as caught:
            _step(model, optimizer, range(1))  # the size of a snapshot is planned after the first step
    assert caught.value.context["tensor"] == "optimizer.0.weight.state1"


def test_plain_state_of_a_shards_size_is_refused_unless_it_is_declared(tmp_path: Path) -> None:
    run_ranks(2, _undeclared, tmp_path)
