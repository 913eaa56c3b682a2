"""A small model with odd sizes, put onto any topology; a few steps of real training on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["KINDS", "OddNet", "build", "full_state", "train"]

KINDS = ("single", "ddp", "fsdp2", "tp", "fsdp2+tp", "hsdp")


class OddNet(nn.Module):
    """Embedding, norm with running statistics, two linears; nothing divides anything."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.up = nn.Linear(10, 22)
        self.down = nn.Linear(22, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(10, 13)
        self.scale = nn.Parameter(torch.ones(1))  # fewer rows than ranks: most shards are empty
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        hidden = self.embed(tokens)
        hidden = hidden + self.drop(self.down(torch.nn.functional.gelu(self.up(hidden))))
        return self.head(self.norm(hidden)) * self.scale


def build(
    kind: str, world: int, *, dropout: float = 0.0, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the topology ``kind`` over all ranks, and an AdamW; the same weights everywhere."""
    torch.manual_seed(seed)
    model: nn.Module = OddNet(dropout=dropout)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        _shard(model, mesh)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        _shard(model, mesh)
    elif kind == "tp":
        _tensor_parallel(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    elif kind == "fsdp2+tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        _shard(model, mesh["dp"])
    elif kind != "single":
        raise ValueError(kind)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _shard(model: nn.Module, mesh: Any) -> None:
    for child in (model.up, model.down):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Iterator[float]:
    """Yield the loss of each step. The batch is a pure function of the step, the same on every rank."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, 13, (4, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer in full, by canonical name. Collective where it is sharded."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    state = {f"model.{name}": _full(tensor) for name, tensor in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = _full(value)
    return state


def _full(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    return tensor.detach().clone()


def barrier() -> None:
    """Wait for every rank, where there are several."""
    if dist.is_initialized():
        dist.barrier()
