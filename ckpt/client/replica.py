"""Typed client of the Replica service of another node's server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckpt.client.base import Client
from ckpt.errors import CkptError, CorruptError
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.format.segment import chunk_range
from ckpt.rpc.bulk import FRAME_NBYTES, REPLICATE, bulk_path
from ckpt.rpc.messages import parse_reply
from ckpt.rpc.throttle import Throttle
from ckpt.storage.staging import RunConfig, StagingDir, os_errors
from ckpt_proto.v1 import replica_pb2, replica_pb2_grpc

__all__ = ["ReplicaClient"]

# Chunks per call: a connection that breaks costs a new call, not the deadline of a whole segment.
_CHUNKS_PER_CALL = 16
_CALL_S = 60.0
_SLOWEST_BYTES_PER_S = 4e6  # a link below this is called broken
_ROUNDS = 3  # how often a chunk is sent that the other side finds damaged


class ReplicaClient(Client):
    """Sends replicas to one other node. Thread-safe; every call has a deadline.

    Args:
        target: ``host:port``.
        token, ca: see :func:`ckpt.rpc.channel.open_channel`.
        timeout_s: deadline of a call that carries no bulk.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 10.0
    ) -> None:
        super().__init__(target, token=token, ca=ca, timeout_s=timeout_s)
        self._stub = replica_pb2_grpc.ReplicaStub(self._connection.channel)  # type: ignore[no-untyped-call]
        self._replicate: Callable[..., bytes] = self._connection.channel.stream_unary(bulk_path(REPLICATE))

    def greet(
        self, run_key: str, caller: PeerNode, *, committed: Sequence[CheckpointId] = (), ended: bool = False
    ) -> replica_pb2.GreetResponse:
        """Exchange signs of life, and learn which segments of ``caller`` are held there.

        Args:
            run_key: of the run.
            caller: the calling node, with its newest address.
            committed: steps that the caller knows to be committed.
            ended: the run has ended in order on the caller's node.

        Raises:
            UnavailableError, TimeoutExceededError: nobody answers.
        """
        request = replica_pb2.GreetRequest(
            run_key=run_key,
            caller=caller.to_proto(),
            committed=[ident.to_proto() for ident in committed],
            ended=ended,
        )
        reply: replica_pb2.GreetResponse = self._connection.call(self._stub.Greet, request)
        return reply

    def send_segment(
        self,
        staging: StagingDir,
        run_key: str,
        ident: CheckpointId,
        rank: int,
        *,
        config: RunConfig,
        owner: PeerNode,
        throttle: Throttle,
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> int:
        """Have the other node keep a replica of a sealed segment; returns the bytes sent.

        Only chunks that are lacking there travel, so it may be repeated after any error and goes on where it
        was. When it returns, the replica is sealed there. ``on_bytes`` is called with the size of each frame.

        Raises:
            CorruptError: the other side keeps finding what is on this disk damaged.
            ConflictError: other bytes are sealed there under this name.
            UnavailableError: nobody answers, or there is no room (code "no-space").
        """
        index = staging.read_index(run_key, ident, rank)
        offer = replica_pb2.OfferRequest(
            config=config.to_proto(),
            owner=owner.to_proto(),
            id=ident.to_proto(),
            rank=rank,
            index=staging.read_index_bytes(run_key, ident, rank),
            layout=staging.layout(run_key, index.layout_digest),
        )
        del offer.config.peers[:]
        wanted = self.offer(offer)
        path = staging.segment_path(run_key, ident, rank)
        sent = damaged = 0
        while wanted:
            header = replica_pb2.ReplicateHeader(
                run_key=run_key, id=ident.to_proto(), rank=rank, chunks=wanted[:_CHUNKS_PER_CALL]
            )
            spans = [chunk_range(chunk, index.nbytes, index.chunks.chunk_nbytes) for chunk in header.chunks]
            try:
                wanted = self._send(header, path, spans, throttle, on_bytes)
                sent += sum(stop - start for start, stop in spans)
            except CorruptError:
                damaged += 1
                if damaged >= _ROUNDS:
                    raise
                wanted = self.offer(offer)  # what arrived well before the damage is not sent again
        return sent

    def offer(self, offer: replica_pb2.OfferRequest) -> list[int]:
        """Offer a segment; returns the chunks that are lacking, none where it is sealed there.

        Raises:
            ConflictError: other bytes are sealed there under this name.
            UnavailableError: nobody answers, or there is no room (code "no-space").
        """
        return list(self._connection.call(self._stub.Offer, offer).wanted_chunks)

    def send_chunk(
        self, run_key: str, ident: CheckpointId, rank: int, chunk: int, data: memoryview
    ) -> list[int]:
        """Send one chunk of a segment that was offered; returns those still lacking, none: it is sealed.

        Raises:
            CorruptError: the other side finds it damaged.
            UnavailableError: the stream broke.
        """
        header = replica_pb2.ReplicateHeader(run_key=run_key, id=ident.to_proto(), rank=rank, chunks=[chunk])

        def messages() -> Iterator[bytes]:
            yield header.SerializeToString()
            for start in range(0, len(data), FRAME_NBYTES):
                yield bytes(data[start : start + FRAME_NBYTES])

        timeout_s = _CALL_S + len(data) / _SLOWEST_BYTES_PER_S
        reply = self._connection.call(self._replicate, messages(), timeout_s=timeout_s)
        return list(parse_reply(replica_pb2.OfferResponse(), reply).wanted_chunks)

    def _send(
        self,
        header: replica_pb2.ReplicateHeader,
        path: Path,
        spans: Sequence[tuple[int, int]],
        throttle: Throttle,
        on_bytes: Callable[[int], None],
    ) -> list[int]:
        nbytes = sum(stop - start for start, stop in spans)
        slowest = min(_SLOWEST_BYTES_PER_S, throttle.rate / 8 or _SLOWEST_BYTES_PER_S)  # shared by streams
        failures: list[CkptError] = []
        messages = _messages(header, path, spans, throttle, on_bytes, failures)
        try:
            reply = self._connection.call(self._replicate, messages, timeout_s=_CALL_S + nbytes / slowest)
        except CkptError as error:
            # gRPC pulls the messages in a thread of its own and turns what they raise into CANCELLED.
            raise (failures[0] if failures else error) from error
        return list(parse_reply(replica_pb2.OfferResponse(), reply).wanted_chunks)


def _messages(
    header: replica_pb2.ReplicateHeader,
    path: Path,
    spans: Sequence[tuple[int, int]],
    throttle: Throttle,
    on_bytes: Callable[[int], None],
    failures: list[CkptError],
) -> Iterator[bytes]:
    yield header.SerializeToString()
    try:
        with os_errors("a sealed segment cannot be read", path=path), path.open("rb", 0) as file:
            for start, stop in spans:
                while start < stop:
                    frame = os.pread(file.fileno(), min(FRAME_NBYTES, stop - start), start)
                    if not frame:
                        raise CorruptError("a sealed segment is cut short", code="truncated", path=path)
                    throttle.take(len(frame))
                    yield frame
                    on_bytes(len(frame))
                    start += len(frame)
    except CkptError as error:
        failures.append(error)
        raise
