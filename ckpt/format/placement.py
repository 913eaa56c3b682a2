"""Placements and the layout of one tensor, as PyTorch's DTensor defines them. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ckpt import dtypes
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.limits import MAX_NDIM, MAX_SPLITS, bounded_product
from ckpt.format.mesh import Mesh
from ckpt_proto.v1 import common_pb2

__all__ = [
    "Placement",
    "Replicate",
    "Shard",
    "Split",
    "StridedShard",
    "TensorLayout",
    "placement_from_proto",
    "placement_to_proto",
    "splits_of",
]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this mesh dim holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along tensor dim ``dim`` like ``torch.chunk``: ceil-division, the last ones may be empty."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """DTensor's ``_StridedShard``: cut ``dim`` into ``split_factor`` pieces, split each of them over
    the mesh dim; a rank's shard is its part of every piece, concatenated in order.
    """

    dim: int
    split_factor: int


Placement: TypeAlias = Replicate | Shard | StridedShard


def placement_to_proto(placement: Placement) -> common_pb2.Placement:
    """Return the stored form."""
    if isinstance(placement, Shard):
        return common_pb2.Placement(kind=common_pb2.Placement.KIND_SHARD, dim=placement.dim)
    if isinstance(placement, StridedShard):
        return common_pb2.Placement(
            kind=common_pb2.Placement.KIND_STRIDED_SHARD,
            dim=placement.dim,
            split_factor=placement.split_factor,
        )
    return common_pb2.Placement(kind=common_pb2.Placement.KIND_REPLICATE)


def placement_from_proto(message: common_pb2.Placement) -> Placement:
    """Parse the stored form. Raises CorruptError for an unknown kind."""
    if message.kind == common_pb2.Placement.KIND_REPLICATE:
        return Replicate()
    if message.kind == common_pb2.Placement.KIND_SHARD:
        return Shard(message.dim)
    if message.kind == common_pb2.Placement.KIND_STRIDED_SHARD:
        return StridedShard(message.dim, message.split_factor)
    raise CorruptError("unknown placement kind", code="placement", kind=int(message.kind))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor is split over a mesh.

    Attributes:
        name: FQN.
        dtype: torch's name without the prefix.
        global_shape: of the whole tensor, in elements.
        mesh: where it lives.
        placements: one per mesh dim, applied from left to right.

    Raises:
        InvalidInputError: a placement does not fit the tensor or the mesh, the dtype is unknown, or the
            name has no UTF-8 form.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != self.mesh.ndim:
            raise InvalidInputError("one placement per mesh dim is needed", code="layout", tensor=self.name)
        if any(n < 0 for n in self.global_shape):
            raise InvalidInputError("negative size", code="layout", tensor=self.name)
        if len(self.global_shape) > MAX_NDIM or bounded_product((*self.global_shape, 16)) is None:
            raise InvalidInputError(
                "tensor is larger than any memory",
                code="layout",
                tensor=self.name,
                ndim=len(self.global_shape),
            )
        dtypes.itemsize(self.dtype)
        _check_name(self.name)
        for placement in self.placements:
            if isinstance(placement, Replicate):
                continue
            if not 0 <= placement.dim < len(self.global_shape):
                raise InvalidInputError("sharded dim out of range", code="layout", tensor=self.name)
            if isinstance(placement, StridedShard) and placement.split_factor < 1:
                raise InvalidInputError("split factor below 1", code="layout", tensor=self.name)
        self._check_splits()

    def _check_splits(self) -> None:
        """The arithmetic visits each piece of a strided shard: as many as this must not keep it for ever."""
        factors = [item.split_factor for item in self.placements if isinstance(item, StridedShard)]
        pieces = bounded_product((self.mesh.size, *factors)) if factors else 1
        if pieces is None or pieces > MAX_SPLITS:
            raise InvalidInputError(
                "strided shards cut the tensor into too many pieces",
                code="layout",
                tensor=self.name,
                most=MAX_SPLITS,
            )

    @property
    def replica_dims(self) -> tuple[int, ...]:
        """The mesh dims over which the tensor is replicated."""
        return tuple(dim for dim, item in enumerate(self.placements) if isinstance(item, Replicate))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtypes.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.global_shape) * self.itemsize


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:  # a lone surrogate; neither protobuf nor JSON can hold it
        raise InvalidInputError(
            "tensor name is not valid Unicode", code="layout", tensor=ascii(name)
        ) from error


@dataclass(frozen=True, slots=True)
class Split:
    """How one tensor dim is split: a chain of (mesh dim size, split factor), applied in order.

    A split factor of 1 is a plain shard.
    """

    mesh_dims: tuple[int, ...]
    chain: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def splits_of(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], ndim: int
) -> tuple[tuple[Split, ...], tuple[int, ...]]:
    """Return the split of each tensor dim, and the mesh dims over which the tensor is replicated.

    Mesh dims of size 1 are left out of the chains: they split nothing.
    """
    dims: list[list[int]] = [[] for _ in range(ndim)]
    replicas: list[int] = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replicas.append(mesh_dim)
        elif mesh_shape[mesh_dim] > 1:  # else concatenating all pieces gives the whole again
            dims[placement.dim].append(mesh_dim)
    factors = [p.split_factor if isinstance(p, StridedShard) else 1 for p in placements]
    splits = tuple(
        Split(tuple(chosen), tuple((mesh_shape[dim], factors[dim]) for dim in chosen)) for chosen in dims
    )
    return splits, tuple(replicas)
