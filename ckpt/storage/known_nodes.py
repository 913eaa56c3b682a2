"""``nodes.json`` of a run: nodes of earlier starts, whose servers may still have what this start lacks.

``run.json`` names the nodes of the newest start only. A node that left the job (a GPU died, the job shrank)
often lives on, with sealed segments on its disk.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable

from ckpt.errors import CkptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.limits import MALFORMED, load_json
from ckpt.format.peer import PeerNode
from ckpt.storage.durable import write_durably
from ckpt.storage.staging import StagingDir, os_errors

__all__ = ["known_nodes", "remember_nodes"]

_log = get_logger("nodes")
_NAME = "nodes.json"
_MOST = 1024


def known_nodes(staging: StagingDir, run_key: str) -> tuple[PeerNode, ...]:
    """Return the nodes of the run that this node has heard of, newest start first, then those that
    ``$CKPT_PEERS`` names by the address of their server. Damage is reported.
    """
    found: list[PeerNode] = []
    try:
        found += staging.read_run_config(run_key).peers
    except NotFoundError:
        pass
    except CkptError as error:
        event(_log, logging.WARNING, "nodes.unreadable", run=run_key, error=error)
    path = staging.run_dir(run_key) / _NAME
    try:
        found += [PeerNode.from_json(body) for body in load_json(path.read_bytes())]
    except FileNotFoundError:
        pass
    except (OSError, *MALFORMED) as error:
        event(_log, logging.WARNING, "nodes.unreadable", path=path, error=error)
    named = [target.strip() for target in os.environ.get("CKPT_PEERS", "").split(",") if target.strip()]
    known = {node.target for node in found}
    found += [
        PeerNode(node_id=f"at {target}", target=target, domain="", host=target)
        for target in named
        if target not in known
    ]
    return _distinct(found)


def remember_nodes(staging: StagingDir, run_key: str, nodes: Iterable[PeerNode]) -> None:
    """Write down ``nodes``, newest start first, for later starts.

    Raises:
        UnavailableError: the staging directory refuses.
    """
    reachable = [node for node in _distinct(nodes) if node.target is not None][:_MOST]
    data = json.dumps([node.to_json() for node in reachable], indent=1).encode()
    path = staging.run_dir(run_key) / _NAME
    with os_errors("nodes.json cannot be written", path=path):
        if not path.exists() or path.read_bytes() != data:
            write_durably(path, data)


def _distinct(nodes: Iterable[PeerNode]) -> tuple[PeerNode, ...]:
    """The first of each node."""
    found: dict[str, PeerNode] = {}
    for node in nodes:
        found.setdefault(node.node_id, node)
    return tuple(found.values())
