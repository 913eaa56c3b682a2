"""The other nodes' servers as this one knows them: newest address, last sign of life, open connections."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckpt.client.replica import ReplicaClient
from ckpt.clock import Clock
from ckpt.errors import CkptError, InvalidInputError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.rpc.access import PeerAccess
from ckpt_proto.v1 import replica_pb2

__all__ = ["Peers"]


class Peers:
    """Thread-safe. Nothing here is durable: after a restart nodes are found by run.json and by their calls.

    Args:
        me: this node, its target as others reach it; None where its server does not listen for peers.
        access: how to get in at the others.
        clock: time.
    """

    def __init__(self, me: PeerNode | None, access: PeerAccess, clock: Clock) -> None:
        self.me = me
        self._access = access
        self._clock = clock
        self._lock = threading.Lock()
        self._targets: dict[str, str] = {}  # guarded by self._lock; by node id, from calls
        self._answered: dict[str, float] = {}  # guarded by self._lock; or first asked
        self._called: dict[str, float] = {}  # guarded by self._lock
        self._failures: dict[str, CkptError] = {}  # guarded by self._lock
        self._clients: dict[str, ReplicaClient] = {}  # guarded by self._lock; by target
        self._closed = False  # guarded by self._lock

    def called(self, node: PeerNode) -> None:
        """Take note of a call by ``node``: it lives, and this is where it is reached now."""
        with self._lock:
            self._called[node.node_id] = self._clock.monotonic()
            if node.target is not None:
                self._targets[node.node_id] = node.target

    def target(self, node: PeerNode) -> str:
        """Where ``node`` is reached, by the newest that is known. Raises UnavailableError."""
        with self._lock:
            target = self._targets.get(node.node_id, node.target)
        if target is None:
            raise UnavailableError("this node does not listen for others", code="no-target", node=node.host)
        return target

    def client(self, node: PeerNode) -> ReplicaClient:
        """An open connection. Raises UnavailableError, InvalidInputError (see open_channel)."""
        target = self.target(node)
        with self._lock:
            if self._closed:
                raise UnavailableError("this server is stopping", code="closed")
            client = self._clients.get(target)
            if client is None:
                client = ReplicaClient(target, token=self._access.token, ca=self._access.ca)
                self._clients[target] = client
            return client

    def greet(
        self, node: PeerNode, run_key: str, *, committed: Sequence[CheckpointId] = (), ended: bool = False
    ) -> replica_pb2.GreetResponse:
        """Call ``node`` and note whether it answers. Blocking.

        Raises:
            UnavailableError: it does not, or another node answers at its address.
            CkptError: it refuses.
        """
        if self.me is None:
            raise InvalidInputError("this server does not listen for peers")
        with self._lock:
            self._answered.setdefault(node.node_id, self._clock.monotonic())
        try:
            reply = self.client(node).greet(run_key, self.me, committed=committed, ended=ended)
            if reply.node.node_id != node.node_id:
                raise UnavailableError(
                    "another node answers at the address of this one",
                    code="other-node",
                    node=node.host,
                    target=self.target(node),
                )
        except CkptError as error:
            with self._lock:
                self._failures[node.node_id] = error
            raise
        with self._lock:
            self._answered[node.node_id] = self._clock.monotonic()
            self._failures.pop(node.node_id, None)
        return reply

    def failure(self, node_id: str) -> CkptError | None:
        """Why the node did not answer last; None where it did."""
        with self._lock:
            return self._failures.get(node_id)

    def silent_s(self, node_id: str, *, calls_count: bool = False) -> float:
        """Seconds since the node answered last, or was asked first; 0 where it was never asked.

        Args:
            node_id: of the node.
            calls_count: a call that it made is a sign of life too.
        """
        with self._lock:
            last = self._answered.get(node_id)
            if calls_count and last is not None:
                last = max(last, self._called.get(node_id, last))
        return 0.0 if last is None else self._clock.monotonic() - last

    def close(self) -> None:
        """Close every connection; calls in flight are cancelled."""
        with self._lock:
            self._closed = True
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
