"""Read what another node's staging server holds: sealed segments, its own and replicas, committed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt.client.base import Client
from ckpt.digest import digest
from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.envelope import Kind, open_message
from ckpt.format.ids import CheckpointId
from ckpt.format.layout import LayoutSet
from ckpt.rpc.bulk import READ_SEGMENT, bulk_path
from ckpt.storage.scattered import PartsFiller
from ckpt_proto.v1 import disk_pb2, peer_pb2, peer_pb2_grpc

__all__ = ["PeerClient"]


class PeerClient(Client):
    """Asks one node. Thread-safe; every call has a deadline.

    Args:
        target: ``host:port``, or ``unix:/path``.
        token, ca: for TCP; see :func:`ckpt.rpc.channel.open_channel`.
        timeout_s: deadline of each call that names none, the whole stream included.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(target, token=token, ca=ca, timeout_s=timeout_s)
        self._stub = peer_pb2_grpc.PeerStub(self._connection.channel)  # type: ignore[no-untyped-call]
        self._read_segment: Callable[..., Any] = self._connection.channel.unary_stream(
            bulk_path(READ_SEGMENT)
        )

    @property
    def target(self) -> str:
        return self._connection.target

    def have(
        self,
        run_key: str,
        ident: CheckpointId | None = None,
        *,
        with_headers: bool = False,
        timeout_s: float | None = None,
    ) -> list[peer_pb2.HeldCheckpoint]:
        """Return what the node holds of a run (of one checkpoint).

        Raises:
            CkptError: the node cannot be asked, or cannot read its disk.
        """
        request = peer_pb2.HaveRequest(
            run_key=run_key, id=ident.to_proto() if ident else None, with_headers=with_headers
        )
        reply = self._connection.call(self._stub.Have, request, timeout_s=timeout_s)
        return list(reply.checkpoints)

    def segment(
        self, run_key: str, ident: CheckpointId, rank: int, *, timeout_s: float | None = None
    ) -> disk_pb2.SegmentIndex:
        """Return the index of a held segment, verified.

        Raises:
            NotFoundError: the node does not hold it.
            CorruptError: it is damaged, there or on the way, or another segment's.
            CkptError: the node cannot be asked.
        """
        return self._segment(run_key, ident, rank, with_layout=False, timeout_s=timeout_s)[0]

    def segment_layouts(self, run_key: str, ident: CheckpointId, rank: int) -> LayoutSet:
        """Return the layout set of a held segment. Raises as :meth:`segment`."""
        index, payload = self._segment(run_key, ident, rank, with_layout=True)
        if digest(payload) != index.layout_digest:
            raise CorruptError(
                "a peer sent another layout than the index names", code="identity", target=self.target
            )
        return LayoutSet.decode(payload)

    def sealed_segment(self, run_key: str, ident: CheckpointId, rank: int) -> tuple[bytes, bytes]:
        """Return index file, verified, and layout set of a held segment. Raises as :meth:`segment`."""
        reply = self._get_segment(run_key, ident, rank, with_layout=True)
        self._opened(reply.index, ident, rank)
        return reply.index, reply.layout

    def _segment(
        self,
        run_key: str,
        ident: CheckpointId,
        rank: int,
        *,
        with_layout: bool,
        timeout_s: float | None = None,
    ) -> tuple[disk_pb2.SegmentIndex, bytes]:
        reply = self._get_segment(run_key, ident, rank, with_layout=with_layout, timeout_s=timeout_s)
        return self._opened(reply.index, ident, rank), reply.layout

    def _get_segment(
        self,
        run_key: str,
        ident: CheckpointId,
        rank: int,
        *,
        with_layout: bool,
        timeout_s: float | None = None,
    ) -> peer_pb2.GetSegmentResponse:
        request = peer_pb2.GetSegmentRequest(
            run_key=run_key, id=ident.to_proto(), rank=rank, with_layout=with_layout
        )
        reply: peer_pb2.GetSegmentResponse = self._connection.call(
            self._stub.GetSegment, request, timeout_s=timeout_s
        )
        return reply

    def _opened(self, data: bytes, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex:
        """The index in an index file. Raises CorruptError, also for another segment's."""
        index = open_message(Kind.SEGMENT_INDEX, data, disk_pb2.SegmentIndex(), where=self.target)
        if (CheckpointId.from_proto(index.id), index.rank) != (ident, rank):
            raise CorruptError("a peer sent another segment's index", code="identity", target=self.target)
        return index

    def read_into(
        self,
        parts: Sequence[memoryview],
        run_key: str,
        ident: CheckpointId,
        rank: int,
        start: int,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Fill ``parts``, one after another, with a held segment's bytes from ``start`` on; at most 64 MiB.

        Returns:
            Their digest, which is compared with nothing here.

        Raises:
            NotFoundError: the node does not hold it.
            UnavailableError: the stream ended early, or the node cannot be asked.
            TimeoutExceededError: it took longer than ``timeout_s``.
        """
        nbytes = sum(map(len, parts))
        request = peer_pb2.ReadSegmentRequest(
            run_key=run_key, id=ident.to_proto(), rank=rank, start=start, nbytes=nbytes
        )
        stream: Iterator[bytes] = self._connection.stream(
            self._read_segment, request.SerializeToString(), timeout_s=timeout_s
        )
        filler = PartsFiller(parts)
        for frame in stream:  # to the end: only then has the call's status been seen
            try:
                filler.feed(frame)
            except ValueError as error:
                raise UnavailableError("a peer sent more than was asked for", target=self.target) from error
        if filler.nbytes != nbytes:
            raise UnavailableError("a peer's stream ended early", target=self.target, nbytes=filler.nbytes)
        return filler.digest()
