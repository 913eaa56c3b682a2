"""A GPT on several ranks, laid out in the ways that reshard from and to one another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt_trainer_hooks import CheckpointManager
from examples.gpt import GPT, GPTConfig, make_mesh, parallelize

__all__ = ["Layout", "barrier", "build", "label", "open_manager"]

Layout = tuple[str, int]  # kind, number of ranks


def label(layout: Layout) -> str:
    kind, world = layout
    return "one rank" if world == 1 else f"{kind} x {world}"


def build(layout: Layout, rank: int, nbytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return this rank's model on ``layout`` and an AdamW that has made a step.

    Args:
        nbytes: wanted size of the whole state: weights and moments.
    """
    kind, world = layout
    dim, layers = 256, max(2, round(nbytes / 12 / (12 * 256**2)))
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig(vocab=256, context=64, dim=dim, heads=4, layers=layers, hidden=4 * dim))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "dp"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "pp":
        _stage(model, rank, layers)
    elif world > 1:
        model = parallelize(model, make_mesh(kind), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _stage(model: Any, rank: int, layers: int) -> None:
    """Leave the half of the model that a pipeline stage has, under the names of the whole."""
    first = range(layers // 2)
    for number in range(layers):
        if (number in first) != (rank == 0):
            model.blocks._modules.pop(str(number))
    for name in ("norm", "head") if rank == 0 else ("tokens", "positions"):
        delattr(model, name)


def open_manager(
    url: str,
    staging: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    options: dict[str, str] | None = None,
    uploads: bool = True,
) -> CheckpointManager:
    """Return a manager; without ``uploads`` it names a server that is not there: nothing runs beside."""
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # new streams on other ranks are no news here
    return CheckpointManager(
        url,
        model=model,
        optimizer=optimizer,
        staging_dir=staging,
        store_options=options,
        server=None if uploads else f"unix:{staging}/no-server.sock",
        on_error="raise" if uploads else "warn",
        mode="blocking",
        timeout_s=100.0,
    )


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()
