"""Torch's small types in plain values: dtypes, devices, sizes. Registered when the hooks are imported."""

from __future__ import annotations

import torch

from ckpt.format.values import register_value_type
from ckpt_trainer_hooks.layout import dtype_name, torch_dtype

__all__ = ["register_torch_types"]


def register_torch_types() -> None:
    """Let values hold torch.dtype, torch.device and torch.Size objects."""
    register_value_type(torch.dtype, "torch.dtype", dtype_name, torch_dtype)
    register_value_type(torch.device, "torch.device", str, torch.device)
    register_value_type(torch.Size, "torch.Size", list, torch.Size)


register_torch_types()
