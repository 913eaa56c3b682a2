"""Optimizers that torch does not have, as other libraries lay out their state."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["BlockwiseMomentum", "FactoredMoments"]


class FactoredMoments(torch.optim.Optimizer):
    """Adafactor's second moment in factors, for DTensors too (torch's own cannot step on sharded ones)."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                squared = parameter.grad.square() + 1e-30
                state = self.state[parameter]
                if parameter.ndim != 2:
                    self._follow(state, "variance", squared)
                    scale = state["variance"]
                else:
                    self._follow(state, "row_var", squared.mean(dim=-1, keepdim=True))
                    self._follow(state, "col_var", squared.mean(dim=-2, keepdim=True))
                    scale = state["row_var"] @ state["col_var"] / state["row_var"].mean(dim=-2, keepdim=True)
                parameter.sub_(parameter.grad / scale.sqrt(), alpha=group["lr"])

    @staticmethod
    def _follow(state: dict[str, Any], key: str, value: torch.Tensor) -> None:
        if key not in state:
            state[key] = value.new_zeros(value.shape)  # a DTensor: sharded like the factor, or replicated
        state[key].lerp_(value, 0.1)


class BlockwiseMomentum(torch.optim.Optimizer):
    """SGD with momentum in 8 bits, laid out as bitsandbytes does it: plain tensors over this rank's shard.

    ``state1``: one uint8 code per element of the shard, in its shape. ``absmax1``: the largest magnitude of
    each block of ``block_size`` elements of the flattened shard. ``qmap1``: what the codes stand for.
    """

    def __init__(self, params: Any, lr: float = 0.05, block_size: int = 16, *, flat: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.block_size = block_size
        self.flat = flat
        self.map = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(
                        _local(parameter), _local(parameter.grad), self.state[parameter], group["lr"]
                    )

    def _update(self, local: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        count = local.numel()
        blocks = -(-count // self.block_size)
        if not state:
            shape = (count,) if self.flat else local.shape
            state["step"] = 0
            state["state1"] = torch.full(shape, 128, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(blocks)
            state["qmap1"] = self.map
        state["step"] += 1
        padded = torch.zeros(blocks * self.block_size)
        padded[:count] = state["qmap1"][state["state1"].flatten().int()]
        momentum = padded.view(blocks, -1) * state["absmax1"][:, None]
        momentum = momentum * 0.9
        momentum.view(-1)[:count] += grad.flatten()
        local.sub_(momentum.view(-1)[:count].view(local.shape), alpha=lr)
        state["absmax1"].copy_(momentum.abs().amax(dim=1) if count else state["absmax1"])
        scaled = momentum / state["absmax1"].clamp_min(1e-12)[:, None]
        codes = ((scaled + 1) * 127.5).round().to(torch.uint8).view(-1)[:count]
        state["state1"].copy_(codes.view(state["state1"].shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
