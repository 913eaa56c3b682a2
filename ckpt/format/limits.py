"""What stored numbers may be at most, so that a hostile or damaged document costs no more than its own size.

Every reader checks these before it allocates or loops; writers stay far below. docs/format.md, section 1.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ckpt.digest import Buffer

__all__ = [
    "MALFORMED",
    "MAX_CHUNK_NBYTES",
    "MAX_NDIM",
    "MAX_SPLITS",
    "MAX_WORLD_SIZE",
    "bounded_product",
    "load_json",
]

MAX_CHUNK_NBYTES = 64 << 20  # a reader holds whole chunks, several at a time
MAX_NDIM = 64  # NumPy's own limit
MAX_WORLD_SIZE = 1 << 20
MAX_SPLITS = 1 << 24  # ranks of a mesh times the pieces that strided shards cut a tensor into

_INT64_MOST = (1 << 63) - 1

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What taking a JSON document apart raises where it is not what is expected."""


def load_json(data: Buffer) -> Any:
    """Parse JSON text whose strings can all be written as UTF-8.

    Raises:
        ValueError, RecursionError: it is no such text, or nested too deeply (see :data:`MALFORMED`).
    """
    raw = bytes(data)
    value = json.loads(raw)
    if b"\\u" in raw:  # an escaped half of a surrogate pair is legal JSON and no Unicode
        json.dumps(value, ensure_ascii=False).encode()
    return value


def bounded_product(sizes: Iterable[int]) -> int | None:
    """Return the product of non-negative ``sizes``; None where it does not fit in 63 bits. Linear time."""
    product = 1
    for size in sizes:
        product *= size
        if product > _INT64_MOST:
            return None
    return product
