"""Pipeline stages: global names, options per stage, an embedding tied over two stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import bits_of
from tests.support.models import barrier, full_state
from tests.support.ranks import run_ranks

LAYERS = 5  # over 2 stages: 3 and 2
RATES = {0: 0.01, 1: 0.02}  # of the stages that save


class Stage(nn.Module):
    """Some of the layers, under their global names; the embedding is on the first and on the last stage."""

    def __init__(self, layers: range, *, total: int = LAYERS) -> None:
        super().__init__()
        if layers.start == 0 or layers.stop == total:
            self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in layers})


def _stage(number: int, stages: int) -> Stage:
    size = -(-LAYERS // stages)
    torch.manual_seed(0)
    stage = Stage(range(number * size, min(LAYERS, (number + 1) * size)))
    for name, parameter in stage.named_parameters():
        torch.manual_seed(sum(map(ord, name)))  # a parameter's value depends on its name alone
        nn.init.normal_(parameter)
    return stage


def _step(stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(stage.parameters()):
        torch.manual_seed(number)
        parameter.grad = torch.ones_like(parameter) * (number + 1)
    optimizer.step()
    optimizer.zero_grad()


def _manager(root: Path, stage: nn.Module, optimizer: torch.optim.Optimizer, node: str) -> CheckpointManager:
    url = f"file://{root}/store/pp"
    return CheckpointManager(url, model=stage, optimizer=optimizer, staging_dir=root / node, timeout_s=30)


def _save(rank: int, world: int, root: Path, data: str, rates: dict[int, float]) -> dict[str, bytes]:
    """Two stages; with four ranks each stage has two data-parallel ranks."""
    per_stage = world // 2
    number = rank // per_stage
    stage = _stage(number, 2)
    if data == "fsdp2":
        mesh = init_device_mesh("cpu", (2, per_stage), mesh_dim_names=("pp", "dp"))
        fully_shard(stage, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=rates[number])
    with _manager(root, stage, optimizer, "save") as manager:
        manager.restore()
        _step(stage, optimizer)
        manager.save(1)
    # The tied embedding is the same on both stages, its optimizer state need not be.
    return {name: bits_of(tensor) for name, tensor in full_state(stage, optimizer).items()}


def _restore(rank: int, world: int, root: Path, stages: int) -> tuple[dict[str, bytes], list[float]]:
    stage = _stage(rank * stages // world, stages)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1.0)
    with _manager(root, stage, optimizer, f"restore-{world}") as manager:
        assert manager.restore(1) == 1
    barrier()  # rank 0 has the store that the others may still read
    state = full_state(stage, optimizer)
    return {name: bits_of(tensor) for name, tensor in state.items()}, [
        g["lr"] for g in optimizer.param_groups
    ]


@pytest.mark.parametrize(("world", "data"), [(2, "plain"), (4, "plain"), (4, "fsdp2")])
def test_stages_restore_onto_any_other_split(tmp_path: Path, world: int, data: str) -> None:
    """Case I53."""
    saved = run_ranks(world, _save, tmp_path, data, {0: 0.01, 1: 0.01})
    expected = {**saved[-1], **saved[0]}
    for ranks in (1, 2, 3):
        found: dict[str, bytes] = {}
        for state, rates in run_ranks(ranks, _restore, tmp_path, ranks):
            assert rates == [0.01]
            found.update(state)
        assert found == expected


def test_options_of_each_stage_return_to_its_parameters(tmp_path: Path) -> None:
    """Case I24."""
    run_ranks(2, _save, tmp_path, "plain", RATES)
    assert [rates for _, rates in run_ranks(2, _restore, tmp_path, 2)] == [[RATES[0]], [RATES[1]]]
    with pytest.raises(AssertionError, match="groups with different options"):
        run_ranks(1, _restore, tmp_path, 1)


def _two_models(rank: int, world: int, root: Path) -> str:
    stage = _stage(rank, 2)
    if rank == 1:
        stage.layers["0"] = nn.Linear(6, 3)  # rank 0's layer 0 is 6 x 6
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with _manager(root, stage, optimizer, "bad") as manager:
        manager.restore()
        manager.save(1)
        dist.barrier()
        try:
            manager.wait_until_finished(30)
        except InvalidInputError:
            raise
        except Exception as error:
            return str(error)
    return "committed"


def test_one_name_with_two_shapes_is_never_committed(tmp_path: Path) -> None:
    outcomes = run_ranks(2, _two_models, tmp_path)
    assert all("model.layers.0." in text for text in outcomes), outcomes
