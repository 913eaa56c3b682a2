"""A model that trains, for benchmarks: a stack of linear layers with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Training", "make_training", "state_tensors"]


@dataclass(frozen=True, slots=True)
class Training:
    """Model, optimizer, and one training step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def make_training(width: int, layers: int) -> Training:
    """Return a model of ``layers`` square layers; weights and moments are 3 * width**2 * layers floats."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(64, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return Training(model, optimizer, step)


def state_tensors(training: Training) -> dict[str, torch.Tensor]:
    """Weights and optimizer moments by name, as a plain state dict would have them."""
    found = {f"model.{name}": p.detach() for name, p in training.model.named_parameters()}
    for name, p in training.model.named_parameters():
        found |= {f"optimizer.{name}.{key}": value for key, value in training.optimizer.state[p].items()}
    return found
