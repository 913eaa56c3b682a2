"""Where a repair looks for good bytes: what nodes hold of a run beside the object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId
from ckpt.ops.holdings import read_held_layout
from ckpt.ops.tiers import Tier, node_tiers
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2

__all__ = ["Copies", "NodeCopies"]


class Copies(Protocol):
    """Copies of a run's segments and layouts. Nothing here is trusted: the caller compares digests."""

    def tiers(self, ident: CheckpointId) -> Sequence[Tier]:
        """Where segments of ``ident`` may be, nearest first."""

    def layout(self, ident: CheckpointId, rank: int, layout_digest: bytes) -> bytes | None:
        """The bytes of a layout set that ``rank`` was saved under, or None where nobody has it."""

    def record(self, ident: CheckpointId, rank: int) -> disk_pb2.UploadRecord | None:
        """How the segment was laid out in the store, or None where nobody knows."""


class NodeCopies:
    """What one node has itself: its sealed segments, and its replicas of other nodes'.

    Args:
        staging: of the node.
        run_key: the run's folder in it.
    """

    def __init__(self, staging: StagingDir, run_key: str) -> None:
        self.staging = staging
        self.run_key = run_key

    @property
    def places(self) -> tuple[StagingDir, StagingDir]:
        return self.staging, replicas_dir(self.staging)

    def tiers(self, ident: CheckpointId) -> Sequence[Tier]:
        del ident
        return node_tiers(self.staging, self.run_key)

    def layout(self, ident: CheckpointId, rank: int, layout_digest: bytes) -> bytes | None:
        del ident, rank
        try:
            return read_held_layout(self.staging, self.run_key, layout_digest)
        except CkptError:
            return None

    def record(self, ident: CheckpointId, rank: int) -> disk_pb2.UploadRecord | None:
        for place in self.places:
            try:
                found = place.read_uploaded(self.run_key, ident, rank)
            except CkptError:
                continue
            if found is not None:
                return found
        return None
