"""Encryption of stored chunks: AES-256-GCM over the encoded bytes, bound to run, object and digest.

stored bytes = nonce (12 random bytes) ++ ciphertext ++ tag (16)

Source: NIST SP 800-38D. Random nonces of 96 bits are good for 2**32 chunks under one key, 32 EiB in chunks of
8 MiB.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from ckpt.clock import random_bytes
from ckpt.digest import Buffer
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.chunks import StoredChunk

__all__ = ["KEY_NBYTES", "ChunkKey", "decrypt_chunk", "encrypt_chunk"]

KEY_NBYTES = 32
_NONCE_NBYTES = 12
_TAIL = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A key and the name it goes by.

    Attributes:
        name: of the key, as its keeper knows it.
        secret: 32 bytes.
    """

    name: str
    secret: bytes = field(repr=False)

    @property
    def label(self) -> str:
        """``name#check``: what tables name the key by. The check tells another key of the same name."""
        check = hashlib.sha256(b"ckpt key check\0" + self.secret).hexdigest()[:16]
        return f"{self.name}#{check}"


def encrypt_chunk(
    key: ChunkKey, encoded: Buffer, *, run: str, object_key: str, codec: int, raw_nbytes: int, digest: bytes
) -> bytes:
    """Return the stored bytes of a chunk.

    Args:
        key: to encrypt with.
        encoded: the chunk, compressed or raw.
        run, object_key, codec, raw_nbytes, digest: of the chunk; they are bound to it and not stored in it.
    """
    nonce = random_bytes(_NONCE_NBYTES)
    bound = _bound(run, object_key, codec, raw_nbytes, digest)
    return nonce + bytes(_cipher(key).encrypt(nonce, encoded, bound))


def decrypt_chunk(key: ChunkKey, chunk: StoredChunk, stored: Buffer, *, run: str) -> bytes:
    """Return the encoded bytes of a chunk.

    Raises:
        CorruptError: code "decrypt": the bytes were changed, or are of another chunk, object or run.
    """
    from cryptography.exceptions import InvalidTag

    view = memoryview(stored).cast("B")
    bound = _bound(run, chunk.object_key, chunk.codec, chunk.raw_nbytes, chunk.digest)
    try:
        found: bytes = _cipher(key).decrypt(view[:_NONCE_NBYTES], view[_NONCE_NBYTES:], bound)
    except (InvalidTag, ValueError) as error:
        raise CorruptError(
            "chunk cannot be decrypted: its bytes were changed, or belong elsewhere",
            code="decrypt",
            object=chunk.object_key,
            key=key.label,
        ) from error
    return found


def _bound(run: str, object_key: str, codec: int, raw_nbytes: int, digest: bytes) -> bytes:
    # The object's key has checkpoint and rank in it; the digest stands for the place in the segment.
    names = b"\0".join((b"ckpt chunk 1", run.encode(), object_key.encode(), b""))
    return names + _TAIL.pack(raw_nbytes, codec) + digest


def _cipher(key: ChunkKey) -> Any:
    # Here: half the installations never need it.
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise InvalidInputError(
            'encrypted chunks need the package cryptography: pip install "ckpt-training-state[encryption]"',
            code="encryption",
        ) from error
    return AESGCM(key.secret)
