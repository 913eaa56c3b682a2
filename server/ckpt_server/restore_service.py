"""The Restore service: segment indexes, and tensors and chunks as raw streams. Nothing leaves unverified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import grpc

from ckpt.dtypes import itemsize
from ckpt.errors import InvalidInputError, NotFoundError
from ckpt.format import keys
from ckpt.format.segment import chunk_range
from ckpt.geometry import Box
from ckpt.ops.catalog import naming_pruned
from ckpt.ops.fetch import fetch_tensor, read_verified_chunk
from ckpt.ops.tiers import Tier, node_tiers
from ckpt.rpc.bulk import frames
from ckpt.rpc.messages import parse_request
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2, restore_pb2, restore_pb2_grpc
from ckpt_server.checkpoints import Checkpoints

__all__ = ["RestoreService", "row_blocks"]

# Bytes of a tensor held at once; larger ones are read block by block.
_BLOCK_NBYTES = 64 * 1024 * 1024


class RestoreService(restore_pb2_grpc.RestoreServicer):
    """GetIndex and the raw methods ReadTensor and ReadChunks. Thread-safe."""

    def __init__(self, *, staging: StagingDir, checkpoints: Checkpoints) -> None:
        self._staging = staging
        self._checkpoints = checkpoints

    def GetIndex(
        self, request: restore_pb2.GetIndexRequest, context: grpc.ServicerContext
    ) -> restore_pb2.GetIndexResponse:
        checkpoint = self._checkpoints.find(request.url, request.checkpoint)
        return restore_pb2.GetIndexResponse(
            id=checkpoint.ident.to_proto(),
            segments=[checkpoint.segment_index(rank) for rank in request.ranks],
        )

    def read_tensor(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The raw method ReadTensor (see staging.proto)."""
        request = parse_request(restore_pb2.ReadTensorRequest(), data)
        checkpoint = self._checkpoints.find(request.url, request.checkpoint)
        layout = checkpoint.layouts.get(request.name)
        if layout is None:
            raise NotFoundError(
                "checkpoint has no such tensor",
                code="tensor",
                checkpoint=checkpoint.ident,
                tensor=request.name,
            )
        shape = tuple(layout.global_shape)
        box = _box(request.box, shape) if request.HasField("box") else Box((0,) * len(shape), shape)
        size = itemsize(layout.dtype)
        tiers = self._tiers(request.url)
        yield restore_pb2.ReadTensorHeader(
            id=checkpoint.ident.to_proto(),
            dtype=layout.dtype,
            shape=box.sizes,
            global_shape=shape,
            nbytes=box.nelements * size,
        ).SerializeToString()
        for block in row_blocks(box, max(1, _BLOCK_NBYTES // size)):
            with naming_pruned(checkpoint.store, checkpoint.ident):
                _, _, content = fetch_tensor(checkpoint, request.name, block, tiers=tiers)
            yield from frames(content)

    def read_chunks(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The raw method ReadChunks (see staging.proto)."""
        request = parse_request(restore_pb2.ReadChunksRequest(), data)
        checkpoint = self._checkpoints.find(request.url, request.checkpoint)
        with naming_pruned(checkpoint.store, checkpoint.ident):
            index = checkpoint.segment_index(request.rank)
        yield restore_pb2.ReadChunksHeader(
            id=checkpoint.ident.to_proto(), nbytes=[_chunk_nbytes(index, chunk) for chunk in request.chunks]
        ).SerializeToString()
        tiers = self._tiers(request.url)
        for chunk in request.chunks:
            with naming_pruned(checkpoint.store, checkpoint.ident):
                content = read_verified_chunk(checkpoint, request.rank, chunk, tiers=tiers)
            yield from frames(content)

    def _tiers(self, url: str) -> Sequence[Tier]:
        """This node's copies come first, also of a run that it only reads."""
        return node_tiers(self._staging, keys.run_key(url))


def row_blocks(box: Box, most: int) -> Iterator[Box]:
    """Cut ``box`` into boxes of at most ``most`` elements that in turn are its row-major order."""
    if box.is_empty:
        return
    if box.nelements <= most:
        yield box
        return
    dim = next(d for d, n in enumerate(box.sizes) if n > 1)
    rows = max(1, most // math.prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(rows, box.sizes[dim] - start)
        yield from row_blocks(Box(tuple(offsets), tuple(sizes)), most)


def _box(message: disk_pb2.BoxRecord, shape: tuple[int, ...]) -> Box:
    offsets, sizes = tuple(message.offsets), tuple(message.sizes)
    fits = len(offsets) == len(sizes) == len(shape) and all(
        start + size <= extent for start, size, extent in zip(offsets, sizes, shape, strict=True)
    )
    if not fits:
        raise InvalidInputError(
            "the box is not inside the tensor", code="box", offsets=offsets, sizes=sizes, shape=shape
        )
    return Box(offsets, sizes)


def _chunk_nbytes(index: disk_pb2.SegmentIndex, chunk: int) -> int:
    start, stop = chunk_range(chunk, index.nbytes, index.chunks.chunk_nbytes)
    return stop - start
