"""Where copies of sealed segments are, nearest first: this node's own, replicas on this node, peers.

The object store is not a tier in this sense: what it has is described by the checkpoint itself, and it is
asked last. A tier is not trusted: who reads compares every chunk with its digest in the segment index.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

from ckpt.errors import CkptError, CorruptError, NotFoundError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId, same_run
from ckpt.storage.direct import O_DIRECT
from ckpt.storage.own_file import open_own
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.scattered import read_parts_at
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2

__all__ = ["GIVEN_UP", "LOCAL", "PEER", "REMOTE", "REPLICA", "LocalTier", "Tier", "node_tiers", "tier_index"]

LOCAL, REPLICA, PEER, REMOTE = "local", "replica", "peer", "remote"
"""Names of tiers, as they stand in statistics and events; REMOTE is the object store."""

GIVEN_UP = "given-up"
"""Code of the errors of a tier that is out of use for good, which has been reported when it happened."""

_log = get_logger("tiers")


class Tier(Protocol):
    """Copies of a run's sealed segments, in one place. Safe for threads."""

    @property
    def name(self) -> str:
        """What kind of place: LOCAL, REPLICA or PEER."""

    def index(self, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex | None:
        """Return the index of the sealed segment, or None where it is not here or not readable.

        Reports what is damaged, and raises nothing: the next tier may have it.
        """

    def read_into(
        self,
        parts: Sequence[memoryview],
        ident: CheckpointId,
        rank: int,
        start: int,
        *,
        alone: bool = False,
    ) -> bytes:
        """Fill ``parts``, one after another, with the segment's bytes from ``start`` on.

        Args:
            parts: memory to fill.
            ident, rank: which segment.
            start: in it.
            alone: nobody else on this node wants them: they need not stay in its page cache.

        Returns:
            Their digest as they stand in ``parts``; the caller compares it.

        Raises:
            CkptError: they cannot be had here, for whatever reason; ``parts`` may hold anything then.
        """


class LocalTier:
    """The sealed segments of one run in a staging directory of this node.

    Args:
        staging: the node's staging directory, or the one of its replicas.
        run_key: the run's folder in it.
        name: of the tier.
    """

    def __init__(self, staging: StagingDir, run_key: str, *, name: str = LOCAL) -> None:
        self._staging = staging
        self._run_key = run_key
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def index(self, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex | None:
        try:
            return self._staging.read_index(self._run_key, ident, rank)
        except NotFoundError:
            return None
        except CkptError as error:
            event(
                _log,
                logging.WARNING,
                "tier.bad_index",
                tier=self._name,
                checkpoint=ident,
                rank=rank,
                error=error,
            )
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
        path = self._staging.segment_path(self._run_key, ident, rank)

        def past_cache() -> int:
            return open_own(self._staging.path, path, os.O_RDONLY | O_DIRECT)

        direct = past_cache if alone and O_DIRECT else None
        try:
            with os.fdopen(open_own(self._staging.path, path), "rb", buffering=0) as file:
                count, found = read_parts_at(file.fileno(), start, parts, past_cache=direct)
        except FileNotFoundError as error:
            raise NotFoundError("local segment is gone", path=path) from error
        except OSError as error:
            raise UnavailableError(
                "local segment cannot be read", path=path, reason=error.strerror
            ) from error
        if count != sum(map(len, parts)):
            raise CorruptError("local segment is cut short", path=path, start=start, nbytes=count)
        return found


def node_tiers(staging: StagingDir, run_key: str) -> tuple[LocalTier, LocalTier]:
    """Return what a node has itself of a run: its own segments, then its replicas of others'."""
    return LocalTier(staging, run_key), LocalTier(replicas_dir(staging), run_key, name=REPLICA)


def tier_index(tier: Tier, ident: CheckpointId, rank: int, run_id: str) -> disk_pb2.SegmentIndex | None:
    """Return the index of a segment in ``tier``, or None where it is not there, or is of another life of the
    run than ``run_id``: a run that was deleted and begun again uses the same ids for other things.
    """
    found = tier.index(ident, rank)
    if found is None or same_run(found.run_id, run_id):
        return found
    event(
        _log,
        logging.WARNING,
        "tier.other_run",
        tier=tier.name,
        checkpoint=ident,
        rank=rank,
        run_id=found.run_id,
        expected=run_id,
    )
    return None
