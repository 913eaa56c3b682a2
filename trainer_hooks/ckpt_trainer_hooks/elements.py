"""Elements moved as bits: copies of dtypes for which torch has no copy kernel, or not on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["copy_elements", "movable", "zeros"]

# Copied as they are by every device's kernel, bit by bit, conjugate and negative views resolved.
_ORDINARY = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    }
)
_STAND_INS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a view of it as integers of the same size where torch may not copy its dtype.

    torch cannot copy int4 or uint3 at all, nor float8 and unsigned integers on every device and through
    every collective. Shape, strides and version counter are the tensor's.
    """
    if tensor.dtype in _ORDINARY:
        return tensor
    return tensor.view(_STAND_INS[tensor.dtype.itemsize])


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
    """``torch.zeros``, also of dtypes that torch cannot fill."""
    if dtype in _ORDINARY:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=_STAND_INS[dtype.itemsize], device=device).view(dtype)


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write ``source`` into ``target`` (same shape and dtype) bit by bit, whatever the strides.

    Raises:
        TypeError: another dtype; this never converts.
    """
    if target.dtype != source.dtype:
        raise TypeError(f"{source.dtype} into {target.dtype}")
    with torch.no_grad():
        movable(target).copy_(movable(source))
