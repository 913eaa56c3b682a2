"""The difference of two checkpoints, tensor by tensor. Equal ones cost no data: their digests are equal.

Where a tensor is split alike in both and lies at the same place of the same segments, equal digests of the
chunks it lies in prove that it is equal. What is left is read and compared in boxes of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ckpt.digest import DIGEST_NBYTES
from ckpt.format.layout import LayoutSet, TensorLayout, storing_ranks
from ckpt.geometry import Box, Shape
from ckpt.ops.arrays import Part, read_indexes, read_parts
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.compare import Difference, Tolerance
from ckpt.ops.tiers import Tier
from ckpt_proto.v1 import disk_pb2

__all__ = ["BOX_NBYTES", "Side", "TensorDiff", "TensorDiffs", "TensorProblem", "diff_tensors"]

BOX_NBYTES = 64 << 20  # read at a time, of each side


class TensorProblem(StrEnum):
    """In what two tensors of one name differ."""

    ONLY_IN_A = "only-in-a"
    ONLY_IN_B = "only-in-b"
    SHAPE = "shape"
    DTYPE = "dtype"
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint, and where copies of it are looked for before the store."""

    checkpoint: Checkpoint
    tiers: Sequence[Tier] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor that is not bitwise equal on both sides.

    Attributes:
        name: of the tensor.
        problem: what differs.
        a, b: dtype and shape, such as "float32[3, 4]"; None where there is none.
        elements: of the whole tensor; 0 unless the values were compared.
        difference: of the values, where dtype and shape are the same.
    """

    name: str
    problem: TensorProblem
    a: str | None = None
    b: str | None = None
    elements: int = 0
    difference: Difference = field(default_factory=Difference)

    @property
    def is_tolerated(self) -> bool:
        """Whether the tolerance covers every difference."""
        return self.problem is TensorProblem.VALUES and self.difference.beyond == 0


@dataclass(slots=True)
class TensorDiffs:
    """All of them.

    Attributes:
        found: tensors that are not bitwise equal, by name.
        equal: how many are.
        equal_by_digest: those of them that were not read.
        read_nbytes: bytes of tensors that were compared, of each side.
    """

    found: list[TensorDiff] = field(default_factory=list)
    equal: int = 0
    equal_by_digest: int = 0
    read_nbytes: int = 0


def diff_tensors(
    a: Side,
    b: Side,
    *,
    match: Callable[[str], bool] = lambda _: True,
    tolerance: Tolerance | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TensorDiffs:
    """Compare the tensors that ``match`` fits. Memory: some ``BOX_NBYTES``, whatever their size.

    Args:
        a, b: what to compare.
        match: by name.
        tolerance: counts differences beyond it; bits count as well.
        progress: called with (bytes compared, bytes to compare).

    Raises:
        CorruptError: data or metadata of a checkpoint is damaged.
        UnavailableError: a store cannot be reached.
    """
    result = TensorDiffs()
    left, right = a.checkpoint.layouts, b.checkpoint.layouts
    unknown: list[TensorLayout] = []
    digests = _Digests(a, b)
    alike = [layout for name, layout in left.items() if match(name) and right.get(name) == layout]
    for side in (a, b):
        ranks = storing_ranks(alike)
        read_indexes(side.checkpoint, (r for r in ranks if r < side.checkpoint.manifest.world_size))
    for name in sorted(filter(match, left.keys() | right.keys())):
        found = _headline(name, left, right)
        if found is not None:
            result.found.append(found)
        elif 0 in left[name].global_shape or digests.prove_equal(left[name], right[name]):
            result.equal += 1
            result.equal_by_digest += 1
        else:
            unknown.append(left[name])
    result.read_nbytes = sum(layout.nbytes for layout in unknown)
    for layout, difference in _compare(a, b, unknown, tolerance, progress):
        if difference.differing:
            text = _describe(layout)
            result.found.append(
                TensorDiff(
                    name=layout.name,
                    problem=TensorProblem.VALUES,
                    a=text,
                    b=text,
                    elements=math.prod(layout.global_shape),
                    difference=difference,
                )
            )
        else:
            result.equal += 1
    result.found.sort(key=lambda item: item.name)
    return result


def _headline(name: str, left: LayoutSet, right: LayoutSet) -> TensorDiff | None:
    """What can be said without values."""
    a, b = left.get(name), right.get(name)
    if a is None or b is None:
        problem = TensorProblem.ONLY_IN_B if a is None else TensorProblem.ONLY_IN_A
    elif a.global_shape != b.global_shape:
        problem = TensorProblem.SHAPE
    elif a.dtype != b.dtype:
        problem = TensorProblem.DTYPE
    else:
        return None
    return TensorDiff(
        name=name,
        problem=problem,
        a=None if a is None else _describe(a),
        b=None if b is None else _describe(b),
    )


def _describe(layout: TensorLayout) -> str:
    return f"{layout.dtype}{list(layout.global_shape)}"


class _Digests:
    """Looks up which chunks of the two checkpoints are equal."""

    def __init__(self, a: Side, b: Side) -> None:
        self._a, self._b = a.checkpoint, b.checkpoint
        self._ranks: dict[int, _EqualChunks | None] = {}

    def prove_equal(self, a: TensorLayout, b: TensorLayout) -> bool:
        """Whether the digests say so; if not, nothing is known."""
        if a != b:
            return False
        return all(self._is_equal_on(rank, a.name) for rank in storing_ranks([a]))

    def _is_equal_on(self, rank: int, name: str) -> bool:
        if rank not in self._ranks:
            worlds = self._a.manifest.world_size, self._b.manifest.world_size
            self._ranks[rank] = (
                _EqualChunks(self._a.segment_index(rank), self._b.segment_index(rank))
                if rank < min(worlds)
                else None
            )
        chunks = self._ranks[rank]
        return chunks is not None and chunks.hold(name)


class _EqualChunks:
    """One rank's segments of both checkpoints."""

    def __init__(self, a: disk_pb2.SegmentIndex, b: disk_pb2.SegmentIndex) -> None:
        self._a = {entry.name: entry for entry in a.tensors}
        self._b = {entry.name: entry for entry in b.tensors}
        self._nbytes = a.chunks.chunk_nbytes
        self._digests = (a.chunks.digests, b.chunks.digests)
        self._comparable = self._nbytes == b.chunks.chunk_nbytes > 0

    def hold(self, name: str) -> bool:
        """Whether the array of that name lies in equal chunks at the same place."""
        a, b = self._a.get(name), self._b.get(name)
        if not self._comparable or a is None or a != b:
            return False
        first, last = a.start // self._nbytes, (a.start + max(a.nbytes, 1) - 1) // self._nbytes
        part = slice(first * DIGEST_NBYTES, (last + 1) * DIGEST_NBYTES)
        found = self._digests[0][part]
        return len(found) == (last + 1 - first) * DIGEST_NBYTES and found == self._digests[1][part]


def _compare(
    a: Side,
    b: Side,
    layouts: Iterable[TensorLayout],
    tolerance: Tolerance | None,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[TensorLayout, Difference]]:
    # In the order in which they lie in segments, so that small ones are read with the chunk they share.
    ordered = sorted(layouts, key=lambda layout: (-layout.itemsize, layout.name))
    differences = {layout.name: Difference() for layout in ordered}
    done, total = 0, sum(layout.nbytes for layout in ordered)
    progress(done, total)
    for batch in _batches(ordered):
        parts: list[Part] = [(layout.name, box) for layout, box in batch]
        mine = read_parts(a.checkpoint, parts, tiers=a.tiers)
        theirs = read_parts(b.checkpoint, parts, tiers=b.tiers)
        for (layout, _), left, right in zip(batch, mine, theirs, strict=True):
            differences[layout.name].add(left, right, layout.dtype, tolerance)
            done += left.nbytes
        progress(done, total)
    for layout in ordered:
        yield layout, differences[layout.name]


def _batches(layouts: Iterable[TensorLayout]) -> Iterator[list[tuple[TensorLayout, Box]]]:
    batch: list[tuple[TensorLayout, Box]] = []
    room = BOX_NBYTES
    for layout in layouts:
        for box in _cut(layout.global_shape, BOX_NBYTES // layout.itemsize):
            nbytes = box.nelements * layout.itemsize
            if batch and nbytes > room:
                yield batch
                batch, room = [], BOX_NBYTES
            batch.append((layout, box))
            room -= nbytes
    if batch:
        yield batch


def _cut(shape: Shape, most: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``most`` elements, in row-major order."""
    if math.prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
        return
    inner = math.prod(shape[1:])
    if inner <= most:
        rows = most // inner
        for start in range(0, shape[0], rows):
            yield Box((start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
        return
    for row in range(shape[0]):
        for box in _cut(shape[1:], most):
            yield Box((row, *box.offsets), (1, *box.sizes))
