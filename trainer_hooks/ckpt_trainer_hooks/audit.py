"""The trainer's part of the replica audit: digests of live tensors, taken while they may not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from ckpt.format.audit import AUDIT_DIGEST_NBYTES, audited_stripe
from ckpt.format.layout import replication
from ckpt_proto.v1 import disk_pb2
from ckpt_trainer_hooks.arena import Arena
from ckpt_trainer_hooks.leaves import Leaf
from ckpt_trainer_hooks.snapshot import SnapshotPlan

__all__ = ["Audit"]


@dataclass(frozen=True, slots=True)
class _Look:
    """A part of a live tensor to digest; ``position`` is that of its name in the LayoutSet."""

    position: int
    part: torch.Tensor


class Audit:
    """Digests of one audited snapshot, of every tensor whose replicas have to be equal: parameters, optimizer
    state, tensors in plain values. What may be copied later is digested in :meth:`run`, the rest at once.

    Args:
        plan: of the snapshot.
        leaves: it is taken of; views of them are kept until :meth:`run`.
        rank: global rank.
        shift: which replica to compare with; the same on every rank.
    """

    def __init__(self, plan: SnapshotPlan, leaves: Sequence[Leaf], rank: int, shift: int) -> None:
        names = sorted(layout.name for layout in plan.layouts)
        positions = {name: position for position, name in enumerate(names)}
        self._size = len(names) * AUDIT_DIGEST_NBYTES
        self._shift = shift
        self._own: list[tuple[int, int, int]] = []
        self._looks: list[_Look] = []
        self._seen: list[tuple[int, int]] = []
        stored = {array.name: array for array in plan.save.arrays}
        for leaf in leaves:
            layout, local = leaf.placed.layout, leaf.placed.local
            if not leaf.agreed or local.is_cuda or layout.mesh.coord_of(rank) is None:
                continue
            array = stored.get(layout.name)
            if array is not None and replication(layout, rank)[0] > 1:
                self._own.append((positions[layout.name], array.start, array.nbytes))
            stripe = audited_stripe(layout, rank, shift)
            if stripe is not None:
                part = local
                for dim, (start, size) in enumerate(
                    zip(stripe.local_start, stripe.region.shape, strict=True)
                ):
                    part = part.narrow(dim, start, size)
                look = _Look(positions[layout.name], part)
                if leaf.deferred:
                    self._looks.append(look)
                else:
                    self._seen.append((look.position, _digest(part)))

    def placeholder(self) -> bytes:
        """A serialized SegmentIndex with this audit only, of the length that :meth:`run` will return."""
        return self._serialized(bytes(self._size), bytes(self._size))

    def run(self, arena: Arena) -> bytes:
        """Digest what was copied and what is compared; call between the copy and the next optimizer step."""
        own, other = bytearray(self._size), bytearray(self._size)
        for position, start, nbytes in self._own:
            _put(own, position, xxhash.xxh3_64_intdigest(arena.view[start : start + nbytes]))
        for position, value in self._seen:
            _put(other, position, value)
        for look in self._looks:
            _put(other, look.position, _digest(look.part))
        self._looks.clear()
        return self._serialized(bytes(own), bytes(other))

    def _serialized(self, own: bytes, other: bytes) -> bytes:
        audit = disk_pb2.ReplicaAudit(shift=self._shift, own=own, other=other)
        return disk_pb2.SegmentIndex(audit=audit).SerializeToString()


def _digest(part: torch.Tensor) -> int:
    raw = part.contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(raw.data)


def _put(table: bytearray, position: int, value: int) -> None:
    start = position * AUDIT_DIGEST_NBYTES
    table[start : start + AUDIT_DIGEST_NBYTES] = (value or 1).to_bytes(AUDIT_DIGEST_NBYTES, "little")
