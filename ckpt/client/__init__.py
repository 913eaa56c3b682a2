"""Typed gRPC clients of the staging server, and the table between errors and status codes."""

from __future__ import annotations

from ckpt.client.catalog import CatalogClient
from ckpt.client.peer import PeerClient
from ckpt.client.restore import RestoreClient, TensorData
from ckpt.client.staging import StagingClient

__all__ = ["CatalogClient", "PeerClient", "RestoreClient", "StagingClient", "TensorData"]
