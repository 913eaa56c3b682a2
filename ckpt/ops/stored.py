"""From stored bytes to the chunk (decrypt where it was encrypted, then decode), and back as it was stored."""

from __future__ import annotations

from ckpt.digest import Buffer
from ckpt.format.chunks import StoredChunk
from ckpt.format.codec import decode_chunk, encode_chunk
from ckpt.format.crypt import decrypt_chunk, encrypt_chunk
from ckpt.storage.key_source import environment_keys

__all__ = ["close_chunk", "open_chunk"]


def open_chunk(chunk: StoredChunk, stored: Buffer, *, run: str) -> Buffer:
    """Return the raw bytes of a chunk; the caller checks their digest.

    Args:
        chunk: what the table says of it.
        stored: as read from its object.
        run: name of the run it was saved by, as its segment index has it.

    Raises:
        CorruptError: codes "codec" and "decrypt".
        InvalidInputError: code "encryption-key": the key is not here, or another one.
    """
    if chunk.key:
        stored = decrypt_chunk(environment_keys().labelled(chunk.key), chunk, stored, run=run)
    return decode_chunk(chunk.codec, stored, chunk.raw_nbytes)


def close_chunk(chunk: StoredChunk, raw: Buffer, *, run: str) -> tuple[int, Buffer]:
    """Return (codec, stored bytes) of a chunk that is to lie where, and under the key that, the table says.

    Raises:
        InvalidInputError: code "encryption-key".
    """
    codec, encoded = encode_chunk(chunk.codec, raw)
    if not chunk.key:
        return codec, encoded
    stored = encrypt_chunk(
        environment_keys().labelled(chunk.key),
        encoded,
        run=run,
        object_key=chunk.object_key,
        codec=codec,
        raw_nbytes=len(raw),
        digest=chunk.digest,
    )
    return codec, stored
