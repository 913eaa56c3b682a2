"""How a process gets in at other nodes' servers: one token and one authority for all servers of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PeerAccess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """What :func:`ckpt.rpc.channel.open_channel` needs beside the target.

    Attributes:
        token: sent with every call; None for servers that run with --insecure.
        ca: PEM file of the authority that signed the servers' certificates; None: plain text, loopback only.
    """

    token: str | None = None
    ca: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> PeerAccess:
        """From ``CKPT_SERVER_TOKEN`` and ``CKPT_SERVER_CA``."""
        found = os.environ if environment is None else environment
        ca = found.get("CKPT_SERVER_CA")
        return cls(token=found.get("CKPT_SERVER_TOKEN") or None, ca=Path(ca) if ca else None)
