"""One source rank's segment as a restore sees it: its index, and its chunks from the nearest good copy."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt.digest import DIGEST_NBYTES, Buffer, digest
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.chunks import stored_chunk
from ckpt.format.segment import chunk_range
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.reread import read_again
from ckpt.ops.stored import open_chunk
from ckpt.ops.tiers import GIVEN_UP, REMOTE, Tier, tier_index
from ckpt.storage.base import ReadsFiles
from ckpt.storage.scattered import copy_into
from ckpt_proto.v1 import disk_pb2

__all__ = ["FetchStats", "SourceSegment"]

_log = get_logger("fetch")


@dataclass(slots=True)
class FetchStats:
    """What a fetch did. Bytes are of whole chunks, as read.

    Attributes:
        nbytes: by name of the tier they came from; REMOTE for the object store.
        repaired_chunks: chunks whose nearest copy was bad or gone and that a farther one gave instead.
    """

    nbytes: Counter[str] = field(default_factory=Counter)
    repaired_chunks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, tier: str, nbytes: int, *, repaired: bool) -> None:
        """Note a chunk. From any thread."""
        with self._lock:
            self.nbytes[tier] += nbytes
            self.repaired_chunks += repaired


class SourceSegment:
    """Safe for threads.

    Args:
        checkpoint: that the segment belongs to.
        rank: the source rank.
        tiers: where copies are looked for before the store, nearest first.
        alone: nobody else on this node reads the segment.

    Raises:
        CorruptError: no index is left.
    """

    def __init__(
        self, checkpoint: Checkpoint, rank: int, tiers: Sequence[Tier], *, alone: bool = False
    ) -> None:
        self._checkpoint = checkpoint
        self._alone = alone
        self.rank = rank
        self._tiers: Sequence[Tier] = ()  # from the nearest that has it on
        for position, tier in enumerate(tiers):
            found = tier_index(tier, checkpoint.ident, rank, checkpoint.manifest.run_id)
            if found is not None:
                self.index = found
                self._tiers = tiers[position:]
                return
        self.index = checkpoint.segment_index(rank)

    @property
    def is_remote(self) -> bool:
        """Whether only the object store has it."""
        return not self._tiers

    @property
    def is_cached_by_host(self) -> bool:
        """Whether what one process of a host reads of the store costs the next one no request."""
        return isinstance(self._checkpoint.store, ReadsFiles)

    def chunk_nbytes(self, number: int) -> int:
        """Size of a chunk. Raises InvalidInputError for a number too large."""
        start, stop = chunk_range(number, self.index.nbytes, self.index.chunks.chunk_nbytes)
        return stop - start

    def read(self, number: int, parts: Sequence[memoryview], stats: FetchStats) -> Buffer | None:
        """Fill ``parts``, one after another, with the raw bytes of a chunk, verified.

        Returns:
            The chunk in memory of its own where that came for free, else None.

        Raises:
            CorruptError: no copy is good; ``parts`` may hold anything then.
            UnavailableError: the store cannot be reached.
        """
        for position, tier in enumerate(self._tiers):
            if self._read_from(tier, number, parts):
                stats.count(tier.name, sum(map(len, parts)), repaired=position > 0)
                return None
        raw = self._from_store(number, parts, stats)
        if raw is not None:
            copy_into(parts, raw)
        return raw

    def verify(self, number: int, data: Buffer, *, where: str) -> None:
        """Raise CorruptError unless ``data`` is what was saved as this chunk."""
        self._compare(digest(data), self.index, number, where)

    def _read_from(self, tier: Tier, number: int, parts: Sequence[memoryview]) -> bool:
        start, _ = chunk_range(number, self.index.nbytes, self.index.chunks.chunk_nbytes)
        try:
            found = tier.read_into(parts, self._checkpoint.ident, self.rank, start, alone=self._alone)
            self._compare(found, self.index, number, tier.name)
        except CkptError as error:
            if error.code != GIVEN_UP:
                event(
                    _log,
                    logging.WARNING,
                    "fetch.bad_copy",
                    tier=tier.name,
                    checkpoint=self._checkpoint.ident,
                    error=error,
                )
            return False
        return True

    @read_again
    def _from_store(self, number: int, parts: Sequence[memoryview], stats: FetchStats) -> Buffer | None:
        """The raw bytes, verified; None: they are in ``parts`` already."""
        index = self._checkpoint.segment_index(self.rank)
        store, place = self._checkpoint.store, stored_chunk(index, number)
        raw: Buffer | None = None
        try:
            if isinstance(store, ReadsFiles) and place.is_plain:
                found = store.read_parts(place.object_key, place.offset, parts)
            else:
                stored = store.get_range(place.object_key, place.offset, place.nbytes)
                raw = open_chunk(place, stored, run=index.run)
                found = digest(raw)
        except NotFoundError as error:
            raise CorruptError(
                "an object of the checkpoint is gone", code="missing", key=place.object_key
            ) from error
        stats.count(REMOTE, place.nbytes, repaired=len(self._tiers) > 0)
        self._compare(found, index, number, place.object_key)
        return raw

    def _compare(self, found: bytes, index: disk_pb2.SegmentIndex, number: int, where: str) -> None:
        if found != index.chunks.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
            raise CorruptError(
                "digest does not match: the chunk is damaged",
                code="digest",
                where=where,
                rank=self.rank,
                chunk=number,
            )
