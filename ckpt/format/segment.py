"""The segment: one rank's file, a plain safetensors file cut into chunks.

bytes      content
[0, 8)     n, little-endian: length of the JSON text
[8, 8 + n) JSON object, padded with spaces so that 8 + n is a multiple of DATA_ALIGN
[8 + n, )  the arrays, tightly packed: what seldom changes first, then by item size, descending, then by name

Chunk i covers the bytes [i * CHUNK_NBYTES, (i + 1) * CHUNK_NBYTES) of the whole file, header included.
Every array begins at a multiple of its item size, so no element straddles two chunks.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ckpt import dtypes
from ckpt.digest import Buffer
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.limits import MALFORMED, MAX_CHUNK_NBYTES, MAX_NDIM, bounded_product, load_json

__all__ = [
    "CHUNK_NBYTES",
    "DATA_ALIGN",
    "MAX_HEADER_NBYTES",
    "ArrayHead",
    "Change",
    "PlacedArray",
    "chunk_count",
    "chunk_range",
    "lay_out_segment",
    "read_safetensors_header",
]

CHUNK_NBYTES = 8 << 20
DATA_ALIGN = 4096
# Source: safetensors crate, MAX_HEADER_SIZE; no reader takes more.
MAX_HEADER_NBYTES = 100_000_000
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
# Spaces at the end of the header may take so much of what seldom changes, to end that at a chunk border.
_PADDING_SHARE = 16


class Change(IntEnum):
    """How often an array is expected to differ between two checkpoints of one run.

    Only whole chunks can be borrowed from the checkpoint before, so what changes is kept out of the chunks of
    what does not. A wrong guess costs nothing but that.
    """

    SELDOM = 0
    """Frozen weights."""
    UNKNOWN = 1
    """Buffers: running statistics at every step, tables and quantized weights never."""
    ALWAYS = 2
    """Whatever training works on."""


@dataclass(frozen=True, slots=True)
class ArrayHead:
    """An array that is to be stored: FQN, dtype (torch's name), local shape in elements, expected change."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    change: Change = Change.ALWAYS

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class PlacedArray:
    """An array's place in a file: ``head`` at the bytes ``[start, start + nbytes)``."""

    head: ArrayHead
    start: int
    nbytes: int


def chunk_count(nbytes: int, chunk_nbytes: int = CHUNK_NBYTES) -> int:
    """Return how many chunks a segment of ``nbytes`` has."""
    return -(-nbytes // chunk_nbytes)


def chunk_range(chunk: int, nbytes: int, chunk_nbytes: int = CHUNK_NBYTES) -> tuple[int, int]:
    """Return the byte range [start, stop) of ``chunk`` in a segment of ``nbytes``.

    Raises:
        InvalidInputError: there is no such chunk.
        CorruptError: code "chunk-table": no chunk can have that size.
    """
    if not 0 < chunk_nbytes <= MAX_CHUNK_NBYTES:
        raise CorruptError(
            "chunk size is impossible", code="chunk-table", chunk_nbytes=chunk_nbytes, most=MAX_CHUNK_NBYTES
        )
    start = chunk * chunk_nbytes
    if not 0 <= start < nbytes:
        raise InvalidInputError("no such chunk", chunk=chunk, nbytes=nbytes)
    return start, min(start + chunk_nbytes, nbytes)


def lay_out_segment(arrays: Sequence[ArrayHead]) -> tuple[bytes, list[PlacedArray], int]:
    """Return (header bytes, arrays with their places in file order, size of the whole file).

    Arrays without elements get no bytes in the file and must not be passed.

    Raises:
        InvalidInputError: a name that safetensors cannot hold, or that occurs twice; an unknown dtype;
            an array without elements; more names than a safetensors header can hold.
    """
    ordered, quiet_nbytes = _in_order(arrays)
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    offset = 0
    spans: list[tuple[int, int]] = []
    for item in ordered:
        nbytes = item.nbytes
        if item.name in entries or nbytes == 0:
            raise InvalidInputError(
                "array cannot be stored: empty, or its name is taken", code="segment", tensor=item.name
            )
        entries[item.name] = _entry(item, offset, nbytes)
        spans.append((offset, nbytes))
        offset += nbytes
    header = _pad(entries, quiet_nbytes)
    placed = [
        PlacedArray(item, len(header) + start, nbytes)
        for item, (start, nbytes) in zip(ordered, spans, strict=True)
    ]
    return header, placed, len(header) + offset


def _in_order(arrays: Sequence[ArrayHead]) -> tuple[list[ArrayHead], int]:
    """Return the arrays in file order, and the bytes of those before the first that changes always (0: none
    are, or the two kinds are mixed).
    """
    ordered = sorted(arrays, key=lambda item: (item.change, -dtypes.itemsize(item.dtype), item.name))
    position = quiet_nbytes = 0
    for item in ordered:
        if position % dtypes.itemsize(item.dtype):  # an odd number of bytes before larger items
            return sorted(arrays, key=lambda item: (-dtypes.itemsize(item.dtype), item.change, item.name)), 0
        position += item.nbytes
        if item.change is not Change.ALWAYS:
            quiet_nbytes = position
    return ordered, 0 if quiet_nbytes == position else quiet_nbytes


def _entry(item: ArrayHead, start: int, nbytes: int) -> dict[str, object]:
    stored = dtypes.SAFETENSORS_NAMES.get(item.dtype)
    shape = list(item.shape) if stored else [*item.shape, dtypes.itemsize(item.dtype)]
    return {"dtype": stored or "U8", "shape": shape, "data_offsets": [start, start + nbytes]}


def _pad(entries: dict[str, object], quiet_nbytes: int) -> bytes:
    """The header; where that is cheap, so long that the arrays that always change begin with a chunk."""
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InvalidInputError("a tensor name is not valid Unicode", code="segment") from error
    total = -(-(_LENGTH.size + len(text)) // DATA_ALIGN) * DATA_ALIGN
    if total - _LENGTH.size > MAX_HEADER_NBYTES:
        raise InvalidInputError(
            "names of the tensors of one rank are longer than a safetensors header may be",
            code="segment",
            nbytes=total,
            limit=MAX_HEADER_NBYTES,
        )
    if quiet_nbytes:
        # To within DATA_ALIGN: the few bytes left over are re-sent with the chunk they lie in.
        gap = -(total + quiet_nbytes // DATA_ALIGN * DATA_ALIGN) % CHUNK_NBYTES
        if gap * _PADDING_SHARE <= quiet_nbytes and total + gap - _LENGTH.size <= MAX_HEADER_NBYTES:
            total += gap
    return _LENGTH.pack(total - _LENGTH.size) + text.ljust(total - _LENGTH.size)


def read_safetensors_header(data: Buffer, *, nbytes: int, where: str) -> list[PlacedArray]:
    """Parse the header at the start of a segment and check that the arrays fill the file.

    Args:
        data: at least the whole header; bytes after it are not looked at.
        nbytes: size of the whole file.
        where: key or path, for the error.

    Returns:
        The arrays in file order. ``head.dtype`` is torch's name of what safetensors says: an array
        that had to be stored as U8 appears as uint8 with one more dimension.

    Raises:
        CorruptError: code "segment-header".
    """
    view = memoryview(data)
    size = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else MAX_HEADER_NBYTES + 1
    base = _LENGTH.size + size
    if size > MAX_HEADER_NBYTES or base > min(len(view), nbytes):
        raise CorruptError("segment header is cut short", code="segment-header", where=where)
    try:
        entries = load_json(view[_LENGTH.size : base])
        placed = sorted(
            (_parse(name, entry, base) for name, entry in entries.items() if name != _METADATA),
            key=lambda item: item.start,
        )
    except MALFORMED as error:
        raise CorruptError("segment header is malformed", code="segment-header", where=where) from error
    position = base
    for item in placed:
        if item.start != position or item.nbytes != item.head.nbytes:
            raise CorruptError(
                "segment header is inconsistent", code="segment-header", where=where, tensor=item.head.name
            )
        position += item.nbytes
    if position != nbytes:
        raise CorruptError(
            "segment has another size than its header says",
            code="segment-header",
            where=where,
            nbytes=nbytes,
            expected=position,
        )
    return placed


_TORCH_NAMES = {stored: name for name, stored in dtypes.SAFETENSORS_NAMES.items()}


def _parse(name: str, entry: dict[str, object], base: int) -> PlacedArray:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(name)
    start, stop = offsets
    if len(shape) > MAX_NDIM + 1 or not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(name)
    if bounded_product(shape) is None:
        raise ValueError(name)
    head = ArrayHead(name, _TORCH_NAMES[str(entry["dtype"])], tuple(shape))
    return PlacedArray(head, base + start, stop - start)
