"""From verified chunks into tensors, converting where the dtypes differ."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ckpt.digest import Buffer
from ckpt.geometry import flat_range
from ckpt.plan.read import ChunkCopy
from ckpt.storage.direct import aligned_buffer
from ckpt_trainer_hooks.elements import copy_elements
from ckpt_trainer_hooks.layout import dtype_name, torch_dtype

__all__ = ["TensorTargets"]

# Of the stable C API. An array type of ctypes, which could do the same, is a new class for each size: 25 us.
_PyBUF_WRITE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_at.restype = ctypes.py_object


class TensorTargets:
    """Targets of :func:`ckpt.ops.fetch.fetch` in tensors, on whatever device they are.

    Bit by bit where the dtypes are the same. Else the source of the conversion is a view of the chunk in the
    saved dtype, so it takes no memory beyond that of the chunk.

    Args:
        tensors: by the ``target`` of the wants.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._is_on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self._held = [_bytes_of(tensor) for tensor in tensors]
        self._names = [dtype_name(tensor.dtype) for tensor in tensors]

    def window(self, copy: ChunkCopy) -> memoryview | None:
        held, tensor = self._held[copy.target], self._tensors[copy.target]
        if held is None or self._names[copy.target] != copy.dtype:
            return None
        span = flat_range(tensor.shape, copy.dst)
        if span is None:
            return None
        return held[span[0] * tensor.itemsize : span[1] * tensor.itemsize]

    def place(self, copy: ChunkCopy, chunk: Buffer) -> None:
        source = _tensor_over(chunk, copy)[copy.src_slices()]
        target = self._tensors[copy.target][copy.dst_slices()]
        if target.dtype == source.dtype:
            copy_elements(target, source)
        else:
            with torch.no_grad():
                target.copy_(source)

    def scratch(self, nbytes: int) -> memoryview:
        """Page-locked where something goes to a device: else the driver would copy once more."""
        if self._is_on_host or not torch.cuda.is_available():
            return aligned_buffer(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def mark_written(self) -> None:
        """Tell autograd that the tensors were changed: bytes written through a window leave no trace."""
        for tensor, held in zip(self._tensors, self._held, strict=True):
            if held is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def _bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The tensor's memory, if its elements lie there in order and as they are."""
    plain = (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )
    if not plain or not tensor.numel():
        return None
    found: memoryview = _memory_at(tensor.data_ptr(), tensor.nbytes, _PyBUF_WRITE)
    return found


def _tensor_over(chunk: Buffer, copy: ChunkCopy) -> torch.Tensor:
    """The copy's contiguous array as a tensor over ``chunk``, which may be read-only (it is only read)."""
    start = np.frombuffer(chunk, np.uint8).ctypes.data + copy.offset
    dtype = torch_dtype(copy.dtype)
    raw = _memory_at(start, copy.count * dtype.itemsize, _PyBUF_WRITE)
    return torch.frombuffer(raw, dtype=dtype).view(copy.shape)
