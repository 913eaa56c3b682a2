"""The frame around every protobuf message that is stored: magic, kind, length, payload, digest.

offset  size  field
0       4     magic "CKPT"
4       1     format version (1)
5       1     kind (Kind)
6       2     zero
8       8     payload length n, little-endian
16      n     payload (a protobuf message)
16 + n  16    xxh3-128 of the bytes [0, 16 + n)
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ckpt.digest import DIGEST_NBYTES, Buffer, digest
from ckpt.errors import CorruptError

__all__ = [
    "FORMAT_VERSION",
    "HEAD_NBYTES",
    "Kind",
    "envelope_nbytes",
    "open_envelope",
    "open_message",
    "seal_message",
]

FORMAT_VERSION = 1
HEAD_NBYTES = 16
_HEAD = struct.Struct("<4sBBHQ")
_MAGIC = b"CKPT"

M = TypeVar("M", bound=Message)


class Kind(IntEnum):
    """What the payload is."""

    SEGMENT_INDEX = 1
    GROUP_INDEX = 2
    MANIFEST = 3
    LAYOUT_SET = 4
    UPLOAD_RECORD = 5
    BORROWS = 6
    HELD = 7


def seal_message(kind: Kind, payload: bytes | Message) -> bytes:
    """Return the envelope around ``payload`` (a message is serialized deterministically)."""
    body = payload.SerializeToString(deterministic=True) if isinstance(payload, Message) else payload
    framed = _HEAD.pack(_MAGIC, FORMAT_VERSION, kind, 0, len(body)) + body
    return framed + digest(framed)


def envelope_nbytes(head: Buffer, *, where: str) -> int:
    """Return the size of the whole envelope from its first ``HEAD_NBYTES`` bytes. Raises CorruptError."""
    if len(head) < HEAD_NBYTES:
        raise CorruptError("file is cut short", code="truncated", where=where, nbytes=len(head))
    magic, version, _, _, length = _HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise CorruptError("not a ckpt file: wrong magic", code="magic", where=where)
    if version != FORMAT_VERSION:
        raise CorruptError(
            "written by another format version; read it with that version of ckpt",
            code="version",
            where=where,
            found=version,
            supported=FORMAT_VERSION,
        )
    return HEAD_NBYTES + int(length) + DIGEST_NBYTES


def open_envelope(kind: Kind, data: Buffer, *, where: str, more: bool = False) -> memoryview:
    """Return the payload of the envelope at the start of ``data`` after checking all of it.

    Args:
        kind: what is expected.
        data: the whole envelope.
        where: key or path, for the error.
        more: bytes may follow; they are left alone. Only in a group index do they.

    Raises:
        CorruptError: magic, version, kind, length or digest is wrong.
    """
    view = memoryview(data)
    total = envelope_nbytes(view, where=where)
    if len(view) < total:
        raise CorruptError(
            "file is cut short", code="truncated", where=where, nbytes=len(view), expected=total
        )
    if len(view) > total and not more:
        raise CorruptError(
            "bytes follow the end of the file's content",
            code="trailing",
            where=where,
            nbytes=len(view),
            expected=total,
        )
    if view[5] != kind:
        raise CorruptError(
            "file holds something else", code="kind", where=where, found=view[5], expected=int(kind)
        )
    if digest(view[: total - DIGEST_NBYTES]) != bytes(view[total - DIGEST_NBYTES : total]):
        raise CorruptError("digest does not match: the file is damaged", code="digest", where=where)
    return view[HEAD_NBYTES : total - DIGEST_NBYTES]


def open_message(kind: Kind, data: Buffer, message: M, *, where: str) -> M:
    """Parse the envelope's payload into ``message`` and return it. Raises CorruptError."""
    payload = open_envelope(kind, data, where=where)
    try:
        message.ParseFromString(bytes(payload))
    except DecodeError as error:
        raise CorruptError("payload is not the expected message", code="decode", where=where) from error
    return message
