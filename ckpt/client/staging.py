"""Typed client of the Staging service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckpt.client.base import Client
from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.rpc.bulk import PUT_CHUNKS, bulk_path, frames
from ckpt.rpc.messages import parse_reply
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import staging_pb2, staging_pb2_grpc

__all__ = ["StagingClient"]

_NEED_CHUNKS = staging_pb2.SealResponse.RESULT_NEED_CHUNKS

# Chunks per PutChunks call: a broken connection then costs a new call, not the deadline of a whole
# segment.
_CHUNKS_PER_CALL = 32
_CALL_S = 120.0
_ROUNDS = 5


class StagingClient(Client):
    """Talks to the staging server of a node. Thread-safe; every call has a deadline.

    Args:
        target: ``unix:/path`` or ``host:port``.
        token, ca: for TCP; see :func:`ckpt.rpc.channel.open_channel`.
        timeout_s: deadline of each call.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 30.0
    ) -> None:
        super().__init__(target, token=token, ca=ca, timeout_s=timeout_s)
        self._stub = staging_pb2_grpc.StagingStub(self._connection.channel)  # type: ignore[no-untyped-call]
        self._put_chunks: Callable[..., bytes] = self._connection.channel.stream_unary(bulk_path(PUT_CHUNKS))

    def register(
        self,
        url: str,
        *,
        staging: StagingDir | None = None,
        store_options: Mapping[str, str] | None = None,
        keep_local: int = 0,
        keep_last: int = 0,
        keep_every: int = 0,
    ) -> staging_pb2.RegisterResponse:
        """Make a run known to the server. Idempotent.

        Args:
            url: of the run.
            staging: this process's staging directory; its token shows whether the server sees it too.
            store_options: never a secret: they are written to disk.
            keep_local, keep_last, keep_every: retention; 0 takes the server's default.

        Raises:
            InvalidInputError: bad URL, options or policy.
            UnavailableError: the server cannot be reached.
        """
        request = staging_pb2.RegisterRequest(
            config=staging_pb2.RunConfig(
                url=url,
                store_options=store_options or {},
                keep_local=keep_local,
                keep_last=keep_last,
                keep_every=keep_every,
            )
        )
        if staging is not None:
            request.staging_path = str(staging.path)
            request.staging_token = staging.token()
        reply: staging_pb2.RegisterResponse = self._connection.call(self._stub.Register, request)
        return reply

    def seal(
        self, run_key: str, ident: CheckpointId, rank: int, *, index: bytes = b"", layout: bytes = b""
    ) -> staging_pb2.SealResponse:
        """Say that a segment is sealed. Idempotent.

        Args:
            run_key: from :meth:`register`.
            ident: the checkpoint.
            rank: whose segment.
            index: the sealed index file, where the server does not see it.
            layout: the LayoutSet bytes, likewise.

        Raises:
            NotFoundError: the run is not known there.
            InvalidInputError: code "not-sealed": the server does not see the segment; send the index.
            ConflictError: code "sealed-differently".
        """
        request = staging_pb2.SealRequest(
            run_key=run_key, id=ident.to_proto(), rank=rank, index=index, layout=layout
        )
        reply: staging_pb2.SealResponse = self._connection.call(self._stub.Seal, request)
        return reply

    def push_segment(self, staging: StagingDir, run_key: str, ident: CheckpointId, rank: int) -> int:
        """Hand a sealed segment to a server that does not see ``staging``; returns the bytes sent.

        Sends only what the server lacks; may be repeated after any error and goes on where it was.

        Raises:
            CorruptError: the server keeps refusing what is on this disk.
            CkptError: what :meth:`seal` raises.
        """
        index = staging.read_index(run_key, ident, rank)
        reply = self.seal(
            run_key,
            ident,
            rank,
            index=staging.read_index_bytes(run_key, ident, rank),
            layout=staging.layout(run_key, index.layout_digest),
        )
        path = staging.segment_path(run_key, ident, rank)
        sent = 0
        rounds = 0
        while reply.result == _NEED_CHUNKS:
            wanted = list(reply.wanted_chunks)
            before = len(wanted)
            for start in range(0, before, _CHUNKS_PER_CALL):
                header = staging_pb2.PutChunksHeader(
                    run_key=run_key,
                    id=ident.to_proto(),
                    rank=rank,
                    chunks=wanted[start : start + _CHUNKS_PER_CALL],
                )
                spans = [_span(chunk, index.chunks.chunk_nbytes, index.nbytes) for chunk in header.chunks]
                reply = self._send(header, path, spans)
                sent += sum(nbytes for _, nbytes in spans)
            rounds += len(reply.wanted_chunks) >= before
            if rounds >= _ROUNDS:
                raise CorruptError("the server still wants chunks that were sent", path=path, rank=rank)
        return sent

    def status(self, run_key: str = "") -> staging_pb2.StatusResponse:
        """Where every step (of one run) stands. Raises UnavailableError."""
        request = staging_pb2.StatusRequest(run_key=run_key)
        reply: staging_pb2.StatusResponse = self._connection.call(self._stub.Status, request)
        return reply

    def heartbeat(self, pulses: Iterator[staging_pb2.RankPulse], *, timeout_s: float = 600.0) -> None:
        """Tell how a rank does, until ``pulses`` ends. Raises UnavailableError, BusyError."""
        self._connection.call(self._stub.Heartbeat, pulses, timeout_s=timeout_s)

    def watch(self, run_key: str = "", *, timeout_s: float = 3600.0) -> Iterator[staging_pb2.StepStatus]:
        """Yield the status of every step, then each change. Leaving the loop ends the call.

        Raises:
            TimeoutExceededError: after ``timeout_s``.
            UnavailableError: the server is gone; watch again.
        """
        request = staging_pb2.StatusRequest(run_key=run_key)
        return self._connection.stream(self._stub.Watch, request, timeout_s=timeout_s)

    def _send(
        self, header: staging_pb2.PutChunksHeader, path: Path, spans: list[tuple[int, int]]
    ) -> staging_pb2.SealResponse:
        messages = _chunk_messages(header, path, spans)
        reply = self._connection.call(self._put_chunks, messages, timeout_s=_CALL_S)
        return parse_reply(staging_pb2.SealResponse(), reply)


def _span(chunk: int, chunk_nbytes: int, nbytes: int) -> tuple[int, int]:
    start = chunk * chunk_nbytes
    return start, min(chunk_nbytes, nbytes - start)


def _chunk_messages(
    header: staging_pb2.PutChunksHeader, path: Path, spans: list[tuple[int, int]]
) -> Iterator[bytes]:
    yield header.SerializeToString()
    with os_errors("a sealed segment cannot be read", path=path), path.open("rb") as file:
        for start, nbytes in spans:
            file.seek(start)
            data = file.read(nbytes)
            if len(data) != nbytes:
                raise UnavailableError("a sealed segment is cut short", code="io", path=path)
            yield from frames(data)
