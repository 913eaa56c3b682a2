"""Element types by torch's name (without ``torch.``): item size and safetensors name. No torch.

Source of the safetensors names: the Dtype enum of the safetensors crate (0.4 and later). A type
that safetensors cannot name is stored as U8 with one more, trailing, dimension of its item size.
"""

from __future__ import annotations

from ckpt.errors import InvalidInputError

__all__ = ["SAFETENSORS_NAMES", "is_known", "itemsize", "known_dtypes"]

_ITEMSIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
    # One element per byte: torch has the types, and leaves packing to tensor subclasses.
    **{f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)},
}

# Only names that every safetensors reader since 0.4 accepts.
SAFETENSORS_NAMES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def is_known(dtype: str) -> bool:
    """Return whether tensors of ``dtype`` can be stored."""
    return dtype in _ITEMSIZES


def known_dtypes() -> tuple[str, ...]:
    """Return every dtype name that can be stored, sorted."""
    return tuple(sorted(_ITEMSIZES))


def itemsize(dtype: str) -> int:
    """Return bytes per element. Raises InvalidInputError for an unknown dtype."""
    try:
        return _ITEMSIZES[dtype]
    except KeyError:
        raise InvalidInputError("dtype cannot be stored", code="dtype", dtype=dtype) from None
