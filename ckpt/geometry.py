"""Boxes, runs and regions: integer arithmetic on parts of an array. No I/O, no arrays.

Coordinates are elements. *Global* coordinates count in the whole tensor; *local* ones in the array
that one rank holds, which is the product of its runs per dimension, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple, TypeAlias

from ckpt.errors import InvalidInputError

__all__ = [
    "Box",
    "Region",
    "Run",
    "Runs",
    "Shape",
    "flat_range",
    "flat_range_boxes",
    "intersect_regions",
    "intersect_runs",
    "merge_runs",
    "narrow_runs",
]

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array.

    Attributes:
        offsets: first element per dimension.
        sizes: extent per dimension in elements. A zero makes the box empty, which is legal:
            uneven sharding leaves some ranks with nothing.

    A scalar is the box with no dimensions; it holds one element.
    """

    offsets: Shape
    sizes: Shape

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise InvalidInputError("box of two ndims", offsets=self.offsets, sizes=self.sizes)

    @property
    def nelements(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    def intersect(self, other: Box) -> Box | None:
        """Return the common part in the same coordinates, or None when nothing is shared."""
        if len(self.sizes) != len(other.sizes):
            raise InvalidInputError("boxes of different ndim", left=self.sizes, right=other.sizes)
        lows = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - low
            for a, n, b, m, low in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, lows, strict=True
            )
        )
        return Box(lows, sizes) if all(n > 0 for n in sizes) else None

    def shift(self, by: Sequence[int]) -> Box:
        """Return the box moved by ``by`` elements per dimension."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from an array."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))


def flat_range(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """Return the row-major flat range ``[start, stop)`` of a box in an array; None where it is not one."""
    if box.sizes == shape:
        return 0, box.nelements
    start, stride, is_partial = 0, 1, False
    for n, offset, size in zip(reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True):
        if is_partial and size != 1:
            return None
        is_partial = is_partial or size != n
        start += offset * stride
        stride *= n
    return start, start + box.nelements


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major flat range ``[start, stop)`` of an array into boxes.

    Returns:
        At most ``2 * ndim - 1`` boxes in flat order, each of them contiguous in the flat buffer;
        together exactly the range. No box for an empty range.

    Raises:
        InvalidInputError: the range is not within the array.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise InvalidInputError("range outside the array", shape=tuple(shape), start=start, stop=stop)
    if start == stop:
        return []
    return list(_flat_boxes((), tuple(shape), start, stop))


def _flat_boxes(outer: Shape, shape: Shape, start: int, stop: int) -> Iterator[Box]:
    # ``outer``: coordinates already fixed; ``shape``: the dimensions that are left; start < stop.
    if not shape:
        yield Box(outer, (1,) * len(outer))
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if head and first == last:
        yield from _flat_boxes((*outer, first), shape[1:], head, tail)
        return
    if head:
        yield from _flat_boxes((*outer, first), shape[1:], head, inner)
        first += 1
    if first < last:
        rest = len(shape) - 1
        yield Box((*outer, first) + (0,) * rest, (1,) * len(outer) + (last - first, *shape[1:]))
    if tail:
        yield from _flat_boxes((*outer, last), shape[1:], 0, tail)


class Run(NamedTuple):
    """``length`` consecutive global elements along one dimension, from ``start``."""

    start: int
    length: int


Runs: TypeAlias = tuple[Run, ...]


def merge_runs(runs: Sequence[Run]) -> Runs:
    """Drop empty runs and join those that continue one another; the order stays."""
    merged: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        if merged and merged[-1].start + merged[-1].length == run.start:
            merged[-1] = Run(merged[-1].start, merged[-1].length + run.length)
        else:
            merged.append(run)
    return tuple(merged)


def narrow_runs(runs: Runs, start: int, stop: int) -> Runs:
    """Return what the local elements ``[start, stop)`` of ``runs`` cover."""
    if len(runs) == 1:  # the common case, on the training thread
        low = min(start, runs[0].length)
        length = min(stop, runs[0].length) - low
        return (Run(runs[0].start + low, length),) if length > 0 else ()
    kept: list[Run] = []
    position = 0
    for run in runs:
        low = max(start - position, 0)
        high = min(stop - position, run.length)
        if low < high:
            kept.append(Run(run.start + low, high - low))
        position += run.length
        if position >= stop:
            break
    return merge_runs(kept)


@dataclass(frozen=True, slots=True)
class Region:
    """What a local array covers of a global tensor: the product of its runs.

    Attributes:
        runs: per dimension, the global intervals in *local* order. Along each dimension the local
            array is their concatenation. More than one run: an uneven strided shard.
    """

    runs: tuple[Runs, ...]

    @classmethod
    def of_box(cls, box: Box) -> Region:
        """Return the region of one box; an empty extent has no runs."""
        return cls(tuple((Run(a, n),) if n else () for a, n in zip(box.offsets, box.sizes, strict=True)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor."""
        return cls(tuple((Run(0, n),) if n else () for n in shape))

    @property
    def shape(self) -> Shape:
        """Local shape."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    @property
    def nelements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return () in self.runs

    def narrow(self, dim: int, start: int, stop: int) -> Region:
        """Return the part whose local index along ``dim`` is in ``[start, stop)``."""
        return Region((*self.runs[:dim], narrow_runs(self.runs[dim], start, stop), *self.runs[dim + 1 :]))

    def boxes(self) -> list[tuple[Box, Shape]]:
        """Return (global box, local offsets) of each box, in local row-major order; none if empty."""
        placed = [_with_local_starts(runs) for runs in self.runs]
        return [
            (
                Box(tuple(run.start for run, _ in item), tuple(run.length for run, _ in item)),
                tuple(local for _, local in item),
            )
            for item in product(*placed)
        ]


def _with_local_starts(runs: Runs) -> list[tuple[Run, int]]:
    starts = accumulate((run.length for run in runs), initial=0)
    return list(zip(runs, starts, strict=False))


def intersect_runs(src: Runs, dst: Runs) -> list[tuple[int, int, int]]:
    """Return (src local start, dst local start, length) of the common elements along a dimension.

    In the order of ``dst``; merged where both sides continue.
    """
    if len(src) == 1 and len(dst) == 1:  # no sorting for the common case
        low = max(src[0].start, dst[0].start)
        length = min(src[0].start + src[0].length, dst[0].start + dst[0].length) - low
        return [(low - src[0].start, low - dst[0].start, length)] if length > 0 else []
    left, right = sorted(_with_local_starts(src)), sorted(_with_local_starts(dst))
    found: list[tuple[int, int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        (a, a_at), (b, b_at) = left[i], right[j]
        low, a_end, b_end = max(a.start, b.start), a.start + a.length, b.start + b.length
        if low < min(a_end, b_end):
            found.append((a_at + low - a.start, b_at + low - b.start, min(a_end, b_end) - low))
        if a_end <= b_end:
            i += 1
        else:
            j += 1
    merged: list[tuple[int, int, int]] = []
    for here in sorted(found, key=lambda item: item[1]):
        if merged:
            s, d, n = merged[-1]
            if s + n == here[0] and d + n == here[1]:
                merged[-1] = (s, d, n + here[2])
                continue
        merged.append(here)
    return merged


def intersect_regions(src: Region, dst: Region) -> list[tuple[Box, Box]]:
    """Return (box in src-local, box in dst-local coordinates) pairs of the common elements.

    Both boxes of a pair have the same sizes; together the pairs are exactly the common elements,
    each once, with as few boxes as the runs allow.

    Raises:
        InvalidInputError: the regions differ in ndim.
    """
    if len(src.runs) != len(dst.runs):
        raise InvalidInputError("regions of different ndim", left=len(src.runs), right=len(dst.runs))
    common = [intersect_runs(a, b) for a, b in zip(src.runs, dst.runs, strict=True)]
    pairs: list[tuple[Box, Box]] = []
    for item in product(*common):
        sizes = tuple(n for _, _, n in item)
        pairs.append((Box(tuple(s for s, _, _ in item), sizes), Box(tuple(d for _, d, _ in item), sizes)))
    return pairs
