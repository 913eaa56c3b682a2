"""What a save takes of the live state: tensors, each with what is to be known of it, and plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ckpt.format.segment import Change
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.layout import Placed

__all__ = ["FlatState", "Leaf", "LeafKind", "leaf_kind"]


class Leaf(NamedTuple):
    """One tensor to store. A tuple: a save makes one per tensor on the training thread.

    Attributes:
        placed: its layout (which carries the name) and this rank's local part, not copied.
        deferred: only an optimizer step may change it, so the copy may run until the next one.
        agreed: its replicas have to be equal. Not so for buffers: running statistics differ by design.
        change: how often it is expected to differ from one save to the next; decides where it is stored.
    """

    placed: Placed
    deferred: bool
    agreed: bool = True
    change: Change = Change.ALWAYS


@dataclass(slots=True)
class FlatState:
    """Everything to store of one step, still aliasing live tensors.

    Attributes:
        leaves: in flattening order; no name twice.
        values: the same on every rank.
        rank_values: of this rank alone.
    """

    leaves: list[Leaf] = field(default_factory=list)
    values: common_pb2.Value = field(default_factory=common_pb2.Value)
    rank_values: common_pb2.Value = field(default_factory=common_pb2.Value)


class LeafKind(NamedTuple):
    """What a leaf of a module is beside its tensor; see :class:`Leaf`."""

    deferred: bool
    agreed: bool
    change: Change


def leaf_kind(parameter: torch.Tensor | None, *, deferrable: bool) -> LeafKind:
    """Return the kind of a module's leaf, given its parameter; None: it is a buffer."""
    if parameter is None:
        return _BUFFER
    change = Change.ALWAYS if parameter.requires_grad else Change.SELDOM
    return LeafKind(deferrable, True, change)


_BUFFER = LeafKind(deferred=False, agreed=False, change=Change.UNKNOWN)
