"""A node's own copies and those of other nodes, as a repair looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ckpt.client.peer import PeerClient
from ckpt.client.peer_tier import PeerTier
from ckpt.errors import CkptError
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId
from ckpt.ops.copies import NodeCopies
from ckpt.ops.tiers import Tier
from ckpt.rpc.access import PeerAccess
from ckpt.storage.staging import StagingDir

__all__ = ["PeerCopies"]


class PeerCopies(NodeCopies):
    """First what this node has, then what each peer says it has. A context manager.

    A peer that does not answer is noted in ``unreachable`` and asked no more.

    Args:
        staging: of this node.
        run_key: the run's folder, here and there.
        targets: of the peers' servers.
        access: to them.
    """

    def __init__(
        self, staging: StagingDir, run_key: str, targets: Sequence[str], *, access: PeerAccess | None = None
    ) -> None:
        super().__init__(staging, run_key)
        self._access = access or PeerAccess()
        self._targets = list(dict.fromkeys(targets))
        self._tiers: dict[CheckpointId, list[Tier]] = {}
        self._held: dict[CheckpointId, list[tuple[str, Held]]] = {}
        self.unreachable: dict[str, CkptError] = {}

    def __enter__(self) -> PeerCopies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tiers in self._tiers.values():
            for tier in tiers:
                if isinstance(tier, PeerTier):
                    tier.close()

    def tiers(self, ident: CheckpointId) -> Sequence[Tier]:
        if ident not in self._tiers:
            self._tiers[ident] = [
                *super().tiers(ident),
                *(
                    PeerTier(target, self.run_key, ident, held.ranks, access=self._access)
                    for target, held in self._ask(ident)
                ),
            ]
        return self._tiers[ident]

    def layout(self, ident: CheckpointId, rank: int, layout_digest: bytes) -> bytes | None:
        own = super().layout(ident, rank, layout_digest)
        if own is not None:
            return own
        for target, held in self._ask(ident):
            if rank not in held.ranks:
                continue
            try:
                with self._client(target) as client:
                    found = client.segment_layouts(self.run_key, ident, rank)
            except CkptError:
                continue
            if found.digest == layout_digest:
                return found.encode()
        return None

    def _ask(self, ident: CheckpointId) -> list[tuple[str, Held]]:
        """What the peers hold of ``ident``."""
        if ident not in self._held:
            found = []
            for target in self._targets:
                if target in self.unreachable:
                    continue
                try:
                    with self._client(target) as client:
                        told = client.have(self.run_key, ident)
                except CkptError as error:
                    self.unreachable[target] = error
                    continue
                found += [(target, Held.from_proto(item)) for item in told]
            self._held[ident] = found
        return self._held[ident]

    def _client(self, target: str) -> PeerClient:
        return PeerClient(target, token=self._access.token, ca=self._access.ca)
