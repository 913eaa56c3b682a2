"""Read committed checkpoints through a server, from any program; needs neither torch nor the store.

with RestoreClient("unix:/run/ckpt/server.sock") as client:
    weight = client.read_tensor("s3://bucket/run", "model.layers.0.weight").numpy()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt.client.base import Client
from ckpt.dtypes import itemsize
from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.limits import MAX_CHUNK_NBYTES, bounded_product
from ckpt.format.tensor_data import TensorData
from ckpt.geometry import Box
from ckpt.rpc.bulk import READ_CHUNKS, READ_TENSOR, bulk_path
from ckpt.rpc.messages import parse_reply
from ckpt_proto.v1 import disk_pb2, restore_pb2, restore_pb2_grpc

__all__ = ["RestoreClient", "TensorData", "room_for"]


class RestoreClient(Client):
    """Reads tensors, segment indexes and chunks. Thread-safe; every call has a deadline.

    Args:
        target: ``unix:/path`` or ``host:port``.
        token, ca: for TCP; see :func:`ckpt.rpc.channel.open_channel`.
        timeout_s: deadline of each call, the whole stream included.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 600.0
    ) -> None:
        super().__init__(target, token=token, ca=ca, timeout_s=timeout_s)
        self._stub = restore_pb2_grpc.RestoreStub(self._connection.channel)  # type: ignore[no-untyped-call]
        self._read_tensor: Callable[..., Any] = self._connection.channel.unary_stream(bulk_path(READ_TENSOR))
        self._read_chunks: Callable[..., Any] = self._connection.channel.unary_stream(bulk_path(READ_CHUNKS))

    def read_tensor(
        self, url: str, name: str, *, checkpoint: str = "latest", box: Box | None = None
    ) -> TensorData:
        """Read one tensor, or the part ``box`` (global coordinates) of it; the server verifies every byte.

        Args:
            url: of the run.
            name: FQN.
            checkpoint: "latest", a step, or a full id.
            box: None for the whole tensor.

        Raises:
            NotFoundError: no such checkpoint or tensor.
            InvalidInputError: the box is not inside the tensor.
            CorruptError: no copy of the data is undamaged.
            UnavailableError: server or store cannot be reached.
        """
        request = restore_pb2.ReadTensorRequest(url=url, checkpoint=checkpoint, name=name)
        if box is not None:
            request.box.CopyFrom(disk_pb2.BoxRecord(offsets=box.offsets, sizes=box.sizes))
        stream = self._connection.stream(self._read_tensor, request.SerializeToString())
        header = parse_reply(restore_pb2.ReadTensorHeader(), _first(stream))
        data = room_for(header)
        _fill(memoryview(data), stream)
        return TensorData(
            ident=CheckpointId.from_proto(header.id),
            dtype=header.dtype,
            shape=tuple(header.shape),
            global_shape=tuple(header.global_shape),
            data=data,
        )

    def read_chunks(
        self, url: str, rank: int, chunks: Sequence[int], *, checkpoint: str = "latest"
    ) -> Iterator[bytearray]:
        """Yield the raw bytes of ``chunks`` (ascending) of a rank's segment, verified by the server.

        Raises:
            CkptError: as :meth:`read_tensor`.
        """
        request = restore_pb2.ReadChunksRequest(url=url, checkpoint=checkpoint, rank=rank, chunks=chunks)
        stream = self._connection.stream(self._read_chunks, request.SerializeToString())
        header = parse_reply(restore_pb2.ReadChunksHeader(), _first(stream))
        if max(header.nbytes, default=0) > MAX_CHUNK_NBYTES or len(header.nbytes) != len(chunks):
            raise CorruptError("the server announced other chunks than were asked for", code="decode")
        rest: bytes = b""
        for nbytes in header.nbytes:
            data = bytearray(nbytes)
            rest = _fill_some(memoryview(data), rest, stream)
            yield data

    def segment_indexes(
        self, url: str, ranks: Sequence[int], *, checkpoint: str = "latest"
    ) -> tuple[CheckpointId, list[disk_pb2.SegmentIndex]]:
        """Return the checkpoint and the segment indexes of ``ranks``. Raises as :meth:`read_tensor`."""
        reply = self._connection.call(
            self._stub.GetIndex, restore_pb2.GetIndexRequest(url=url, checkpoint=checkpoint, ranks=ranks)
        )
        return CheckpointId.from_proto(reply.id), list(reply.segments)


def room_for(header: restore_pb2.ReadTensorHeader) -> bytearray:
    """Memory for the tensor that a server announced; touched only as its bytes arrive."""
    count = bounded_product((*header.shape, itemsize(header.dtype)))
    if count != header.nbytes:
        raise CorruptError("the server announced another size than the shape has", code="decode")
    try:
        return bytearray(count)
    except MemoryError as error:
        raise UnavailableError("no memory for the tensor", code="no-memory", nbytes=count) from error


def _first(stream: Iterator[bytes]) -> bytes:
    message = next(stream, None)
    if message is None:
        raise UnavailableError("the server sent nothing", code="cut")
    return message


def _fill(view: memoryview, stream: Iterator[bytes]) -> None:
    if _fill_some(view, b"", stream):
        raise UnavailableError("the server sent more than it announced", code="cut")
    # To the end: only then has the call's status been seen.
    if next(stream, None) is not None:
        raise UnavailableError("the server sent more than it announced", code="cut")


def _fill_some(view: memoryview, rest: bytes, stream: Iterator[bytes]) -> bytes:
    """Fill ``view`` from ``rest`` and the stream; return what is left of the last message."""
    done = 0
    while done < len(view):
        piece = rest or next(stream, None)
        if piece is None:
            raise UnavailableError("the stream ended early", code="cut", nbytes=done, expected=len(view))
        count = min(len(piece), len(view) - done)
        view[done : done + count] = piece[:count]
        rest = piece[count:]
        done += count
    return rest
