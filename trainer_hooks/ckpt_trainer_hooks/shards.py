"""Tensors cut in boxes that follow no mesh: jagged tables, shards that a sharding of one's own has made.

Each rank registers an :class:`ExplicitShards` with the boxes that it holds, as an item of the state. Every
box is stored as a tensor of its own rank; which boxes there are is in the ranks' own values. A restore fills
each live box from whatever saved boxes it meets, so the cut may be another one, on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import InvalidInputError
from ckpt.format.layout import LayoutSet
from ckpt.format.values import decode_value
from ckpt.geometry import Box
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.layout import dtype_name

__all__ = ["ExplicitShards", "Fill", "SavedShards", "plan_fills"]


class ExplicitShards:
    """This rank's boxes of one global tensor. All ranks register it, also one that holds nothing of it.

    Args:
        global_shape: of the whole tensor, in elements.
        pieces: (offsets, tensor) of each box: where it begins in the whole, and its elements. The tensors are
            saved from and restored into in place. Boxes of different ranks may be the same (replicas).
        dtype: of all pieces; needed where a rank has none.

    Raises:
        InvalidInputError: a box reaches beyond the whole, meets another of this rank, or has another dtype.
    """

    def __init__(
        self,
        global_shape: Sequence[int],
        pieces: Iterable[tuple[Sequence[int], torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.global_shape = tuple(global_shape)
        held = [(tuple(offsets), tensor) for offsets, tensor in pieces]
        found = dtype if dtype is not None else next((tensor.dtype for _, tensor in held), None)
        if found is None:
            raise InvalidInputError("a rank without pieces has to name the dtype of the tensor")
        self.dtype = found
        self.pieces = [(Box(offsets, tuple(tensor.shape)), tensor) for offsets, tensor in held]
        for number, (box, tensor) in enumerate(self.pieces):
            self._check(box, tensor, [other for other, _ in self.pieces[:number]])

    def _check(self, box: Box, tensor: torch.Tensor, before: Sequence[Box]) -> None:
        whole = Box((0,) * len(self.global_shape), self.global_shape)
        inside = len(box.sizes) == len(whole.sizes) and (box.is_empty or box.intersect(whole) == box)
        if not inside or tensor.dtype != self.dtype or any(box.intersect(other) for other in before):
            raise InvalidInputError(
                "a piece reaches beyond its tensor, meets another piece of this rank, or has another dtype",
                offsets=box.offsets,
                sizes=box.sizes,
                global_shape=self.global_shape,
                dtype=tensor.dtype,
            )

    def tree(self) -> dict[str, Any]:
        """What a snapshot stores of it: plain values, and the tensors themselves."""
        held = [(box, tensor) for box, tensor in self.pieces if tensor.numel() > 0]
        return {
            "kind": "shards",
            "global_shape": list(self.global_shape),
            "dtype": dtype_name(self.dtype),
            "offsets": [list(box.offsets) for box, _ in held],
            "pieces": [tensor for _, tensor in held],
        }


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a live piece and the saved tensor that has it, with the same part in its coordinates."""

    stored: str
    source: Box
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class SavedShards:
    """What all saved ranks had of one item.

    Attributes:
        global_shape: of the whole tensor.
        dtype: torch's name.
        boxes: (box in the whole, name of the stored tensor).
    """

    global_shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[Box, str], ...]

    @classmethod
    def read(
        cls, item: str, rank_values: Iterable[common_pb2.Value], layouts: LayoutSet
    ) -> SavedShards | None:
        """Collect the boxes from every rank's own values; None where no rank saved the item."""
        found: Mapping[str, Any] | None = None
        boxes = []
        for value in rank_values:
            tree = decode_value(value, leaf=lambda name: name)["items"].get(item)
            if tree is None or tree["kind"] != "shards":
                continue
            found = tree
            for offsets, name in zip(tree["offsets"], tree["pieces"], strict=True):
                boxes.append((Box(tuple(offsets), layouts[name].global_shape), name))
        if found is None:
            return None
        return cls(tuple(found["global_shape"]), found["dtype"], tuple(boxes))


def plan_fills(live: ExplicitShards, saved: SavedShards) -> tuple[list[Fill], list[Box]]:
    """Return what fills every live piece, each element once, and the boxes that no saved piece covers."""
    fills: list[Fill] = []
    uncovered: list[Box] = []
    for piece, tensor in live.pieces:
        left = [] if piece.is_empty else [piece]
        for box, name in saved.boxes:
            rest: list[Box] = []
            for part in left:
                common = part.intersect(box)
                if common is None:
                    rest.append(part)
                    continue
                inside = common.shift(tuple(-a for a in piece.offsets))
                fills.append(
                    Fill(name, common.shift(tuple(-a for a in box.offsets)), tensor[inside.slices()])
                )
                rest += _without(part, common)
            left = rest
        uncovered += left
    return fills, uncovered


def _without(box: Box, hole: Box) -> list[Box]:
    """Cut ``hole``, which lies in ``box``, out of it: at most two boxes per dim."""
    found = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        before = hole.offsets[dim] - offsets[dim]
        after = offsets[dim] + sizes[dim] - hole.offsets[dim] - hole.sizes[dim]
        for start, size in ((offsets[dim], before), (hole.offsets[dim] + hole.sizes[dim], after)):
            if size > 0:
                found.append(
                    Box((*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))
                )
        offsets[dim], sizes[dim] = hole.offsets[dim], hole.sizes[dim]
    assert sum(math.prod(item.sizes) for item in found) == box.nelements - hole.nelements
    return found
