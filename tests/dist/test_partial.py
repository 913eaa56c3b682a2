"""Partial restore onto another layout, agreed by all ranks: patterns, rename, casts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager, load, load_into
from tests.support.bits import assert_same_bits
from tests.support.models import OddNet, barrier, build, full_state, train
from tests.support.ranks import run_ranks


class Wrapping(nn.Module):
    """The same network one level deeper: every name has another prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OddNet()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def _manager(root: Path, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointManager:
    return CheckpointManager(
        f"file://{root}/store/run",
        model=model,
        optimizer=optimizer,
        staging_dir=root / "staging",
        timeout_s=60,
    )


def _partial(rank: int, world: int, root: Path) -> None:
    model, optimizer = build("fsdp2", world)
    with _manager(root, rank, model, optimizer) as manager:
        manager.restore()
        list(train(model, optimizer, range(3)))
        manager.save(3)
        saved = full_state(model, optimizer)

    _renamed_onto_tensor_parallel(rank, world, root, saved)
    _patterns(rank, world, root, saved)
    _refused_on_every_rank(rank, world, root, saved)
    _template(rank, world, root, saved)


def _renamed_onto_tensor_parallel(rank: int, world: int, root: Path, saved: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(5)
    model = Wrapping()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("other",))
    fully_shard(model.inner.up, mesh=mesh)  # the rest stays replicated
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with _manager(root, rank, model, optimizer) as manager:
        assert manager.restore(3, rename={"model.*": "model.inner.*"}) == 3
        found = full_state(model, optimizer)
    expected = {name.replace(".", ".inner.", 1): tensor for name, tensor in saved.items()}
    assert_same_bits(found, expected)
    assert optimizer.param_groups[0]["lr"] == 0.01


def _patterns(rank: int, world: int, root: Path, saved: dict[str, torch.Tensor]) -> None:
    model, optimizer = build("ddp", world, seed=5)
    before = full_state(model, optimizer)
    with _manager(root, rank, model, optimizer) as manager:
        manager.restore(3, include=["model.*"], exclude=["model.head.*"])
        found = full_state(model, optimizer)
    expected = {name: (before if name.startswith("model.head") else saved)[name] for name in before}
    assert_same_bits(found, expected)
    assert optimizer.state == {}


def _refused_on_every_rank(rank: int, world: int, root: Path, saved: dict[str, torch.Tensor]) -> None:
    """I82, I87: sharded and mismatched in every way; every rank hears of all, and nothing is touched."""
    model: Any = OddNet().to(torch.bfloat16)
    model.up = nn.Linear(10, 21)
    model.extra = nn.Linear(2, 2)
    fully_shard(model.up)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = full_state(model, optimizer)
    with _manager(root, rank, model, optimizer) as manager:
        with pytest.raises(InvalidInputError) as raised:
            manager.restore(3, weights_only=True)
        found = raised.value.context
        assert raised.value.code == "mismatch"
        assert "model.up.weight: saved [22, 10], live [21, 10]" in found["shapes"]
        assert "model.up.bias: saved [22], live [21]" in found["shapes"]
        assert "model.extra.weight; model.extra.bias" in found["missing"]
        assert "model.head.weight: saved float32, live bfloat16" in found["dtypes"]
        assert "unexpected" not in found
        assert_same_bits(full_state(model, optimizer), before)
        manager.restore(3, weights_only=True, exclude="model.up.*", allow_missing=True, cast_dtypes=True)
        restored = full_state(model, optimizer)
    assert_same_bits(
        restored,
        {
            name: before[name] if "extra" in name or ".up." in name else saved[name].to(tensor.dtype)
            for name, tensor in before.items()
        },
    )


def _template(rank: int, world: int, root: Path, saved: dict[str, torch.Tensor]) -> None:
    url = f"file://{root}/store/run"
    mesh = init_device_mesh("cpu", (world,))
    template: dict[str, Any] = {}
    for number, (name, tensor) in enumerate(saved.items()):
        placement = Shard(tensor.ndim - 1) if number % 2 and tensor.ndim else Replicate()
        template[name] = distribute_tensor(torch.zeros_like(tensor), mesh, [placement])
    assert load_into(url, template, checkpoint=3).step == 3
    full = {name: tensor.full_tensor() for name, tensor in template.items() if isinstance(tensor, DTensor)}
    assert_same_bits(full, saved)
    if rank == 0:
        loaded = load(url, ["model.*", "optimizer.*"], checkpoint=3)
        assert_same_bits({name: loaded[name] for name in saved}, saved)
    barrier()


def test_R3_part_of_a_checkpoint_restores_onto_another_layout(tmp_path: Path) -> None:
    run_ranks(2, _partial, tmp_path)
