"""Another node as a tier of a restore: verified by the reader, given up after a bounded time.

A restore must not wait long for one peer: the store has the bytes too, or the step before has. So each
request has a deadline that allows for a slow network and no more, few are under way at once, and a peer that
fails twice is out of use for the rest of the restore.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence

from ckpt.client.peer import PeerClient
from ckpt.errors import CkptError, CorruptError, NotFoundError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.ops.tiers import GIVEN_UP, PEER
from ckpt.rpc.access import PeerAccess
from ckpt_proto.v1 import disk_pb2

__all__ = ["PeerTier"]

_log = get_logger("tiers")

_STREAMS = 4
_FAILURES = 2
_BASE_S = 5.0
_SLOWEST = 2 << 20
"""Bytes per second and stream below which a peer counts as failing: the store is hardly slower."""


class PeerTier:
    """The segments of one checkpoint that one node holds. Safe for threads; close it after use.

    Args:
        target: of the node's server; connected to when something is read from it.
        run_key: the run's folder there.
        ident: the checkpoint.
        ranks: whose segments the node has said it holds.
        access: to its server.
        base_s: time allowed for a request beside that of its bytes.
    """

    def __init__(
        self,
        target: str,
        run_key: str,
        ident: CheckpointId,
        ranks: Collection[int],
        *,
        access: PeerAccess | None = None,
        base_s: float = _BASE_S,
    ) -> None:
        self._target = target
        self._access = access or PeerAccess()
        self._run_key = run_key
        self._ident = ident
        self._ranks = frozenset(ranks)
        self._base_s = base_s
        self._streams = threading.BoundedSemaphore(_STREAMS)
        self._lock = threading.Lock()
        self._failures = 0  # guarded by self._lock
        self._client: PeerClient | None = None  # guarded by self._lock

    @property
    def name(self) -> str:
        return PEER

    def __repr__(self) -> str:
        return f"PeerTier({self._target})"

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> PeerClient:
        with self._lock:
            if self._client is None:
                self._client = PeerClient(self._target, token=self._access.token, ca=self._access.ca)
            return self._client

    def index(self, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex | None:
        if not self._holds(ident, rank):
            return None
        try:
            with self._streams:
                self._raise_if_given_up()
                return self._connected().segment(self._run_key, ident, rank, timeout_s=self._base_s)
        except CkptError as error:
            if error.code != GIVEN_UP:
                event(
                    _log,
                    logging.WARNING,
                    "tier.bad_index",
                    tier=PEER,
                    checkpoint=ident,
                    rank=rank,
                    error=error,
                )
            self._count(error)
            return None

    def read_into(
        self,
        parts: Sequence[memoryview],
        ident: CheckpointId,
        rank: int,
        start: int,
        *,
        alone: bool = False,
    ) -> bytes:
        if not self._holds(ident, rank):
            raise NotFoundError("the peer does not hold the segment", code=GIVEN_UP, rank=rank)
        try:
            with self._streams:
                self._raise_if_given_up()
                return self._connected().read_into(
                    parts,
                    self._run_key,
                    ident,
                    rank,
                    start,
                    timeout_s=self._base_s + sum(map(len, parts)) / _SLOWEST,
                )
        except CkptError as error:
            self._count(error)
            raise

    def _holds(self, ident: CheckpointId, rank: int) -> bool:
        return ident == self._ident and rank in self._ranks

    def _raise_if_given_up(self) -> None:
        with self._lock:
            given_up = self._failures >= _FAILURES
        if given_up:
            raise UnavailableError("the peer was given up", code=GIVEN_UP, target=self._target)

    def _count(self, error: CkptError) -> None:
        """Count ``error`` where it says that the peer is dead or slow; report when it is given up."""
        if error.code == GIVEN_UP or isinstance(error, CorruptError | NotFoundError):
            return
        with self._lock:
            self._failures += 1
            is_last = self._failures == _FAILURES
        if is_last:
            event(
                _log,
                logging.WARNING,
                "peer.given_up",
                peer=self._target,
                checkpoint=self._ident,
                error=error,
            )
