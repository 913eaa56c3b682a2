"""The Replica service: takes replicas of other nodes' segments in. Writes below ``replicas`` only."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator

import grpc

from ckpt.errors import InvalidInputError, RefusedError, UnavailableError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId, split_run_url
from ckpt.format.peer import PeerNode
from ckpt.rpc.messages import parse_request
from ckpt.storage.staging import ARRIVING, RunConfig
from ckpt_proto.v1 import disk_pb2, replica_pb2, replica_pb2_grpc
from ckpt_server.peers import Peers
from ckpt_server.receiver import Receiver, check_offer
from ckpt_server.replica_dir import ReplicaDir
from ckpt_server.runs import check_options
from ckpt_server.uploader import Segment

__all__ = ["ReplicaService"]

_NODE_ID = re.compile(r"[0-9a-f]{16}")
# Left free beside an arriving replica, bytes: this node's own saves come first.
_HEADROOM_NBYTES = 64 * 1024 * 1024


class ReplicaService(replica_pb2_grpc.ReplicaServicer):
    """Offer, Greet, and the raw method Replicate. Thread-safe.

    Args:
        replicas: where they go.
        peers: is told who calls.
        quota_nbytes: most bytes of all replicas; 0: as the disk has room.
        own_step_nbytes: bytes of this node's own largest step, for which room has to stay.
        make_room: drops replicas that could go at once if room is short.
        make_way: sets aside what lies here under the name of a segment and is of another life of its run.
        on_greet: told of every greeting: run key, committed steps, whether the run has ended there.
    """

    def __init__(
        self,
        *,
        replicas: ReplicaDir,
        peers: Peers,
        quota_nbytes: int,
        own_step_nbytes: Callable[[], int],
        make_room: Callable[[], None],
        make_way: Callable[[Segment, str], None],
        on_greet: Callable[[str, list[CheckpointId], bool], None],
    ) -> None:
        self._replicas = replicas
        self._peers = peers
        self._quota_nbytes = quota_nbytes
        self._own_step_nbytes = own_step_nbytes
        self._make_room = make_room
        self._make_way = make_way
        self._on_greet = on_greet
        self._receiver = Receiver(replicas.files)
        self._room = threading.Lock()  # of two offers the second has to see what the first takes

    def Offer(
        self, request: replica_pb2.OfferRequest, context: grpc.ServicerContext
    ) -> replica_pb2.OfferResponse:
        owner = self._caller(request.owner)
        config = _config(request)
        run_key = keys.run_key(config.url)
        ident = CheckpointId.from_proto(request.id)
        segment = Segment(run_key=run_key, ident=ident, rank=request.rank)
        index = check_offer(segment, request.index, request.layout)
        if index.run != split_run_url(config.url)[1] or index.rank not in index.group.ranks:
            raise InvalidInputError("the index belongs to another run or node group", run=index.run)
        files = self._replicas.files
        files.ensure()
        with self._room:
            self._check_room(segment, index)
            files.write_run_config(run_key, config)
            self._make_way(segment, index.run_id)
            self._replicas.note_owner(run_key, ident, index.group, owner)
            wanted = self._receiver.offer(segment, request.index, request.layout)
        return replica_pb2.OfferResponse(wanted_chunks=wanted)

    def replicate(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The raw method Replicate: header, then frames (see replica.proto)."""
        first = next(messages, None)
        if first is None:
            raise InvalidInputError("the stream is empty; the header comes first")
        header = parse_request(replica_pb2.ReplicateHeader(), first)
        ident = CheckpointId.from_proto(header.id)
        segment = Segment(run_key=header.run_key, ident=ident, rank=header.rank)
        wanted = self._receiver.receive(segment, list(header.chunks), messages)
        return replica_pb2.OfferResponse(wanted_chunks=wanted).SerializeToString()

    def Greet(
        self, request: replica_pb2.GreetRequest, context: grpc.ServicerContext
    ) -> replica_pb2.GreetResponse:
        caller = self._caller(request.caller)
        committed = [CheckpointId.from_proto(ident) for ident in request.committed]
        self._replicas.files.run_dir(request.run_key)  # refuses what is no run key
        self._on_greet(request.run_key, committed, request.ended)
        assert self._peers.me is not None  # who listens for peers knows itself
        return replica_pb2.GreetResponse(
            node=self._peers.me.to_proto(),
            held=[
                replica_pb2.HeldReplicas(id=unit.ident.to_proto(), ranks=unit.sealed)
                for unit in self._replicas.units(request.run_key)
                if unit.owner.node_id == caller.node_id and unit.sealed
            ],
        )

    def _caller(self, message: object) -> PeerNode:
        caller = PeerNode.from_proto(message)  # type: ignore[arg-type]
        if _NODE_ID.fullmatch(caller.node_id) is None:
            raise InvalidInputError("the calling node does not say who it is", node_id=caller.node_id)
        if self._peers.me is None:
            raise RefusedError("this server does not listen for peers", code="no-peers")
        if caller.node_id == self._peers.me.node_id:
            raise InvalidInputError("a node keeps no replicas of its own", code="own-node")
        self._peers.called(caller)
        return caller

    def _check_room(self, segment: Segment, index: disk_pb2.SegmentIndex) -> None:
        files = self._replicas.files
        arriving = segment.path(files).with_name(segment.path(files).name + ARRIVING)
        if segment.path(files).is_file() or arriving.is_file():
            return  # its room is taken already
        if not self._has_room(index.nbytes):
            self._make_room()
            if not self._has_room(index.nbytes):
                raise UnavailableError(
                    "no room for replicas on this node", code="no-space", wanted=index.nbytes
                )

    def _has_room(self, nbytes: int) -> bool:
        if self._quota_nbytes and self._replicas.nbytes() + nbytes > self._quota_nbytes:
            return False
        free = shutil.disk_usage(self._replicas.files.path).free
        return free >= nbytes + self._own_step_nbytes() + _HEADROOM_NBYTES


def _config(request: replica_pb2.OfferRequest) -> RunConfig:
    if not request.config.url:
        raise InvalidInputError("the offer does not name its run")
    config = RunConfig.from_proto(request.config)
    split_run_url(config.url)
    check_options(config.store_options)
    return config
