"""Decides what one rank stores of every tensor, and where in its segment. Pure; knows no other rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.format.layout import TensorLayout, owned_stripe
from ckpt.format.segment import ArrayHead, Change, lay_out_segment
from ckpt.geometry import Region, Shape
from ckpt_proto.v1 import disk_pb2

__all__ = ["SavePlan", "StoredArray", "plan_save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """One array of a segment.

    Attributes:
        name: FQN.
        dtype: true dtype (torch's name), also where safetensors has to say U8.
        region: what it covers of the global tensor.
        local_start: where it begins in the rank's local tensor, per dim; it extends by ``shape``.
        shape: of the array, in elements.
        start: byte offset in the segment file, header included.
        nbytes: size in bytes.
    """

    name: str
    dtype: str
    region: Region
    local_start: Shape
    shape: Shape
    start: int
    nbytes: int

    def local_slices(self) -> tuple[slice, ...]:
        """Return the index of the stored part in the rank's local tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one rank writes.

    Attributes:
        rank: the rank.
        arrays: in file order, tightly packed from ``len(header)`` to ``nbytes``.
        header: the first bytes of the file; its length is a multiple of 4 KiB.
        nbytes: size of the whole file.
    """

    rank: int
    arrays: tuple[StoredArray, ...]
    header: bytes = field(repr=False)
    nbytes: int

    def tensor_entries(self) -> list[disk_pb2.TensorEntry]:
        """Return the arrays as the segment index lists them, ascending by start."""
        return [
            disk_pb2.TensorEntry(
                name=item.name, dtype=item.dtype, shape=item.shape, start=item.start, nbytes=item.nbytes
            )
            for item in self.arrays
        ]


def plan_save(
    layouts: Iterable[TensorLayout], rank: int, changes: Mapping[str, Change] | None = None
) -> SavePlan:
    """Return what ``rank`` stores; the plans of all ranks cover every element exactly once.

    Args:
        layouts: of every tensor, e.g. ``layout_set.values()``. Tensors on meshes without this rank and
            empty shares are left out.
        rank: global rank.
        changes: how often tensors change, by name; those that are not in it always do. Decides on the order
            alone.

    Raises:
        InvalidInputError: a tensor cannot be stored in a safetensors file (its name), code "segment".
    """
    stripes = {}
    heads = []
    for layout in layouts:
        stripe = owned_stripe(layout, rank)
        if stripe is not None:
            stripes[layout.name] = stripe
            change = (changes or {}).get(layout.name, Change.ALWAYS)
            heads.append(ArrayHead(layout.name, layout.dtype, stripe.region.shape, change))
    header, placed, nbytes = lay_out_segment(heads)
    arrays = tuple(
        StoredArray(
            name=item.head.name,
            dtype=item.head.dtype,
            region=stripes[item.head.name].region,
            local_start=stripes[item.head.name].local_start,
            shape=item.head.shape,
            start=item.start,
            nbytes=item.nbytes,
        )
        for item in placed
    )
    return SavePlan(rank=rank, arrays=arrays, header=header, nbytes=nbytes)
