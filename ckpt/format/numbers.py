"""Bits of element types that NumPy lacks, as numbers it can calculate with. Exact: each value is kept.

Sources: bfloat16 is the upper half of an IEEE 754 float32. FP8 E4M3 and E5M2: Micikevicius et al., "FP8
Formats for Deep Learning", 2022; the "fnuz" kinds (bias one larger, no negative zero, one NaN): Noune et
al., "8-bit Numerical Formats for Deep Neural Networks", 2022; E8M0 and E2M1: OCP Microscaling Formats (MX)
v1.0.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["to_numbers"]

_NAN = float("nan")
_INF = float("inf")


def to_numbers(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return ``values`` as numbers.

    Args:
        values: in NumPy's type of that name, or the bits as unsigned integers where NumPy has none.
        dtype: torch's name.

    Returns:
        ``values`` itself where NumPy knows the type, or where it says nothing but bits (bits8, uint4, ...);
        float32 for small floats, complex64 for complex32, int8 for int1 to int7. ``float4_e2m1fn_x2`` gets a
        trailing dimension of 2, the low half of the byte first.
    """
    if dtype == "bfloat16":
        upper = np.left_shift(values.astype(np.uint32), np.uint32(16), dtype=np.uint32)
        return upper.view(np.float32)
    if dtype == "complex32":
        halves = np.ascontiguousarray(values).reshape(-1).view(np.float16).reshape(*values.shape, 2)
        return halves.astype(np.float32).view(np.complex64)[..., 0]
    if dtype == "float4_e2m1fn_x2":
        return np.take(_table(dtype), np.stack([values & np.uint8(15), values >> np.uint8(4)], axis=-1))
    if dtype.startswith("float8_"):
        return np.take(_table(dtype), values)
    if dtype.startswith("int") and values.dtype == np.uint8:
        return values.view(np.int8)
    return values


@cache
def _table(dtype: str) -> NDArray[np.float32]:
    table = np.array([_DECODERS[dtype](code) for code in range(16 if "float4" in dtype else 256)], np.float32)
    table.setflags(write=False)
    return table


def _small_float(code: int, *, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of sign, exponent and mantissa, none of them special but a zero exponent (subnormal)."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1.0 + fraction) * 2.0 ** (exponent - bias)


def _e4m3fn(code: int) -> float:
    if code & 0x7F == 0x7F:
        return _NAN
    return _small_float(code, exponent_bits=4, mantissa_bits=3, bias=7)


def _e5m2(code: int) -> float:
    if code & 0x7C == 0x7C:
        return _NAN if code & 3 else (-_INF if code & 0x80 else _INF)
    return _small_float(code, exponent_bits=5, mantissa_bits=2, bias=15)


def _e4m3fnuz(code: int) -> float:
    return _NAN if code == 0x80 else _small_float(code, exponent_bits=4, mantissa_bits=3, bias=8)


def _e5m2fnuz(code: int) -> float:
    return _NAN if code == 0x80 else _small_float(code, exponent_bits=5, mantissa_bits=2, bias=16)


def _e8m0fnu(code: int) -> float:
    return _NAN if code == 0xFF else 2.0 ** (code - 127)


def _e2m1(code: int) -> float:
    return _small_float(code, exponent_bits=2, mantissa_bits=1, bias=1)


_DECODERS = {
    "float8_e4m3fn": _e4m3fn,
    "float8_e5m2": _e5m2,
    "float8_e4m3fnuz": _e4m3fnuz,
    "float8_e5m2fnuz": _e5m2fnuz,
    "float8_e8m0fnu": _e8m0fnu,
    "float4_e2m1fn_x2": _e2m1,
}
