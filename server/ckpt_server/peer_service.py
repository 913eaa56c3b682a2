"""The Peer service: what this node holds, and its bytes, for other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.envelope import Kind, open_message
from ckpt.format.ids import CheckpointId
from ckpt.ops.holdings import node_holdings, read_held_index, read_held_layout, segment_headers
from ckpt.rpc.bulk import FRAME_NBYTES
from ckpt.rpc.messages import parse_request
from ckpt.storage.own_file import open_own
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import disk_pb2, peer_pb2, peer_pb2_grpc

__all__ = ["PeerService"]

_READ_MOST_NBYTES = 64 * 1024 * 1024


class PeerService(peer_pb2_grpc.PeerServicer):
    """Have, GetSegment and the raw method ReadSegment. Thread-safe.

    Args:
        staging: of this node.
    """

    def __init__(self, *, staging: StagingDir) -> None:
        self._staging = staging

    def Have(self, request: peer_pb2.HaveRequest, context: grpc.ServicerContext) -> peer_pb2.HaveResponse:
        only = CheckpointId.from_proto(request.id) if request.HasField("id") else None
        reply = peer_pb2.HaveResponse()
        for held in node_holdings(self._staging, request.run_key, only):
            message = held.to_proto()
            if request.with_headers:
                headers = {
                    header.segments[0].rank: header
                    for header in segment_headers(self._staging, request.run_key, held.ident)
                }
                for segment in message.segments:
                    if segment.rank in headers:
                        segment.header.CopyFrom(headers[segment.rank])
            reply.checkpoints.append(message)
        return reply

    def GetSegment(
        self, request: peer_pb2.GetSegmentRequest, context: grpc.ServicerContext
    ) -> peer_pb2.GetSegmentResponse:
        ident = CheckpointId.from_proto(request.id)
        data = read_held_index(self._staging, request.run_key, ident, request.rank)
        reply = peer_pb2.GetSegmentResponse(index=data)
        if request.with_layout:
            index = open_message(Kind.SEGMENT_INDEX, data, disk_pb2.SegmentIndex(), where="a held index")
            reply.layout = read_held_layout(self._staging, request.run_key, index.layout_digest)
        return reply

    def read_segment(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The raw method ReadSegment (see peer.proto)."""
        request = parse_request(peer_pb2.ReadSegmentRequest(), data)
        if not 0 < request.nbytes <= _READ_MOST_NBYTES:
            raise InvalidInputError("a read takes 1 byte to 64 MiB", nbytes=request.nbytes)
        fd = self._open(request.run_key, CheckpointId.from_proto(request.id), request.rank)
        try:
            start, stop = request.start, request.start + request.nbytes
            with os_errors("a held segment cannot be read", rank=request.rank):
                if stop > os.fstat(fd).st_size:
                    raise CorruptError("the held segment ends before what is asked for", rank=request.rank)
                while start < stop:
                    frame = os.pread(fd, min(FRAME_NBYTES, stop - start), start)
                    if not frame:
                        raise CorruptError("the held segment was cut short", rank=request.rank)
                    start += len(frame)
                    yield frame
        finally:
            os.close(fd)

    def _open(self, run_key: str, ident: CheckpointId, rank: int) -> int:
        """Open the file of a sealed segment, its own or a replica."""
        for place in (self._staging, replicas_dir(self._staging)):
            if not place.index_path(run_key, ident, rank).is_file():
                continue
            path = place.segment_path(run_key, ident, rank)
            try:
                with os_errors("a held segment cannot be opened", path=path):
                    return open_own(place.path, path)
            except NotFoundError:
                continue
        raise NotFoundError("this node does not hold the segment", checkpoint=ident, rank=rank)
