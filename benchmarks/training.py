"""A training run of a given size for benchmarks, and its state in each form that a library wants."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from examples.gpt import GPT, GPTConfig

__all__ = ["Training", "make_training", "state_nbytes"]

_VOCAB, _CONTEXT = 256, 64
_BYTES_PER_PARAMETER = 12  # fp32 weights and both moments of Adam


@dataclass(slots=True)
class Training:
    """A GPT in fp32 with AdamW; its state is weights and moments.

    Attributes:
        batch: sequences per step, 64 tokens each.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    batch: int = 1
    _tokens: torch.Tensor = field(init=False)
    _step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(_VOCAB, (64, self.batch, _CONTEXT + 1), generator=generator)

    def forward_backward(self) -> None:
        tokens = self._tokens[self._step % 64]
        self._step += 1
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, _VOCAB), tokens[:, 1:].reshape(-1)).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward_backward()
        self.update()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state by name; optimizer state by the name of its parameter."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def plain_state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_plain_state(self, state: dict[str, dict[str, object]]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def digest(self) -> dict[str, int]:
        """A checksum of each tensor that depends on the order of its elements."""
        found = {}
        for name, tensor in self.tensors().items():
            words = tensor.reshape(-1).view(torch.int32)
            weights = torch.arange(1, words.numel() + 1, dtype=torch.int32)
            found[name] = int((words * weights).sum(dtype=torch.int64))
        return found

    def scramble(self) -> None:
        """Overwrite the state in place, so that a load that does nothing is found out."""
        for tensor in self.tensors().values():
            tensor.fill_(7)


def make_training(nbytes: int, *, batch: int = 1) -> Training:
    """Return a training run that has made one step, with a state of about ``nbytes`` bytes."""
    dim = next(width for width in (768, 512, 256, 128) if nbytes >= 6 * 12 * width**2 * 12 or width == 128)
    layers = max(1, round(nbytes / _BYTES_PER_PARAMETER / (12 * dim**2)))
    torch.manual_seed(0)
    config = GPTConfig(
        vocab=_VOCAB, context=_CONTEXT, dim=dim, heads=dim // 64, layers=layers, hidden=4 * dim
    )
    model = GPT(config)
    # Fused, as training on many cores would: one pass over weights, gradients and moments.
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), batch)
    training.step()
    return training


def state_nbytes(training: Training) -> int:
    """Bytes of all tensors of the state."""
    return sum(math.prod(t.shape) * t.element_size() for t in training.tensors().values())
