"""Equality by bits: NaN equals the same NaN, -0.0 does not equal 0.0."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ckpt_trainer_hooks.elements import movable

__all__ = ["assert_same_bits", "bits_of"]


def bits_of(tensor: torch.Tensor) -> bytes:
    """The tensor's elements in row-major order, as bytes."""
    plain = movable(tensor.detach()).cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fail naming every tensor that differs in shape, dtype or any bit."""
    assert found.keys() == expected.keys()
    wrong = [
        name
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype
        or found[name].shape != tensor.shape
        or bits_of(found[name]) != bits_of(tensor)
    ]
    assert wrong == [], wrong  # said in full also outside pytest
