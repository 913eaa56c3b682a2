"""xxh3-128, the digest of every chunk, envelope and content-addressed object.

Source: XXH3 by Yann Collet, canonical (big-endian) form, as printed by ``xxhsum -H2``. It guards
against damage, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import xxhash

__all__ = ["DIGEST_NBYTES", "Buffer", "digest", "digest_hex", "digest_many"]

Buffer: TypeAlias = bytes | bytearray | memoryview

DIGEST_NBYTES = 16


def digest(data: Buffer) -> bytes:
    """Return the 16-byte xxh3-128 of ``data``. Releases the GIL for large buffers."""
    return xxhash.xxh3_128_digest(data)


def digest_hex(data: Buffer) -> str:
    """Return :func:`digest` as 32 lower-case hex digits."""
    return digest(data).hex()


def digest_many(parts: Iterable[Buffer]) -> bytes:
    """Return the digest of the concatenation of ``parts`` without concatenating them."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
