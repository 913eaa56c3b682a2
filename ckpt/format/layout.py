"""The set of tensor layouts of a checkpoint: its stored form and how ranks' sets are merged.

This module also gives access to all of the layout arithmetic (mesh, placements, regions).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from google.protobuf.message import DecodeError

from ckpt.digest import Buffer, digest
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.mesh import Mesh
from ckpt.format.placement import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    placement_from_proto,
    placement_to_proto,
)
from ckpt.format.region import (
    STRIPE_MIN_NBYTES,
    SplitKey,
    Stripe,
    local_region,
    owned_region,
    owned_stripe,
    owners,
    replica_at,
    replication,
    right_to_left,
    split_key,
    storing_ranks,
)
from ckpt_proto.v1 import common_pb2

__all__ = [
    "STRIPE_MIN_NBYTES",
    "LayoutSet",
    "Mesh",
    "Placement",
    "Replicate",
    "Shard",
    "SplitKey",
    "StridedShard",
    "Stripe",
    "TensorLayout",
    "local_region",
    "merge_layout_sets",
    "owned_region",
    "owned_stripe",
    "owners",
    "replica_at",
    "replication",
    "right_to_left",
    "split_key",
    "storing_ranks",
]


class LayoutSet(Mapping[str, TensorLayout]):
    """Immutable mapping from tensor name to layout, in ascending order of names.

    Raises:
        InvalidInputError: two layouts have the same name.
    """

    def __init__(self, layouts: Iterable[TensorLayout] = ()) -> None:
        ordered = sorted(layouts, key=lambda item: item.name)
        self._by_name = {item.name: item for item in ordered}
        if len(self._by_name) != len(ordered):
            raise InvalidInputError("two tensors have the same name", code="layout", total=len(ordered))

    def __getitem__(self, name: str) -> TensorLayout:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __eq__(self, other: object) -> bool:
        return self._encoded == other._encoded if isinstance(other, LayoutSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"LayoutSet({len(self)} tensors)"

    def encode(self) -> bytes:
        """Return the stored form. Equal sets give equal bytes on every rank."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        message = common_pb2.LayoutSet()
        meshes: dict[Mesh, int] = {}
        placements: dict[tuple[Placement, ...], list[common_pb2.Placement]] = {}
        for item in self._by_name.values():
            if item.mesh not in meshes:
                meshes[item.mesh] = len(meshes)
                message.meshes.append(item.mesh.to_proto())
            if item.placements not in placements:
                placements[item.placements] = [placement_to_proto(p) for p in item.placements]
            message.tensors.add(
                name=item.name,
                dtype=item.dtype,
                global_shape=item.global_shape,
                mesh=meshes[item.mesh],
                placements=placements[item.placements],
            )
        return message.SerializeToString(deterministic=True)

    @cached_property
    def digest(self) -> bytes:
        """16-byte digest of the stored form; names it in the store."""
        return digest(self._encoded)

    @classmethod
    def decode(cls, data: Buffer) -> LayoutSet:
        """Parse the stored form (the envelope's payload). Raises CorruptError, code "layout"."""
        message = common_pb2.LayoutSet()
        try:
            message.ParseFromString(bytes(data))
            meshes = [Mesh.from_proto(item) for item in message.meshes]
            decoded = cls(
                TensorLayout(
                    item.name,
                    item.dtype,
                    tuple(item.global_shape),
                    meshes[item.mesh],
                    tuple(map(placement_from_proto, item.placements)),
                )
                for item in message.tensors
            )
        except (DecodeError, IndexError, InvalidInputError) as error:
            raise CorruptError("stored layout is malformed", code="layout") from error
        # The digest names these bytes, whatever another version of this code would make of them.
        decoded.__dict__["_encoded"] = bytes(data)
        return decoded


def merge_layout_sets(sets: Iterable[LayoutSet]) -> LayoutSet:
    """Return the union by name. The result does not depend on the order of ``sets``.

    The same name on disjoint meshes (weights that pipeline stages share): each mesh covers the tensor
    alone, and the one with the lowest base is kept.

    Raises:
        CorruptError: code "layout-mismatch": sets disagree on the shape or dtype of a tensor, or on how
            it is split over one and the same ranks, so that no layout says what each of them stored.
    """
    distinct = list(dict.fromkeys(sets))  # nearly every rank has the same one
    if len(distinct) == 1:
        return distinct[0]
    merged: dict[str, TensorLayout] = {}
    for layouts in distinct:
        for name, layout in layouts.items():
            known = merged.setdefault(name, layout)
            if known is layout or known == layout:
                continue
            if not _are_copies(known, layout):
                raise CorruptError(
                    "ranks disagree on a tensor",
                    code="layout-mismatch",
                    tensor=name,
                    left=_describe(known),
                    right=_describe(layout),
                )
            merged[name] = min(known, layout, key=lambda item: item.mesh.base)
    return LayoutSet(merged.values())


def _are_copies(left: TensorLayout, right: TensorLayout) -> bool:
    same = (left.global_shape, left.dtype) == (right.global_shape, right.dtype)
    return same and left.mesh.ranks_set.isdisjoint(right.mesh.ranks_set)


def _describe(layout: TensorLayout) -> str:
    splits = ", ".join(map(str, layout.placements))
    return f"{layout.dtype}{list(layout.global_shape)} over {list(layout.mesh.shape)}: {splits}"
