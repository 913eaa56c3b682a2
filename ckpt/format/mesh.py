"""A device mesh: which global rank is at which coordinate, by arithmetic where the ranks allow it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.limits import MAX_NDIM, MAX_WORLD_SIZE, bounded_product
from ckpt_proto.v1 import common_pb2

__all__ = ["Mesh"]


@dataclass(frozen=True)
class Mesh:
    """Row-major mesh of global ranks. Build it with :meth:`from_ranks`.

    Attributes:
        shape: size per mesh dim, each at least 1. No dims: a mesh of one rank.
        names: one per mesh dim, or empty.
        base: rank at the origin.
        strides: per mesh dim, if rank(coord) = base + sum(coord * strides); 0 for a dim of size 1.
            None: no such rule, or one that cannot be inverted by division.
        explicit: the ranks in row-major order where ``strides`` is None, else empty.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    base: int
    strides: tuple[int, ...] | None
    explicit: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(n < 1 for n in self.shape) or (self.names and len(self.names) != len(self.shape)):
            raise InvalidInputError("malformed mesh", code="mesh", shape=self.shape, names=self.names)
        ranks = bounded_product(self.shape) if len(self.shape) <= MAX_NDIM else None
        if ranks is None or ranks > MAX_WORLD_SIZE or self._highest() >= MAX_WORLD_SIZE:
            raise InvalidInputError(
                "mesh is larger than any job", code="mesh", ndim=len(self.shape), most=MAX_WORLD_SIZE
            )
        if self.strides is None:
            distinct = set(self.explicit)
            sound = len(self.explicit) == self.size == len(distinct) and min(distinct) >= 0
        else:
            sound = self.base >= 0 and not self.explicit and _is_invertible(self.shape, self.strides)
        if not sound:
            raise InvalidInputError(
                "mesh needs one distinct, non-negative rank per coordinate", code="mesh", shape=self.shape
            )

    def _highest(self) -> int:
        if self.strides is None:
            return max(self.explicit, default=0)
        return self.base + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=False))

    @classmethod
    def from_ranks(cls, shape: Sequence[int], names: Sequence[str], flat_ranks: Sequence[int]) -> Mesh:
        """Return the mesh with these row-major ranks, in its affine form where there is one.

        Equal meshes come out equal, so that they are stored once.

        Raises:
            InvalidInputError: sizes do not fit, or a rank is negative or occurs twice.
        """
        shape, ranks = tuple(shape), tuple(flat_ranks)
        if math.prod(shape) != len(ranks) or not ranks:
            raise InvalidInputError("mesh shape and ranks differ", code="mesh", shape=shape, ranks=len(ranks))
        strides: list[int] = []
        unit = len(ranks)
        for n in shape:
            unit //= n
            strides.append(ranks[unit] - ranks[0] if n > 1 else 0)
        if _is_invertible(shape, strides) and ranks == _affine_ranks(shape, ranks[0], strides):
            return cls(shape, tuple(names), ranks[0], tuple(strides))
        return cls(shape, tuple(names), ranks[0], None, ranks)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, row-major. Costs O(size); arithmetic does not need it."""
        if self.strides is None:
            return self.explicit
        return _affine_ranks(self.shape, self.base, self.strides)

    @cached_property
    def ranks_set(self) -> frozenset[int]:
        """All ranks. Costs O(size)."""
        return frozenset(self.ranks)

    def rank_at(self, coord: Sequence[int]) -> int:
        """Return the rank at ``coord``, one index per mesh dim."""
        if self.strides is not None:
            return self.base + sum(map(int.__mul__, coord, self.strides))
        flat = 0
        for index, n in zip(coord, self.shape, strict=True):
            flat = flat * n + index
        return self.explicit[flat]

    def coord_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of ``rank``, or None if it is not in the mesh."""
        if self.strides is None:
            return self._coords.get(rank)
        left = rank - self.base
        coord = [0] * len(self.shape)
        for dim in self._division_order:
            coord[dim], left = divmod(left, self.strides[dim])
            if not 0 <= coord[dim] < self.shape[dim]:
                return None
        return tuple(coord) if left == 0 else None

    def permute(self, order: Sequence[int]) -> Mesh:
        """Return the mesh whose dim i is dim ``order[i]`` of this one; every rank stays where it is."""
        shape = tuple(self.shape[dim] for dim in order)
        names = tuple(self.names[dim] for dim in order) if self.names else ()
        if self.strides is not None:
            return Mesh(shape, names, self.base, tuple(self.strides[dim] for dim in order))
        coord = [0] * self.ndim
        ranks: list[int] = []
        for item in product(*map(range, shape)):
            for dim, index in zip(order, item, strict=True):
                coord[dim] = index
            ranks.append(self.rank_at(coord))
        return Mesh.from_ranks(shape, names, ranks)

    @cached_property
    def _coords(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.explicit, product(*map(range, self.shape)), strict=True))

    @cached_property
    def _division_order(self) -> tuple[int, ...]:
        assert self.strides is not None
        return tuple(dim for dim in _descending(self.strides) if self.shape[dim] > 1)

    def to_proto(self) -> common_pb2.Mesh:
        return common_pb2.Mesh(
            shape=self.shape,
            names=self.names,
            base=self.base,
            strides=self.strides or (),
            ranks=self.explicit,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.Mesh) -> Mesh:
        """Parse a stored mesh. Raises CorruptError if it is malformed."""
        strides = None if message.ranks else tuple(message.strides)
        try:
            return cls(
                tuple(message.shape), tuple(message.names), message.base, strides, tuple(message.ranks)
            )
        except InvalidInputError as error:
            raise CorruptError("stored mesh is malformed", code="mesh", shape=list(message.shape)) from error


def _affine_ranks(shape: Sequence[int], base: int, strides: Sequence[int]) -> tuple[int, ...]:
    ranks = [base]
    for n, stride in zip(shape, strides, strict=True):
        ranks = [rank + i * stride for rank in ranks for i in range(n)]
    return tuple(ranks)


def _descending(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _is_invertible(shape: Sequence[int], strides: Sequence[int]) -> bool:
    # Division by the largest stride first finds the coordinate only if no sum of the smaller
    # strides reaches the next larger one. Meshes made by reshaping, slicing and transposing do.
    if len(shape) != len(strides):
        return False
    reach = 0
    for dim in reversed(_descending(strides)):
        if shape[dim] == 1:
            if strides[dim] != 0:
                return False
            continue
        if strides[dim] <= reach:
            return False
        reach += (shape[dim] - 1) * strides[dim]
    return True
