"""Optimizer state in plain tensors beside sharded parameters: block-wise, declared, refused."""

from __future__ import annotations

import copy
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
from tests.support.models import barrier
from tests.support.optimizers import BlockwiseMomentum
from tests.support.ranks import run_ranks


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
    barrier()  # rank 0 has the ranks' key-value store, and may not leave while others read the refusal
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


def _history(rank: int, world: int, root: Path) -> None:
    """LBFGS steps on DTensors where every size is even, and keeps lists of them."""
    model = _linear("fsdp2", world, 8, 16, seed=0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with _block_manager(root, "sharded", world, model, optimizer) as manager:
        manager.restore()
        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="a DTensor inside a list"):
            manager.save(3)
    replica = _linear("single", world, 8, 16, seed=1)
    restored = torch.optim.LBFGS(replica.parameters(), max_iter=2)
    with _block_manager(root, "plain", world, replica, restored) as manager:
        assert manager.restore() == 1
    state = restored.state[next(iter(replica.parameters()))]
    assert_same_bits({"old_dirs": state["old_dirs"][0]}, {"old_dirs": torch.ones(128)})
    with _block_manager(root, "plain", world, model, optimizer) as manager:
        optimizer.state.clear()
        with pytest.raises(InvalidInputError, match="sharded here"):
            manager.restore(strict=False)
    barrier()


def _save_plain_history(rank: int, world: int, root: Path) -> None:
    model = _linear("single", world, 8, 16, seed=0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with _block_manager(root, "plain", world, model, optimizer) as manager:
        manager.restore()
        optimizer.step(lambda: model(torch.ones(2, 16)).square().mean().requires_grad_())
        optimizer.state[next(iter(model.parameters()))]["old_dirs"] = [torch.ones(128)]
        manager.save(1)


def test_history_is_restored_on_replicas_and_refused_over_sharded_parameters(tmp_path: Path) -> None:
    run_ranks(1, _save_plain_history, tmp_path)
    run_ranks(2, _history, tmp_path)
