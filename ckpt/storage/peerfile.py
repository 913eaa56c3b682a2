"""``peer.json`` in a staging directory: the server of this node can be reached by others, and how.

Written by the server before ``server.json``, removed when it stops; stale after a crash, like that.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from ckpt.digest import Buffer, digest_hex
from ckpt.errors import CorruptError
from ckpt.format.limits import MALFORMED, load_json
from ckpt.format.peer import PeerNode
from ckpt.storage.durable import write_durably
from ckpt.storage.staging import StagingDir, os_errors

__all__ = [
    "PEER_NAME",
    "REPLICAS_NAME",
    "failure_domain",
    "node_id",
    "parse_peer_file",
    "read_peer_file",
    "replicas_dir",
    "write_peer_file",
]

# Folder with the replicas of other nodes' segments: laid out like a staging directory.
REPLICAS_NAME = "replicas"
PEER_NAME = "peer.json"


def replicas_dir(staging: StagingDir) -> StagingDir:
    """Where this node keeps replicas of other nodes' sealed segments. May not exist yet."""
    return StagingDir(staging.path / REPLICAS_NAME)


def node_id(staging: StagingDir) -> str:
    """Identity of the node: of its staging directory, 16 hex digits. Does not reveal the token."""
    return digest_hex(b"ckpt node " + staging.token())[:16]


def failure_domain(environment: Mapping[str, str] | None = None) -> str:
    """``$CKPT_FAILURE_DOMAIN``; unset: this machine, told by its boot id (containers on it share it)."""
    found = (os.environ if environment is None else environment).get("CKPT_FAILURE_DOMAIN", "").strip()
    if found:
        return found
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"machine:{boot.read_text().strip()}"
    return f"machine:{socket.gethostname()}"


def write_peer_file(staging: StagingDir, *, target: str, domain: str) -> tuple[PeerNode, Path]:
    """Make known durably that this node's server is reached at ``target``; return that, and the file."""
    node = PeerNode(node_id=node_id(staging), target=target, domain=domain, host=socket.gethostname())
    path = staging.path / PEER_NAME
    with os_errors("peer.json cannot be written", path=path):
        write_durably(path, json.dumps({**node.to_json(), "pid": os.getpid()}).encode())
    return node, path


def read_peer_file(staging: StagingDir) -> PeerNode | None:
    """What the server of this node has made known (ranks empty); None where there is no such server.

    Raises:
        CorruptError: the file is damaged.
    """
    path = staging.path / PEER_NAME
    with os_errors("peer.json cannot be read", path=path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    return parse_peer_file(data, where=str(path))


def parse_peer_file(data: Buffer, *, where: str) -> PeerNode:
    """Parse the content of peer.json. Raises CorruptError."""
    try:
        return PeerNode.from_json(load_json(data))
    except MALFORMED as error:
        raise CorruptError("peer.json cannot be read", code="decode", where=where) from error
