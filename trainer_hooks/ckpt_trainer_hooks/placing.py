"""From verified chunks into tensors: one strided copy each, converting where the dtypes differ."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ckpt.digest import Buffer
from ckpt.ops.fetch import Place
from ckpt.plan.read import ChunkCopy
from ckpt_trainer_hooks.elements import copy_elements
from ckpt_trainer_hooks.layout import torch_dtype

__all__ = ["placer"]


def placer(targets: Sequence[torch.Tensor]) -> Place:
    """Return what :func:`ckpt.ops.fetch.fetch` calls to fill ``targets``, on whatever device they are.

    Bit by bit where the dtypes are the same. Else the source of the conversion is a view of the chunk in the
    saved dtype, so it takes no memory beyond that of the chunk.
    """

    def place(copy: ChunkCopy, chunk: Buffer) -> None:
        source = _tensor_over(chunk, copy)[copy.src_slices()]
        target = targets[copy.target][copy.dst_slices()]
        if target.dtype == source.dtype:
            copy_elements(target, source)
        else:
            with torch.no_grad():
                target.copy_(source)

    return place


def _tensor_over(chunk: Buffer, copy: ChunkCopy) -> torch.Tensor:
    """The copy's contiguous array as a tensor over ``chunk``, which may be read-only (it is only read)."""
    start = np.frombuffer(chunk, np.uint8).ctypes.data + copy.offset
    dtype = torch_dtype(copy.dtype)
    raw = (ctypes.c_char * (copy.count * dtype.itemsize)).from_address(start)
    return torch.frombuffer(raw, dtype=dtype).view(copy.shape)
