"""Framing of the Bulk methods: raw bytes in messages of at most 1 MiB, no protobuf around them.

The paths and what each stream carries are written in staging.proto and peer.proto. gRPC accepts only
``bytes``: a memoryview in a request stream kills the sender's thread and the call hangs, so frames are copied
out.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.digest import Buffer

__all__ = [
    "BULK_SERVICE",
    "FRAME_NBYTES",
    "PUT_CHUNKS",
    "READ_CHUNKS",
    "READ_SEGMENT",
    "READ_TENSOR",
    "REPLICATE",
    "bulk_path",
    "frames",
]

BULK_SERVICE = "ckpt.v1.Bulk"
PUT_CHUNKS = "PutChunks"
READ_TENSOR = "ReadTensor"
READ_CHUNKS = "ReadChunks"
READ_SEGMENT = "ReadSegment"
REPLICATE = "Replicate"

FRAME_NBYTES = 1024 * 1024


def bulk_path(method: str) -> str:
    """``/ckpt.v1.Bulk/<method>``."""
    return f"/{BULK_SERVICE}/{method}"


def frames(data: Buffer) -> Iterator[bytes]:
    """Yield ``data`` in pieces of at most 1 MiB, each copied once."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), FRAME_NBYTES):
        yield bytes(view[start : start + FRAME_NBYTES])
