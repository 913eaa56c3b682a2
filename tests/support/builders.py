"""Small, valid, committed checkpoints in one call: real segments, indexes, group indexes and manifest."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt import dtypes
from ckpt.clock import random_bytes
from ckpt.digest import Buffer, digest
from ckpt.format.codec import encode_chunk
from ckpt.format.ids import CheckpointId, split_run_url
from ckpt.format.keys import group_key, segment_key
from ckpt.format.layout import LayoutSet, Mesh, Replicate, Shard, TensorLayout
from ckpt.format.manifest import encode_group_index, group_header
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.format.values import encode_value
from ckpt.ops.attempts import claim_attempt
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.groups import put_group_index, put_layout
from ckpt.ops.sweep import sweep
from ckpt.plan.save import plan_save
from ckpt.storage.base import ObjectInfo, Store
from ckpt.storage.memory import MemoryStore
from ckpt_proto.v1 import common_pb2, disk_pb2
from tests.support.layouts import read_region

__all__ = [
    "Built",
    "CountingStore",
    "FakeClock",
    "borrow",
    "build_checkpoint",
    "build_group_indexes",
    "build_segment",
    "claim",
    "group_ranks",
    "memory_store",
    "sample_layouts",
    "swept",
    "tensor_values",
]

_NUMPY = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


@dataclass(frozen=True)
class Built:
    """What :func:`build_checkpoint` made.

    Attributes:
        ident: its id.
        layouts: of every tensor.
        tensors: the global tensors, as unsigned integers of the same width: compare bits.
        world_size: number of ranks.
        segments: the segment indexes by rank, as published.
    """

    ident: CheckpointId
    layouts: LayoutSet
    tensors: Mapping[str, NDArray[Any]]
    world_size: int
    segments: Mapping[int, disk_pb2.SegmentIndex]


class FakeClock:
    """Time that moves only when somebody sleeps."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.time = now
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


class CountingStore:
    """Counts the requests that reach ``inner``; a listing counts once per 1000 keys, as on S3."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.requests: Counter[str] = Counter()
        self.read_bytes = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def reset(self) -> None:
        self.requests.clear()
        self.read_bytes = 0

    def _count(self, name: str, nbytes: int = 0) -> None:
        with self._lock:
            self.requests[name] += 1
            self.read_bytes += nbytes

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, data: Buffer) -> None:
        self._count("put")
        self.inner.put(key, data)

    def put_new(self, key: str, data: Buffer) -> None:
        self._count("put_new")
        self.inner.put_new(key, data)

    def put_parts(self, key: str, pieces: Iterable[Buffer], **sizes: int) -> None:
        self._count("put_parts")
        self.inner.put_parts(key, pieces, **sizes)

    def get(self, key: str) -> bytes:
        data = self.inner.get(key)
        self._count("get", len(data))
        return data

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        self._count("get_range", nbytes)
        return self.inner.get_range(key, start, nbytes)

    def head(self, key: str) -> ObjectInfo:
        self._count("head")
        return self.inner.head(key)

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        self._count("list")
        for i, info in enumerate(self.inner.list_keys(prefix, limit=limit)):
            if i and i % 1000 == 0:
                self._count("list")
            yield info

    def list_dirs(self, prefix: str) -> Iterator[str]:
        self._count("list")
        return self.inner.list_dirs(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._count("delete")
        self.inner.delete(keys)

    def probe_conditional(self) -> bool:
        return self.inner.probe_conditional()

    def close(self) -> None:
        self.inner.close()


def memory_store(run: str = "run") -> MemoryStore:
    """Return an empty store of its own."""
    return MemoryStore(f"memory://{random_bytes(8).hex()}/{run}")


def sample_layouts(world_size: int) -> LayoutSet:
    """Return layouts of a few tensors over all ranks: sharded (unevenly), replicated small and large, scalar,
    and of a dtype that safetensors cannot name."""
    mesh = Mesh.from_ranks((world_size,), ("dp",), range(world_size))
    return LayoutSet(
        [
            TensorLayout("model.weight", "float32", (13, 6), mesh, (Shard(0),)),
            TensorLayout("model.bias", "bfloat16", (13,), mesh, (Replicate(),)),
            TensorLayout("model.embedding", "bfloat16", (1031, 600), mesh, (Replicate(),)),
            TensorLayout("optimizer.step", "float32", (), mesh, (Replicate(),)),
            TensorLayout("optimizer.phase", "complex64", (5, 4), mesh, (Shard(1),)),
        ]
    )


def tensor_values(layout: TensorLayout, seed: int) -> NDArray[Any]:
    """Return the global tensor of a layout: random bits that follow from its name and ``seed``."""
    dtype = np.dtype(_NUMPY[dtypes.itemsize(layout.dtype)])
    count = int(np.prod(layout.global_shape, dtype=np.int64))
    random = np.random.default_rng([seed, *layout.name.encode()])
    return np.frombuffer(random.bytes(count * dtype.itemsize), dtype).reshape(layout.global_shape)


def group_ranks(world_size: int, group_size: int) -> list[list[int]]:
    """Return the ranks of each node group: ``group_size`` neighbours each."""
    return [list(range(i, min(i + group_size, world_size))) for i in range(0, world_size, group_size)]


def build_segment(layouts: LayoutSet, tensors: Mapping[str, NDArray[Any]], rank: int) -> bytearray:
    """Return the bytes of the segment of ``rank``."""
    plan = plan_save(layouts.values(), rank)
    data = bytearray(plan.nbytes)
    data[: len(plan.header)] = plan.header
    for array in plan.arrays:
        part = np.ascontiguousarray(read_region(tensors[array.name], array.region))
        data[array.start : array.start + array.nbytes] = part.tobytes()
    return data


def claim(store: Store, *, parent: CheckpointId | None = None, world_size: int = 2) -> int:
    """Start an attempt and return its number."""
    return claim_attempt(store, parent=parent, world_size=world_size, host="test", clock=FakeClock())


def build_checkpoint(
    store: Store,
    step: int,
    attempt: int = 1,
    *,
    world_size: int = 2,
    group_size: int = 1,
    layouts: LayoutSet | None = None,
    layouts_of: Callable[[int], LayoutSet] | None = None,
    seed: int | None = None,
    values: Mapping[str, NDArray[Any]] | None = None,
    parent: CheckpointId | None = None,
    state: object = None,
    state_of: Callable[[int], object] | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
    codec: int = disk_pb2.CODEC_RAW,
    groups: Sequence[int] | None = None,
    commit: bool = True,
    run_id: str = "",
) -> Built:
    """Write a whole checkpoint to ``store``, as the staging servers would, and commit it.

    Args:
        store: of the run.
        step, attempt: its id. No attempt record is written; see :func:`claim`.
        world_size, group_size: ranks, and ranks per node group.
        layouts: of all ranks; :func:`sample_layouts` by default.
        layouts_of: gives each rank its own layout set instead.
        seed: of the tensors' values; the step by default.
        values: bits of tensors that are given instead.
        parent: what the attempt resumed from.
        state: the plain state of every rank; ``{"step": step}`` by default.
        state_of: gives each rank its own plain state instead.
        chunk_nbytes: chunk size; small ones make many chunks of little data.
        codec: how to store chunks.
        groups: which group indexes to put; all by default.
        commit: whether to put the manifest.
        run_id: of the run's life; empty, as an older version leaves it.
    """
    ident = CheckpointId(step, attempt)
    common = layouts if layouts is not None else sample_layouts(world_size)
    of_rank = layouts_of or (lambda _: common)
    value_of = state_of or (lambda _: {"step": step} if state is None else state)
    all_layouts = {item.name: item for rank in range(world_size) for item in of_rank(rank).values()}
    tensors = {
        name: tensor_values(item, step if seed is None else seed) for name, item in all_layouts.items()
    }
    tensors |= values or {}
    partition = group_ranks(world_size, group_size)
    segments: dict[int, disk_pb2.SegmentIndex] = {}
    for number, ranks in enumerate(partition):
        for rank in ranks:
            index = disk_pb2.SegmentIndex(
                run=split_run_url(store.url)[1],
                run_id=run_id,
                id=ident.to_proto(),
                rank=rank,
                world_size=world_size,
                group=common_pb2.NodeGroup(index=number, count=len(partition), ranks=ranks),
                state=encode_value(value_of(rank)),
                rank_state=encode_value({"rng": rank}),
                captured_at=1_800_000_000.0 + step,
                environment={"ckpt": "test"},
                parent=parent.to_proto() if parent else None,
            )
            _write_segment(store, index, of_rank(rank), tensors, chunk_nbytes, codec)
            segments[rank] = index
        if groups is None or number in groups:
            put_group_index(store, [segments[rank] for rank in ranks])
    if commit:
        assert try_commit(store, ident, clock=FakeClock()).state is CommitState.COMMITTED
    return Built(ident, LayoutSet(all_layouts.values()), tensors, world_size, segments)


def _write_segment(
    store: Store,
    index: disk_pb2.SegmentIndex,
    layouts: LayoutSet,
    tensors: Mapping[str, NDArray[Any]],
    chunk_nbytes: int,
    codec: int,
) -> None:
    data = build_segment(layouts, tensors, index.rank)
    key = segment_key(CheckpointId.from_proto(index.id), index.rank)
    index.nbytes = len(data)
    index.layout_digest = put_layout(store, layouts)
    index.tensors.extend(plan_save(layouts.values(), index.rank).tensor_entries())
    table = index.chunks
    table.chunk_nbytes = chunk_nbytes
    table.object_keys.append(key)
    pieces = [memoryview(data)[i : i + chunk_nbytes] for i in range(0, len(data), chunk_nbytes)]
    table.digests = b"".join(map(digest, pieces))
    body = bytearray()
    for piece in pieces:
        used, stored = encode_chunk(codec, piece)
        if codec != disk_pb2.CODEC_RAW:
            table.codecs.append(used)
            table.offsets.append(len(body))
            table.stored_nbytes.append(len(stored))
        body += stored
    store.put_parts(key, [body], most_nbytes=len(body), part_nbytes=CHUNK_NBYTES, concurrency=1)


def build_group_indexes(
    store: Store,
    *,
    world_size: int,
    group_size: int,
    tensors: int,
    step: int = 1000,
    state_of: Callable[[int], object] = lambda _: None,
    groups: Sequence[int] | None = None,
) -> CheckpointId:
    """Put the layout and all group indexes of a big job without any tensor data; return what to commit.

    Args:
        store: of the run.
        world_size, group_size, tensors: how big.
        step: of the checkpoint.
        state_of: the plain state of each rank.
        groups: which group indexes to put; all by default.
    """
    ident = CheckpointId(step, 1)
    inner = 1 if world_size % 4 else 4
    mesh = Mesh.from_ranks((world_size // inner, inner), ("dp", "tp"), range(world_size))
    layouts = LayoutSet(
        TensorLayout(
            f"layers.{i}.w", "bfloat16", (8192, 8192), mesh, (Shard(0), Shard(1) if i % 2 else Replicate())
        )
        for i in range(tensors)
    )
    layout_digest = put_layout(store, layouts)
    partition = group_ranks(world_size, group_size)
    for number in range(len(partition)) if groups is None else groups:
        segments = [
            disk_pb2.SegmentIndex(
                run="run",
                id=ident.to_proto(),
                rank=rank,
                world_size=world_size,
                group=common_pb2.NodeGroup(index=number, count=len(partition), ranks=partition[number]),
                nbytes=1 << 30,
                layout_digest=layout_digest,
                chunks=disk_pb2.ChunkTable(
                    chunk_nbytes=8 << 20, digests=bytes(16 * 128), object_keys=[segment_key(ident, rank)]
                ),
                state=encode_value(state_of(rank)),
                captured_at=1.0,
            )
            for rank in partition[number]
        ]
        put_group_index(store, segments)
    return ident


def swept(store: Store, *, older_than_s: float, dry_run: bool = False, clock: FakeClock | None = None) -> int:
    """Sweep to the end; how many objects went."""
    found = sweep(store, older_than_s=older_than_s, dry_run=dry_run, clock=clock)
    return sum(one.objects for one in found)


def borrow(
    store: Store, step: int, source: CheckpointId, *, world_size: int = 2, layouts: LayoutSet | None = None
) -> CheckpointId:
    """Commit a checkpoint whose chunks all lie in the objects of ``source``."""
    built = build_checkpoint(
        store, step, seed=source.step, world_size=world_size, layouts=layouts, commit=False
    )
    segments = [built.segments[rank] for rank in sorted(built.segments)]
    for segment in segments:
        segment.chunks.object_keys[0] = segment_key(source, segment.rank)
        store.delete([segment_key(built.ident, segment.rank)])
        key = group_key(built.ident, segment.group.index, segment.group.count)
        store.put(key, encode_group_index(group_header([segment]), [segment]))
    assert try_commit(store, built.ident).state is CommitState.COMMITTED
    return built.ident
