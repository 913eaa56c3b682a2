"""The standard health service: SERVING while intake runs, NOT_SERVING from the first SIGTERM on."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ckpt.rpc.bulk import BULK_SERVICE
from ckpt_proto.v1 import catalog_pb2, peer_pb2, replica_pb2, restore_pb2, staging_pb2

__all__ = ["Health"]

_SERVICES = (
    staging_pb2.DESCRIPTOR.services_by_name["Staging"].full_name,
    catalog_pb2.DESCRIPTOR.services_by_name["Catalog"].full_name,
    restore_pb2.DESCRIPTOR.services_by_name["Restore"].full_name,
    peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name,
    replica_pb2.DESCRIPTOR.services_by_name["Replica"].full_name,
    BULK_SERVICE,
)


class Health:
    """Says whether the server takes work; also registers reflection."""

    def __init__(self) -> None:
        self._servicer = health.HealthServicer()
        self._set(health_pb2.HealthCheckResponse.NOT_SERVING)

    def add_to(self, server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )

    def serving(self) -> None:
        self._set(health_pb2.HealthCheckResponse.SERVING)

    def stopping(self) -> None:
        """NOT_SERVING for good."""
        self._servicer.enter_graceful_shutdown()

    def _set(self, status: int) -> None:
        for service in ("", *_SERVICES):
            self._servicer.set(service, status)
