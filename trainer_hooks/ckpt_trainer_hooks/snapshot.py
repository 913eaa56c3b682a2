"""From live tensors into the arena: offsets kept from save to save, one copy, torn copies found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt.collector import collector_paused
from ckpt.errors import SnapshotTornError
from ckpt.format.layout import LayoutSet, TensorLayout
from ckpt.format.segment import Change
from ckpt.plan.save import SavePlan, StoredArray, plan_save
from ckpt_proto.v1 import disk_pb2
from ckpt_trainer_hooks.arena import Arena
from ckpt_trainer_hooks.compat import version_of
from ckpt_trainer_hooks.copying import copy_tensors
from ckpt_trainer_hooks.elements import movable
from ckpt_trainer_hooks.layout import torch_dtype
from ckpt_trainer_hooks.leaves import Leaf

__all__ = ["Binding", "Copies", "SnapshotPlan", "plan_snapshot"]


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Where each leaf goes; valid as long as the leaves have these very layouts and none is frozen or thawed.

    Attributes:
        layouts: one per leaf, in flattening order; with ``changes`` the fingerprint.
        changes: how often each leaf is expected to change.
        save: arrays and their byte ranges in the segment.
        layout_bytes: the LayoutSet, serialized.
        layout_digest: xxh3-128 of it.
        constant_index: serialized SegmentIndex fields that do not change from save to save.
    """

    layouts: tuple[TensorLayout, ...]
    changes: tuple[Change, ...]
    save: SavePlan
    layout_bytes: bytes
    layout_digest: bytes
    constant_index: bytes

    def fits(self, leaves: Sequence[Leaf]) -> bool:
        """Return whether the plan is still right: layouts are compared by identity, they are remembered."""
        return len(leaves) == len(self.layouts) and all(
            leaf.placed.layout is layout and leaf.change is change
            for leaf, layout, change in zip(leaves, self.layouts, self.changes, strict=True)
        )


@collector_paused()
def plan_snapshot(leaves: Sequence[Leaf], rank: int) -> SnapshotPlan:
    """Plan locally, by arithmetic; no other rank is asked. Takes some 10 us per tensor."""
    layouts = tuple(leaf.placed.layout for leaf in leaves)
    changes = tuple(leaf.change for leaf in leaves)
    save = plan_save(
        layouts, rank, {layout.name: change for layout, change in zip(layouts, changes, strict=True)}
    )
    layout_set = LayoutSet(layouts)
    index = disk_pb2.SegmentIndex(
        rank=rank, nbytes=save.nbytes, layout_digest=layout_set.digest, tensors=save.tensor_entries()
    )
    return SnapshotPlan(
        layouts=layouts,
        changes=changes,
        save=save,
        layout_bytes=layout_set.encode(),
        layout_digest=layout_set.digest,
        constant_index=index.SerializeToString(),
    )


@dataclass(frozen=True, slots=True)
class _Target:
    """One array of the arena and the part of the leaf that goes there."""

    name: str
    array: torch.Tensor
    shape: torch.Size
    start: tuple[int, ...]


@dataclass(slots=True)
class Copies:
    """The copies of one snapshot: destination and source of each, still to be made.

    Attributes:
        names: of the tensors, for messages.
        targets: views of the arena.
        sources: views of live tensors.
        watched: the live local tensors, whose version counters tell whether they changed.
        versions: their counters when the snapshot was asked for.
    """

    names: list[str]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    watched: list[torch.Tensor]
    versions: list[int]

    @property
    def nbytes(self) -> int:
        return sum(target.numel() * target.element_size() for target in self.targets)

    def run(self, *, threads: int = 1) -> None:
        """Make the copies, on so many threads. Releases the GIL meanwhile; on CUDA only enqueues them."""
        copy_tensors(self.targets, self.sources, threads=threads)

    def check_unchanged(self) -> None:
        """Raise SnapshotTornError if a source was modified since the snapshot was asked for."""
        changed = [
            name
            for name, tensor, version in zip(self.names, self.watched, self.versions, strict=True)
            if version_of(tensor) != version
        ]
        if changed:
            raise SnapshotTornError(
                "tensors were modified while the snapshot was copied; it was thrown away. Modify parameters "
                "only inside optimizer.step(), or hold manager.lock() around the edit",
                tensors=changed,
            )


class Binding:
    """The arrays of a plan as tensors over an arena; writes the segment's header into it once."""

    @collector_paused()
    def __init__(self, plan: SnapshotPlan, arena: Arena) -> None:
        self.plan = plan
        self.arena = arena
        flat = torch.frombuffer(arena.view, dtype=torch.uint8)
        header = torch.frombuffer(bytearray(plan.save.header), dtype=torch.uint8)
        flat[: header.numel()].copy_(header)
        targets = {array.name: _target(flat, array) for array in plan.save.arrays}
        # By place in the plan; None: another replica stores it.
        self._targets = [targets.get(layout.name) for layout in plan.layouts]

    @collector_paused()
    def copies(self, leaves: Sequence[Leaf]) -> tuple[Copies, Copies]:
        """Return what must be copied at once, and what may be copied until the next optimizer step.

        Args:
            leaves: of the plan, in its order; with their versions as of now.
        """
        found = Copies([], [], [], [], []), Copies([], [], [], [], [])
        for target, leaf in zip(self._targets, leaves, strict=True):
            if target is None:
                continue
            local = leaf.placed.local
            copies = found[leaf.deferred]
            copies.names.append(target.name)
            copies.targets.append(target.array)
            copies.sources.append(_part(local, target))
            copies.watched.append(local)
            copies.versions.append(version_of(local))
        return found


def _target(flat: torch.Tensor, array: StoredArray) -> _Target:
    view = flat[array.start : array.start + array.nbytes].view(torch_dtype(array.dtype)).view(array.shape)
    return _Target(array.name, movable(view), view.shape, array.local_start)


def _part(source: torch.Tensor, target: _Target) -> torch.Tensor:
    part = source if source.dtype is target.array.dtype else movable(source)
    if part.shape == target.shape:
        return part
    for dim, (start, size) in enumerate(zip(target.start, target.array.shape, strict=True)):
        if size != part.shape[dim]:
            part = part.narrow(dim, start, size)
    return part
