"""FSDP1 through its state-dict API: exact onto itself, FSDP2 and one process, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import OddNet, build, full_state, train
from tests.support.ranks import run_ranks

State = dict[str, torch.Tensor]
STEPS, MORE = 2, 3

# torch announces FSDP1's end, and warns of pieces of it, wherever it is touched.
pytestmark = pytest.mark.filterwarnings("ignore")


def _wrap(model: nn.Module, world: int, **more: Any) -> Fsdp1:
    return Fsdp1(
        model,
        **{
            "use_orig_params": True,
            "device_mesh": init_device_mesh("cpu", (world,)),
            "device_id": torch.device("cpu"),  # FSDP1 does without an accelerator only when told to
            "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}),
            **more,
        },
    )


def _fsdp1(world: int, seed: int) -> tuple[Fsdp1, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _wrap(OddNet(), world)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _manager(root: Path, run: str, model: Any, optimizer: Any, world: int) -> CheckpointManager:
    return CheckpointManager(
        f"file://{root}/store/{run}",
        model=model,
        optimizer=optimizer,
        staging_dir=root / f"staging-{world}",
        timeout_s=60,
    )


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Everything in full, by FSDP1's own means where it is FSDP1."""
    if not isinstance(model, Fsdp1):
        return full_state(model, optimizer)
    found = {f"model.{name}": _full(value) for name, value in get_model_state_dict(model).items()}
    kind = StateDictType.SHARDED_STATE_DICT
    with Fsdp1.state_dict_type(model, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
        for name, entries in Fsdp1.optim_state_dict(model, optimizer)["state"].items():
            found |= {f"optimizer.{name}.{key}": _full(value) for key, value in entries.items()}
    return found


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _save(rank: int, world: int, root: Path) -> dict[str, list[float]]:
    """A run of FSDP1 with saves at 0 and 2, one without any, and a run of FSDP2."""
    losses = {}
    model, optimizer = _fsdp1(world, seed=0)
    losses["unsaved"] = list(train(model, optimizer, range(STEPS + MORE)))
    model, optimizer = _fsdp1(world, seed=0)
    with _manager(root, "fsdp1", model, optimizer, world) as manager:
        manager.restore()
        manager.save(0)
        assert not optimizer.state  # no step was made up to have a state
        assert optimizer._optimizer_step_post_hooks  # its own steps are counted, not those of a view
        losses["fsdp1"] = list(train(model, optimizer, range(STEPS)))
        manager.save(STEPS)
        if rank == 0:
            torch.save(_state(model, optimizer), root / "fsdp1.pt")
        else:
            _state(model, optimizer)
        losses["fsdp1"] += list(train(model, optimizer, range(STEPS, STEPS + MORE)))
    model, optimizer = build("fsdp2", world)
    with _manager(root, "fsdp2", model, optimizer, world) as manager:
        manager.restore()
        list(train(model, optimizer, range(STEPS)))
        manager.save(STEPS)
        state = full_state(model, optimizer)
        if rank == 0:
            torch.save(state, root / "fsdp2.pt")
    return losses


def _restore(rank: int, world: int, root: Path, kind: str) -> dict[str, list[float]]:
    losses = {}
    for run in ("fsdp1", "fsdp2"):
        model, optimizer = _fsdp1(world, seed=5) if kind == "fsdp1" else build(kind, world, seed=5)
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        with _manager(root, run, model, optimizer, world) as manager:
            assert manager.restore(STEPS) == STEPS
        assert_same_bits(_state(model, optimizer), torch.load(root / f"{run}.pt"))
        assert [group["lr"] for group in optimizer.param_groups] == [0.01]
        losses[run] = list(train(model, optimizer, range(STEPS, STEPS + MORE)))
    return losses


def test_fsdp1_restores_onto_itself_fsdp2_and_one_process_and_back(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, tmp_path)[0]
    assert saved["fsdp1"] == saved["unsaved"]
    for world, kind in ((2, "fsdp1"), (3, "fsdp1"), (3, "fsdp2"), (1, "single")):
        losses = run_ranks(world, _restore, tmp_path, kind)[0]
        if (world, kind) == (2, "fsdp1"):
            assert losses["fsdp1"] == saved["unsaved"][STEPS:]
        assert losses["fsdp1"] == pytest.approx(saved["unsaved"][STEPS:], rel=1e-4)
        assert losses["fsdp2"] == pytest.approx(saved["unsaved"][STEPS:], rel=1e-4)


def _refusals(rank: int, world: int, root: Path) -> list[str]:
    models = [
        nn.Sequential(_wrap(nn.Linear(3, 3), world)),
        _wrap(nn.Linear(3, 3), world, use_orig_params=False),
        _wrap(nn.Linear(3, 3), world, device_mesh=None),
    ]
    texts = []
    for model in models:
        try:
            _manager(root, "refused", model, None, world)
        except InvalidInputError as error:
            texts.append(error.message)
    return texts


def test_fsdp1_that_has_no_names_or_no_mesh_is_refused_at_construction(tmp_path: Path) -> None:
    for texts in run_ranks(2, _refusals, tmp_path):
        assert len(texts) == 3
        for text, word in zip(texts, ("wrap the whole model", "use_orig_params", "device_mesh"), strict=True):
            assert word in text
