"""The nodes of a run as they know one another: where each one's server is, and what fails with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.format.limits import MAX_WORLD_SIZE
from ckpt_proto.v1 import common_pb2

__all__ = ["PeerNode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNode:
    """One node of a run.

    Attributes:
        node_id: of its staging directory: another disk is another node, a new server on the old disk is not.
        target: gRPC target of its server as other nodes reach it (``host:port``); None: they cannot.
        domain: failure domain: nodes of one domain are lost together (rack, switch, host). Never empty; where
            none was declared it is the machine.
        host: name for people.
        ranks: global ranks of the node, ascending; empty where they are not known.
    """

    node_id: str
    target: str | None
    domain: str
    host: str
    ranks: tuple[int, ...] = ()

    def to_proto(self) -> common_pb2.PeerNode:
        return common_pb2.PeerNode(
            node_id=self.node_id,
            target=self.target or "",
            domain=self.domain,
            host=self.host,
            ranks=self.ranks,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.PeerNode) -> PeerNode:
        return cls(
            node_id=message.node_id,
            target=message.target or None,
            domain=message.domain,
            host=message.host,
            ranks=tuple(message.ranks),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "node_id": self.node_id,
            "target": self.target,
            "domain": self.domain,
            "host": self.host,
            "ranks": list(self.ranks),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> PeerNode:
        """Parse :meth:`to_json`. Raises one of ``limits.MALFORMED`` for anything else."""
        return cls(
            node_id=str(body["node_id"]),
            target=str(body["target"]) if body["target"] else None,
            domain=str(body["domain"]),
            host=str(body["host"]),
            ranks=tuple(_rank(rank) for rank in body["ranks"]),
        )


def _rank(value: Any) -> int:
    rank = int(value)
    if not 0 <= rank < MAX_WORLD_SIZE:
        raise ValueError("not a rank")
    return rank
