"""Snapshots of made-up tensors, laid into an arena the way a trainer does it, without torch."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from ckpt.format.ids import CheckpointId
from ckpt.format.layout import LayoutSet, Mesh, Replicate, Shard, TensorLayout
from ckpt.plan.save import plan_save
from ckpt_proto.v1 import common_pb2, disk_pb2, flusher_pb2
from ckpt_trainer_hooks.arena import Arena, arena_nbytes

RUN_URL = "file:///nowhere/run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One rank's snapshot.

    Attributes:
        image: the segment's bytes.
        index: SegmentIndex without chunks.
        layout: serialized LayoutSet.
        layout_digest: of it.
    """

    image: bytes
    index: disk_pb2.SegmentIndex
    layout: bytes
    layout_digest: bytes

    @property
    def ident(self) -> CheckpointId:
        return CheckpointId.from_proto(self.index.id)

    def into(self, arena: Arena, *, sequence: int = 1) -> flusher_pb2.Flush:
        """Copy the snapshot into ``arena`` and return the message that hands it over."""
        arena.view[: len(self.image)] = self.image
        tail = arena.write_tail(len(self.image), self.index.SerializeToString(), self.layout)
        return flusher_pb2.Flush(
            sequence=sequence,
            id=self.index.id,
            rank=self.index.rank,
            segment_nbytes=len(self.image),
            index_offset=tail.index_offset,
            index_nbytes=tail.index_nbytes,
            layout_offset=tail.layout_offset,
            layout_nbytes=tail.layout_nbytes,
            layout_digest=self.layout_digest,
        )

    def new_arena(self) -> Arena:
        return Arena(arena_nbytes(len(self.image), len(self.index.SerializeToString()), len(self.layout)))


def make_snapshot(
    *, step: int = 1, attempt: int = 1, rank: int = 0, rows: int = 1000, seed: int = 7, run: str = "run"
) -> Snapshot:
    """Return a snapshot of a world of one rank: a float32 matrix (rows, 1024) and an int64 scalar."""
    mesh = Mesh.from_ranks((1,), (), [rank])
    layouts = LayoutSet(
        [
            TensorLayout("weight", "float32", (rows, 1024), mesh, (Shard(0),)),
            TensorLayout("step", "int64", (), mesh, (Replicate(),)),
        ]
    )
    plan = plan_save(layouts.values(), rank)
    data = random.Random(seed).randbytes(plan.nbytes - len(plan.header))
    index = disk_pb2.SegmentIndex(
        run=run,
        id=common_pb2.CheckpointId(step=step, attempt=attempt),
        rank=rank,
        world_size=1,
        group=common_pb2.NodeGroup(index=0, count=1, ranks=[rank]),
        nbytes=plan.nbytes,
        layout_digest=layouts.digest,
        tensors=plan.tensor_entries(),
        captured_at=time.time(),
    )
    return Snapshot(
        image=plan.header + data, index=index, layout=layouts.encode(), layout_digest=layouts.digest
    )
