"""I89, I75: every dtype through real saves on two ranks, in both modes, and back on two and on three."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt import dtypes
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks.layout import torch_dtype
from tests.support.bits import bits_of
from tests.support.models import barrier
from tests.support.ranks import run_ranks

ROWS, COLUMNS = 7, 4
MODES = {1: "blocking", 2: "overlapped"}


def _whole(name: str, seed: int) -> torch.Tensor:
    dtype = torch_dtype(name)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (ROWS * COLUMNS * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return ((raw & 1) if dtype == torch.bool else raw).view(dtype).view(ROWS, COLUMNS)


def _model(rank: int, world: int, seed: int) -> nn.Module:
    """For each dtype a sharded tensor, one that every rank has, a 0-dim and an empty one."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    model = nn.Module()
    step = -(-ROWS // world)
    for name in dtypes.known_dtypes():
        whole = _whole(name, seed)
        own = whole[rank * step : (rank + 1) * step]
        sharded = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
        )
        model.register_buffer(f"{name}_sharded", sharded)
        model.register_buffer(f"{name}_whole", whole)
        model.register_buffer(f"{name}_scalar", whole[1, 1])
        model.register_buffer(f"{name}_empty", whole[:0])
    return model


def _bits(model: nn.Module) -> dict[str, bytes]:
    return {
        name: bits_of(buffer._local_tensor if isinstance(buffer, DTensor) else buffer)
        for name, buffer in model.named_buffers()
    }


def _manager(root: Path, model: nn.Module, world: int, mode: str) -> CheckpointManager:
    model.register_parameter("weight", nn.Parameter(torch.ones(3)))  # what an overlapped save copies later
    return CheckpointManager(
        f"file://{root}/store/run",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        staging_dir=root / f"staging-{world}",
        mode=mode,
        timeout_s=100,
    )


def _save(rank: int, world: int, root: Path) -> None:
    for seed, mode in MODES.items():
        model = _model(rank, world, seed)
        with _manager(root, model, world, mode) as manager:
            manager.restore(start_over=True)
            manager.save(seed)
            for buffer in model.buffers():  # I75: host memory, changed right after the call
                local = buffer._local_tensor if isinstance(buffer, DTensor) else buffer
                local.untyped_storage().fill_(1)
        barrier()


def _restore(rank: int, world: int, root: Path) -> None:
    for seed in MODES:
        model = _model(rank, world, seed=77)
        expected = _bits(_model(rank, world, seed))
        with _manager(root, model, world, "blocking") as manager:
            assert manager.restore(seed) == seed
        assert [name for name, bits in _bits(model).items() if bits != expected.get(name, bits)] == []


def test_I89_I75_every_dtype_on_two_ranks_and_back_on_two_and_three(tmp_path: Path) -> None:
    run_ranks(2, _save, tmp_path)
    run_ranks(2, _restore, tmp_path)
    run_ranks(3, _restore, tmp_path)
