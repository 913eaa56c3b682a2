"""Registers the raw methods of ckpt.v1.Bulk: identity serializers, no protobuf around bulk bytes."""

from __future__ import annotations

import grpc

from ckpt.rpc.bulk import BULK_SERVICE, PUT_CHUNKS, READ_CHUNKS, READ_SEGMENT, READ_TENSOR, REPLICATE
from ckpt_server.peer_service import PeerService
from ckpt_server.replica_service import ReplicaService
from ckpt_server.restore_service import RestoreService
from ckpt_server.staging_service import StagingService

__all__ = ["bulk_handlers"]


def bulk_handlers(
    staging: StagingService, restore: RestoreService, peer: PeerService, replica: ReplicaService
) -> grpc.GenericRpcHandler:
    """Return the handlers of the Bulk service."""
    return grpc.method_handlers_generic_handler(
        BULK_SERVICE,
        {
            PUT_CHUNKS: grpc.stream_unary_rpc_method_handler(staging.put_chunks),
            REPLICATE: grpc.stream_unary_rpc_method_handler(replica.replicate),
            READ_TENSOR: grpc.unary_stream_rpc_method_handler(restore.read_tensor),
            READ_CHUNKS: grpc.unary_stream_rpc_method_handler(restore.read_chunks),
            READ_SEGMENT: grpc.unary_stream_rpc_method_handler(peer.read_segment),
        },
    )
