"""Every way in which the tests lay out the model with the odd sizes, and a step of training on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.models import KINDS, OddNet, build, train

__all__ = ["LAYOUTS", "Topology", "build_topology", "label", "step_on", "trains"]

# World size: the kinds of layout over all of its ranks.
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("single",),
    2: ("ddp", "fsdp2", "tp", "fsdp2-mixed", "pp"),
    3: ("ddp", "fsdp2", "tp"),
    4: ("fsdp2", "fsdp2+tp", "ddp+tp", "hsdp", "tp", "fsdp2-offload"),
    5: ("fsdp2",),
    7: ("fsdp2",),
}

Topology = tuple[str, int]


def label(kind: str, world: int) -> str:
    return f"{kind}-x{world}"


def build_topology(
    kind: str, rank: int, world: int, *, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return this rank's model on the layout ``kind`` over ``world`` ranks, and an AdamW over it."""
    if kind in KINDS:
        return build(kind, world, seed=seed)
    torch.manual_seed(seed)
    model: nn.Module = OddNet()
    _BUILDERS[kind](model, rank, world)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _mixed(model: Any, rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _fully_shard(model, world, mp_policy=policy)


def _offload(model: Any, rank: int, world: int) -> None:
    _fully_shard(model, world, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _fully_shard(model: Any, world: int, **policy: Any) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for child in (model.up, model.down):
        fully_shard(child, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)


def _replicated_tp(model: Any, rank: int, world: int) -> None:
    """Tensor parallelism over pairs of ranks, the pairs being replicas: DTensors on a part of the mesh."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _stage(model: Any, rank: int, world: int) -> None:
    """The first rank has the embedding and the linears, the last one the rest."""
    here = ("embed", "up", "down", "drop") if rank == 0 else ("norm", "head")
    for name in list(model._modules):
        if name not in here:
            del model._modules[name]
    if rank == 0:
        del model.scale, model.seen


_BUILDERS: dict[str, Callable[[Any, int, int], None]] = {
    "fsdp2-mixed": _mixed,
    "fsdp2-offload": _offload,
    "ddp+tp": _replicated_tp,
    "pp": _stage,
}


def trains(kind: str, world: int) -> bool:
    """Whether the layout has a forward pass: a stage alone has none, nor has torch's TP of uneven linears."""
    return kind != "pp" and not (kind == "tp" and world > 2)


def step_on(
    kind: str, world: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    """Train ``steps`` and return the losses; without a forward pass: step with made-up gradients."""
    if trains(kind, world):
        return list(train(model, optimizer, steps))
    for step in steps:
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)) + step)
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter.data, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return []
