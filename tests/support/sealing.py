"""Sealed segments without a trainer: made-up tensors, laid into a staging directory in the seal's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckpt.digest import digest
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import segment_key
from ckpt.format.layout import LayoutSet, Mesh, Shard, TensorLayout
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.format.values import encode_value
from ckpt.ops.groups import read_layout
from ckpt.plan.save import plan_save
from ckpt.storage.base import Store
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import common_pb2, disk_pb2
from tests.support.builders import Built

__all__ = ["World", "make_world", "seal", "seal_copy", "segment_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Global tensors and how they are split.

    Attributes:
        tensors: whole tensors by name.
        layouts: of them.
        groups: ranks of each node.
    """

    tensors: Mapping[str, NDArray[np.generic]]
    layouts: LayoutSet
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(len(ranks) for ranks in self.groups)


def make_world(
    *, rows: int = 64, columns: int = 512, groups: Sequence[Sequence[int]] = ((0, 1),), seed: int = 1
) -> World:
    """A float32 matrix ``weight`` (rows, columns) and an int64 vector ``order`` (rows), sharded by row."""
    random = np.random.default_rng(seed)
    size = sum(len(ranks) for ranks in groups)
    mesh = Mesh.from_ranks((size,), ("dp",), list(range(size)))
    tensors: dict[str, NDArray[np.generic]] = {
        "weight": random.standard_normal((rows, columns), dtype=np.float32),
        "order": random.integers(0, 1 << 60, rows),
    }
    layouts = LayoutSet(
        [
            TensorLayout(name, str(array.dtype), array.shape, mesh, (Shard(0),))
            for name, array in tensors.items()
        ]
    )
    return World(tensors=tensors, layouts=layouts, groups=tuple(tuple(ranks) for ranks in groups))


def segment_bytes(world: World, rank: int) -> tuple[bytes, list[disk_pb2.TensorEntry]]:
    """The segment file of ``rank`` and its tensor entries."""
    plan = plan_save(world.layouts.values(), rank)
    image = bytearray(plan.nbytes)
    image[: len(plan.header)] = plan.header
    for array in plan.arrays:
        (box, _), *more = array.region.boxes()
        assert not more
        data = np.ascontiguousarray(world.tensors[array.name][box.slices()]).tobytes()
        image[array.start : array.start + array.nbytes] = data
    return bytes(image), plan.tensor_entries()


def seal(
    staging: StagingDir,
    run_key: str,
    ident: CheckpointId,
    world: World,
    rank: int,
    *,
    parent: CheckpointId | None = None,
    state: object = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    run_id: str = "",
) -> None:
    """Seal the segment of ``rank``: bytes, layout, then the index; ``state`` is its plain state, if any."""
    image, entries = segment_bytes(world, rank)
    number = next(i for i, ranks in enumerate(world.groups) if rank in ranks)
    chunks = [image[start : start + chunk_nbytes] for start in range(0, len(image), chunk_nbytes)]
    index = disk_pb2.SegmentIndex(
        run=run_key.rpartition("-")[0],
        run_id=run_id,
        id=ident.to_proto(),
        rank=rank,
        world_size=world.size,
        group=common_pb2.NodeGroup(index=number, count=len(world.groups), ranks=world.groups[number]),
        nbytes=len(image),
        layout_digest=world.layouts.digest,
        tensors=entries,
        chunks=disk_pb2.ChunkTable(
            chunk_nbytes=chunk_nbytes, digests=b"".join(digest(chunk) for chunk in chunks)
        ),
        captured_at=1_700_000_000.0 + ident.step,
        environment={"torch": "2.13"},
    )
    if parent is not None:
        index.parent.CopyFrom(parent.to_proto())
    if state is not None:
        index.state.CopyFrom(encode_value(state))
    staging.make_checkpoint_dir(run_key, ident)
    staging.segment_path(run_key, ident, rank).write_bytes(image)
    staging.write_layout(run_key, world.layouts.digest, world.layouts.encode())
    staging.write_index(run_key, ident, rank, index)


def seal_copy(staging: StagingDir, run_key: str, store: Store, built: Built, ranks: Iterable[int]) -> None:
    """Lay the segments of ``ranks`` of a committed checkpoint into ``staging``, as their node sealed them."""
    for rank in ranks:
        index = disk_pb2.SegmentIndex()
        index.CopyFrom(built.segments[rank])
        del index.chunks.object_keys[:]
        staging.make_checkpoint_dir(run_key, built.ident)
        path = staging.segment_path(run_key, built.ident, rank)
        path.write_bytes(store.get(segment_key(built.ident, rank)))
        layouts = read_layout(store, index.layout_digest)
        staging.write_layout(run_key, layouts.digest, layouts.encode())
        staging.write_index(run_key, built.ident, rank, index)
