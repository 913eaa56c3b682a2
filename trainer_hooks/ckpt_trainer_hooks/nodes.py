"""What a rank can say about its node to the other nodes of the job."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt.format.peer import PeerNode
from ckpt.storage.peerfile import failure_domain, node_id, read_peer_file
from ckpt.storage.staging import StagingDir

__all__ = ["check_peer_listen", "kernel_id", "own_node"]

_log = get_logger("nodes")
_START_WAIT_S = 30.0  # for a server that has just been started; it needs a second or two
_POLL_S = 0.05


def kernel_id() -> str:
    """Say which kernel this process runs on: those with the same one share its page cache."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def check_peer_listen(environment: Mapping[str, str]) -> None:
    """Raise InvalidInputError where embedded servers would not listen for one another."""
    if not environment.get("CKPT_PEER_LISTEN"):
        raise InvalidInputError(
            "replication_factor needs servers that listen for one another: set CKPT_PEER_LISTEN to HOST:PORT "
            "(with CKPT_TLS_CERT, CKPT_TLS_KEY, CKPT_SERVER_CA and CKPT_SERVER_TOKEN), or name a daemon with "
            "--peer-listen as server",
            code="peer-listen",
        )


def own_node(staging: StagingDir, ranks: Sequence[int], *, wanted: bool) -> PeerNode:
    """Describe this node. Called on one rank of it, after its server was started.

    Args:
        staging: of the node.
        ranks: its global ranks.
        wanted: others need this node's server; a warning says so where they cannot reach it. No error:
            training goes on without replicas. A server that is starting is waited for where it is wanted, or
            is to listen by ``$CKPT_PEER_LISTEN``.
    """
    is_expected = wanted or bool(os.environ.get("CKPT_PEER_LISTEN"))
    found = _wait_for_peer_file(staging, _START_WAIT_S if is_expected else 0.0)
    if found is None:
        if wanted:
            event(
                _log,
                logging.WARNING,
                "nodes.no_peer_server",
                reason="other nodes cannot reach the server of this node: it does not listen for peers",
                staging=staging.path,
            )
        found = PeerNode(
            node_id=node_id(staging), target=None, domain=failure_domain(), host=socket.gethostname()
        )
    return replace(found, ranks=tuple(ranks))


def _wait_for_peer_file(staging: StagingDir, timeout_s: float) -> PeerNode | None:
    """Return how the node's server is reached once it is ready; None where it is missing or deaf to peers."""
    deadline = time.monotonic() + timeout_s
    while not _is_ready(staging):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)
    return read_peer_file(staging)


def _is_ready(staging: StagingDir) -> bool:
    """Whether a server serves this directory and has written its files. Those alone prove nothing: they are
    stale after a crash. A new server deletes them before it binds its socket and writes them afterwards.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        probe.connect(str(staging.socket_path()))
        return (staging.path / "server.json").is_file()
    return False
