"""The calls a flusher makes to its staging server: Register, Seal, PutChunks, Watch, Heartbeat."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckpt.errors import CkptError, CorruptError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import chunk_range
from ckpt.rpc.bulk import FRAME_NBYTES, PUT_CHUNKS, bulk_path
from ckpt.rpc.messages import parse_reply
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import disk_pb2, staging_pb2

__all__ = ["Remote"]

T = TypeVar("T")

_CALL_S = 30.0
_WATCH_S = 600.0  # a Watch is taken up again after this, so that a half-dead connection is noticed
_SLOWEST_BYTES_PER_S = 4e6  # a link below this is called broken
_ROUNDS = 3  # how often a chunk is sent that the server still finds wrong


class Remote:
    """One server, reached again and again. Every call has a deadline and raises CkptErrors.

    gRPC is imported here and not at the top: it takes a sixth of a second of CPU, and the flusher must be
    ready for its first snapshot before that.

    Args:
        target: ``unix:/path`` or ``host:port``.
        staging: this node's staging directory.
        run_key: the one run of this flusher.
        environment: ``CKPT_SERVER_TOKEN`` and ``CKPT_SERVER_CA`` count for TCP targets.
    """

    def __init__(
        self, target: str, staging: StagingDir, run_key: str, *, environment: Mapping[str, str] | None = None
    ) -> None:
        found = os.environ if environment is None else environment
        self._staging = staging
        self._run_key = run_key
        token = None if target.startswith("unix:") else found.get("CKPT_SERVER_TOKEN")
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        # Here: see the class.
        from ckpt.rpc.channel import open_channel

        ca = found.get("CKPT_SERVER_CA")
        self._channel = open_channel(target, token=token, ca=Path(ca) if ca else None)
        self._shares_path: bool | None = None  # None: register first

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self._channel.close()

    def forget(self) -> None:
        """Register again before the next call: another server may answer, one that knows nothing."""
        self._shares_path = None

    def seal(self, ident: CheckpointId, rank: int, on_progress: Callable[[], None]) -> None:
        """Tell the server that ``rank`` has sealed ``ident``; send the bytes if it cannot see them.

        Idempotent. Blocks for a round trip or two, or as long as the bytes take; ``on_progress`` is called
        while they flow.

        Raises:
            CkptError: what the server said, or UnavailableError, TimeoutExceededError where it did not.
        """
        if self._shares_path is None:
            self._shares_path = self._register()
        request = staging_pb2.SealRequest(run_key=self._run_key, id=ident.to_proto(), rank=rank)
        if not self._shares_path:
            request.index = self._staging.read_index_bytes(self._run_key, ident, rank)
            index = self._staging.read_index(self._run_key, ident, rank)
            request.layout = self._staging.layout(self._run_key, index.layout_digest)
        reply = self._unary("Seal", request, staging_pb2.SealResponse)
        if reply.result == staging_pb2.SealResponse.RESULT_NEED_CHUNKS:
            self._send_chunks(ident, rank, list(reply.wanted_chunks), on_progress)

    def watch(self) -> Iterator[staging_pb2.StepStatus]:
        """Yield where every step of the run stands, then each change; ends after some minutes."""
        stub = self._channel.unary_stream(
            "/ckpt.v1.Staging/Watch",
            request_serializer=staging_pb2.StatusRequest.SerializeToString,
            response_deserializer=staging_pb2.StepStatus.FromString,
        )
        request = staging_pb2.StatusRequest(run_key=self._run_key)
        call = stub(request, timeout=_WATCH_S, metadata=self._metadata)
        while (status := _translated(lambda: next(call, None))) is not None:
            yield status

    def heartbeat(self, pulses: Iterator[staging_pb2.RankPulse]) -> None:
        """Send ``pulses`` until there are no more. Raises CkptError where the line is lost."""
        stub: Any = self._channel.stream_unary(
            "/ckpt.v1.Staging/Heartbeat",
            request_serializer=staging_pb2.RankPulse.SerializeToString,
            response_deserializer=staging_pb2.HeartbeatResponse.FromString,
        )
        _translated(lambda: stub(pulses, timeout=_WATCH_S, metadata=self._metadata))

    def _register(self) -> bool:
        """Make the run known; return whether the server sees this staging directory."""
        config = self._staging.read_run_config(self._run_key)
        request = staging_pb2.RegisterRequest(
            config=config.to_proto(),
            staging_path=str(self._staging.path),
            staging_token=self._staging.token(),
        )
        return self._unary("Register", request, staging_pb2.RegisterResponse).shares_path

    def _send_chunks(
        self, ident: CheckpointId, rank: int, wanted: list[int], on_progress: Callable[[], None]
    ) -> None:
        """Stream chunks until the server wants none. What arrived before an error is not sent again."""
        index = self._staging.read_index(self._run_key, ident, rank)
        path = self._staging.segment_path(self._run_key, ident, rank)
        stub: Any = self._channel.stream_unary(bulk_path(PUT_CHUNKS), None, None)
        for _ in range(_ROUNDS):
            header = staging_pb2.PutChunksHeader(
                run_key=self._run_key, id=ident.to_proto(), rank=rank, chunks=wanted
            )
            size = sum(_size(index, chunk) for chunk in wanted)
            with os_errors("a sealed segment cannot be read", path=path), path.open("rb", 0) as file:
                # gRPC pulls the frames from a thread of its own and turns what they raise into CANCELLED.
                failures: list[BaseException] = []
                frames = _frames(header, index, file.fileno(), on_progress, failures)
                deadline = _CALL_S + size / _SLOWEST_BYTES_PER_S
                try:
                    data = _translated(lambda: stub(frames, timeout=deadline, metadata=self._metadata))  # noqa: B023
                except CkptError as error:
                    raise (failures[0] if failures else error) from error
            reply = parse_reply(staging_pb2.SealResponse(), data)
            if reply.result == staging_pb2.SealResponse.RESULT_ACCEPTED:
                return
            wanted = list(reply.wanted_chunks)
        raise CorruptError(
            "the server finds chunks of a sealed segment damaged again and again",
            path=path,
            chunks=wanted[:5],
        )

    def _unary(self, method: str, request: Any, reply: type[T]) -> T:
        stub = self._channel.unary_unary(
            f"/ckpt.v1.Staging/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,  # type: ignore[attr-defined]
        )
        answer: T = _translated(lambda: stub(request, timeout=_CALL_S, metadata=self._metadata))
        return answer


def _size(index: disk_pb2.SegmentIndex, chunk: int) -> int:
    start, stop = chunk_range(chunk, index.nbytes, index.chunks.chunk_nbytes)
    return stop - start


def _frames(
    header: staging_pb2.PutChunksHeader,
    index: disk_pb2.SegmentIndex,
    fd: int,
    on_progress: Callable[[], None],
    failures: list[BaseException],
) -> Iterator[bytes]:
    yield header.SerializeToString()
    try:
        for chunk in header.chunks:
            start, stop = chunk_range(chunk, index.nbytes, index.chunks.chunk_nbytes)
            while start < stop:
                frame = os.pread(fd, min(FRAME_NBYTES, stop - start), start)
                if not frame:
                    raise CorruptError("a sealed segment is cut short", code="truncated", chunk=chunk)
                yield frame
                start += len(frame)
                on_progress()
    except Exception as error:
        failures.append(error)
        raise


def _translated(call: Callable[[], T]) -> T:
    """Return ``call()``; a failed RPC becomes the CkptError that the server sent, or the nearest one."""
    import grpc  # loaded already; see Remote

    from ckpt.rpc.status import sent_error

    try:
        return call()
    except grpc.RpcError as error:
        # An error without the server's own came from gRPC itself, a proxy or a foreign program: worth another
        # try, unlike for a person who waits for an answer (ckpt.rpc.status.error_from_rpc).
        raise sent_error(error) or UnavailableError(
            "call to the staging server failed",
            code=error.code().name.lower().replace("_", "-"),
            details=error.details() or "",
        ) from error
