"""Part sizes of multipart uploads, within the limits of the services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckpt.digest import Buffer
from ckpt.errors import InvalidInputError

__all__ = ["S3_LIMITS", "PartLimits", "part_nbytes_for", "regrouped"]

_GRAIN = 1 << 20


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What a service allows.

    Attributes:
        parts: most parts of one upload.
        least_nbytes: smallest part but the last.
        most_nbytes: largest part.
    """

    parts: int
    least_nbytes: int
    most_nbytes: int


# Source: Amazon S3 user guide, "Amazon S3 multipart upload limits". GCS and Azure allow as much or more
# (Azure: 50,000 blocks; GCS's XML API: the same numbers), so one set of limits serves all.
S3_LIMITS = PartLimits(parts=10_000, least_nbytes=5 << 20, most_nbytes=5 << 30)


def part_nbytes_for(nbytes: int, wanted: int, limits: PartLimits = S3_LIMITS) -> int:
    """Return the part size to upload ``nbytes`` with: ``wanted``, raised as far as the limits demand.

    A raised size is a multiple of 1 MiB.

    Raises:
        InvalidInputError: the object is too large for the service whatever the part size.
    """
    needed = -(-nbytes // limits.parts)
    if needed > wanted:
        needed = -(-needed // _GRAIN) * _GRAIN
    part = max(wanted, limits.least_nbytes, needed)
    if part > limits.most_nbytes:
        if needed > limits.most_nbytes:
            raise InvalidInputError(
                "the object is too large for the service",
                nbytes=nbytes,
                most=limits.parts * limits.most_nbytes,
            )
        part = limits.most_nbytes
    return part


def regrouped(pieces: Iterable[Buffer], size: int) -> Iterator[bytes]:
    """Yield the bytes of ``pieces`` in copies of ``size`` bytes each, the last one shorter."""
    part = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        start = 0
        while start < len(view):
            taken = view[start : start + size - len(part)]
            part += taken
            start += len(taken)
            if len(part) == size:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)
