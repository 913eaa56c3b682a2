"""From stored bytes back to the chunk: decrypt where it was encrypted, then decode."""

from __future__ import annotations

from ckpt.digest import Buffer
from ckpt.format.chunks import StoredChunk
from ckpt.format.codec import decode_chunk
from ckpt.format.crypt import decrypt_chunk
from ckpt.storage.key_source import environment_keys

__all__ = ["open_chunk"]


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
