"""A tensor as bytes with torch's dtype name, for programs without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ckpt.dtypes import itemsize
from ckpt.format.ids import CheckpointId
from ckpt.format.numbers import to_numbers

__all__ = ["TensorData", "numpy_dtype"]

# Types that NumPy has no name for come as unsigned integers of the same size.
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorData:
    """A tensor, or a part of one, as bytes.

    Attributes:
        ident: the checkpoint it came from.
        dtype: torch's name, e.g. "bfloat16".
        shape: of ``data``.
        global_shape: of the whole tensor.
        data: row-major, native (little-endian) byte order; owned by the caller.
    """

    ident: CheckpointId
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    data: bytearray = field(repr=False)

    def numpy(self) -> NDArray[np.generic]:
        """Return ``data`` as an array, without copying.

        Types that NumPy lacks keep their bits: bfloat16 comes as uint16, float8 and float4x2 as uint8,
        complex32 as uint32. ``torch.frombuffer(tensor.data, dtype=...)`` gives the real type.
        """
        return np.frombuffer(self.data, dtype=numpy_dtype(self.dtype)).reshape(self.shape)

    def numbers(self) -> NDArray[np.generic]:
        """Return the values in a type NumPy can calculate with: exact, bfloat16 and float8 as float32.

        A copy where NumPy lacks the type. float4x2 gets one more dimension: two values per element.
        """
        return to_numbers(self.numpy(), self.dtype)


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return NumPy's type for torch's ``name``, or an unsigned integer of the same size.

    Raises:
        InvalidInputError: no such dtype.
    """
    size = itemsize(name)
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(_BITS[size])
