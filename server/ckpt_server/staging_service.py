"""The Staging service: thin; checks the request, calls intake or receiver, translates nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from ckpt.clock import Clock
from ckpt.errors import BusyError, InvalidInputError, NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import exists
from ckpt.rpc.messages import parse_request
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import staging_pb2, staging_pb2_grpc
from ckpt_server.intake import Intake
from ckpt_server.liveness import Liveness
from ckpt_server.pipeline import Pipeline
from ckpt_server.receiver import Receiver, check_offer
from ckpt_server.replicator import Replicator
from ckpt_server.run_identity import RunIdentity
from ckpt_server.runs import Run, Runs
from ckpt_server.settings import Settings
from ckpt_server.steps import StepRecord, StepTable, oldest_pending_s
from ckpt_server.uploader import Segment

__all__ = ["MAX_WATCHERS", "StagingService"]

_Seal = staging_pb2.SealResponse

# How long Register waits for the probe of the store; a trainer's start must not hang on the store.
_PROBE_WAIT_S = 1.0
_WATCH_POLL_S = 30.0
# Watchers beyond this are refused, so that they can never take every thread of the server.
MAX_WATCHERS = 96


class StagingService(staging_pb2_grpc.StagingServicer):
    """Register, Seal, Status, Watch, Heartbeat, and the raw method PutChunks. Thread-safe."""

    def __init__(
        self,
        *,
        staging: StagingDir,
        settings: Settings,
        runs: Runs,
        table: StepTable,
        intake: Intake,
        pipeline: Pipeline,
        liveness: Liveness,
        clock: Clock,
        version: str,
        replicator: Replicator,
    ) -> None:
        self._staging = staging
        self._settings = settings
        self._runs = runs
        self._table = table
        self._intake = intake
        self._pipeline = pipeline
        self._liveness = liveness
        self._clock = clock
        self._version = version
        self._replicator = replicator
        self._receiver = Receiver(staging)
        self._identity = RunIdentity(staging)
        self._watchers = threading.BoundedSemaphore(MAX_WATCHERS)

    def Register(
        self, request: staging_pb2.RegisterRequest, context: grpc.ServicerContext
    ) -> staging_pb2.RegisterResponse:
        wanted = staging_pb2.RunConfig()
        wanted.CopyFrom(request.config)
        wanted.keep_local = wanted.keep_local or self._settings.keep_local
        run = self._runs.register(RunConfig.from_proto(wanted))
        if not run.probed.is_set():
            self._pipeline.probe(run)
            run.probed.wait(_PROBE_WAIT_S)
        return staging_pb2.RegisterResponse(
            run_key=run.key,
            shares_path=bool(request.staging_token) and request.staging_token == self._staging.token(),
            conditional_put=run.conditional,
            server_version=self._version,
        )

    def Seal(
        self, request: staging_pb2.SealRequest, context: grpc.ServicerContext
    ) -> staging_pb2.SealResponse:
        run, segment = self._segment(request.run_key, request.id, request.rank)
        if request.index:
            index = check_offer(segment, request.index, request.layout)
            self._identity.make_way(run, segment, index.run_id)
            wanted = self._receiver.offer(segment, request.index, request.layout)
            return self._reply(run, segment, wanted)
        self._check_sealed(run, segment)
        return self._reply(run, segment, [])

    def put_chunks(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The raw method PutChunks: header, then frames (see staging.proto)."""
        first = next(messages, None)
        if first is None:
            raise InvalidInputError("the stream is empty; the header comes first")
        header = parse_request(staging_pb2.PutChunksHeader(), first)
        run, segment = self._segment(header.run_key, header.id, header.rank)
        wanted = self._receiver.receive(segment, list(header.chunks), messages)
        return self._reply(run, segment, wanted).SerializeToString()

    def Status(
        self, request: staging_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> staging_pb2.StatusResponse:
        records = self._table.records(request.run_key)
        return staging_pb2.StatusResponse(
            steps=[record.to_proto() for record in records],
            server_version=self._version,
            oldest_pending_s=oldest_pending_s(records, self._clock.now()),
            embedded=self._settings.embedded,
            ranks=self._liveness.health(request.run_key),
            draining=self._table.closed,
            replicated_bytes=self._replicator.sent_bytes,
        )

    def Heartbeat(
        self, request_iterator: Iterator[staging_pb2.RankPulse], context: grpc.ServicerContext
    ) -> staging_pb2.HeartbeatResponse:
        self._liveness.follow(request_iterator, context)
        return staging_pb2.HeartbeatResponse()

    def Watch(
        self, request: staging_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> Iterator[staging_pb2.StepStatus]:
        if not self._watchers.acquire(blocking=False):
            raise BusyError("too many open watches", code="watchers", most=MAX_WATCHERS)
        try:
            yield from self._follow(request.run_key, context)
        finally:
            self._watchers.release()

    def _follow(self, run_key: str, context: grpc.ServicerContext) -> Iterator[staging_pb2.StepStatus]:
        context.add_callback(self._table.wake)
        context.send_initial_metadata(())  # tells the client that it is connected, though nothing happens yet
        version = 0
        while context.is_active():
            records, version, closed = self._table.changes(run_key, version, _WATCH_POLL_S)
            for record in records:
                yield record.to_proto()
            if closed:
                return

    def _segment(self, run_key: str, ident: object, rank: int) -> tuple[Run, Segment]:
        try:
            run = self._runs.load(run_key)
        except NotFoundError:
            raise NotFoundError("the run is not known here; Register it first", run=run_key) from None
        return run, Segment(run_key=run_key, ident=CheckpointId.from_proto(ident), rank=rank)  # type: ignore[arg-type]

    def _check_sealed(self, run: Run, segment: Segment) -> None:
        """Raise unless the segment is sealed here or its checkpoint was committed and cleared away."""
        if segment.rank in self._staging.sealed_ranks(run.key, segment.ident):
            return
        if self._table.get(run.key, segment.ident) is None:
            if not exists(run.store, segment.ident):
                raise InvalidInputError(
                    "this segment is not sealed in the server's staging directory; send its index",
                    code="not-sealed",
                    checkpoint=segment.ident,
                    rank=segment.rank,
                )
            self._table.put(
                StepRecord(
                    run_key=run.key,
                    url=run.config.url,
                    ident=segment.ident,
                    state=staging_pb2.StepStatus.STATE_COMMITTED,
                )
            )

    def _reply(self, run: Run, segment: Segment, wanted: list[int]) -> staging_pb2.SealResponse:
        if wanted:
            return _Seal(result=_Seal.RESULT_NEED_CHUNKS, wanted_chunks=wanted)
        self._intake.examine(run, segment.ident, again=True)
        self._replicator.look(run)
        return _Seal(result=_Seal.RESULT_ACCEPTED)
