"""One segment object of the store: is it good, and can it be put again from other copies of its chunks?

What an object must hold is told by the chunk tables that point into it: those of the checkpoint that wrote
it, and those of later ones that borrow. A rebuilt object has every such chunk where the tables say, so that
no table changes (I6); a chunk that would not come out as long as it was cannot be put back, and is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.digest import Buffer, digest
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.format.chunks import StoredChunk, stored_chunks
from ckpt.format.ids import CheckpointId, split_run_url
from ckpt.ops.copies import Copies
from ckpt.ops.stored import close_chunk, open_chunk
from ckpt.ops.tiers import REMOTE
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Demand", "Rebuilder", "demands_by_object"]

_GAP_NBYTES = 8 << 20
_PART_NBYTES = 16 << 20
_CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class Demand:
    """A chunk that an object must hold, and where nodes may have its raw bytes.

    Attributes:
        chunk: place, codec and digest.
        holders: (checkpoint, rank, offset in the raw segment) of every segment that has this chunk.
    """

    chunk: StoredChunk
    holders: list[tuple[CheckpointId, int, int]] = field(default_factory=list)


def demands_by_object(
    indexes: Iterable[tuple[CheckpointId, disk_pb2.SegmentIndex]],
) -> dict[str, dict[int, Demand]]:
    """Return by object key, then by offset in the object, what the tables of ``indexes`` expect there.

    Raises:
        CorruptError: code "chunk-table": a table is malformed, or two expect different bytes at one place.
    """
    found: dict[str, dict[int, Demand]] = {}
    for ident, index in indexes:
        for number, chunk in enumerate(stored_chunks(index)):
            demand = found.setdefault(chunk.object_key, {}).setdefault(chunk.offset, Demand(chunk))
            if demand.chunk != chunk:
                raise CorruptError(
                    "chunk tables expect different bytes at one place of an object",
                    code="chunk-table",
                    key=chunk.object_key,
                    offset=chunk.offset,
                )
            demand.holders.append((ident, index.rank, number * index.chunks.chunk_nbytes))
    return found


class Rebuilder:
    """Checks and rebuilds the objects of one run.

    Args:
        store: of the run.
        copies: where good bytes may be beside the object itself.
    """

    def __init__(self, store: Store, copies: Copies) -> None:
        self._store = store
        self._run = split_run_url(store.url)[1]
        self._copies = copies

    def problem(
        self, key: str, demands: Mapping[int, Demand], *, exact_nbytes: int | None
    ) -> CorruptError | None:
        """Read every chunk of an object; return what is wrong with it first, or None.

        Args:
            key: of the object.
            demands: what it must hold.
            exact_nbytes: its size, where that is known; it may be longer else.
        """
        try:
            nbytes = self._store.head(key).nbytes
        except NotFoundError:
            return CorruptError("segment is not in the store", code="missing", key=key)
        for offset in sorted(demands):
            try:
                self._from_object(demands[offset].chunk)
            except CorruptError as error:
                error.context.setdefault("key", key)
                return error
        if exact_nbytes is not None and nbytes != exact_nbytes:
            return CorruptError(
                "segment has the wrong size", code="size", key=key, nbytes=nbytes, expected=exact_nbytes
            )
        return None

    def rebuild(
        self, key: str, demands: Mapping[int, Demand], *, exact_nbytes: int | None, dry_run: bool
    ) -> Counter[str]:
        """Put an object again, whole or not at all. Blocks; memory is a few chunks and the parts in flight.

        Bytes that no table speaks of are kept as they are in an object of which not all tables are known.

        Args:
            key, demands, exact_nbytes: as :meth:`problem`.
            dry_run: collect every chunk, put nothing.

        Returns:
            How many chunks came from which tier; REMOTE counts those that were good in the object itself.

        Raises:
            CorruptError: code "no-copy": nobody has a good copy of a chunk; "not-exact": somebody has, but it
                does not compress to the size it had; nothing was put.
        """
        end = max((item.chunk.offset + item.chunk.nbytes for item in demands.values()), default=0)
        try:
            there = self._store.head(key).nbytes
        except NotFoundError:
            there = 0
        total = exact_nbytes if exact_nbytes is not None else max(end, there)
        sources: Counter[str] = Counter()
        pieces = self._pieces(key, demands, total, there, sources)
        if dry_run:
            for _ in pieces:
                pass
        else:
            self._store.put_parts(
                key, pieces, most_nbytes=total, part_nbytes=_PART_NBYTES, concurrency=_CONCURRENCY
            )
        return sources

    def _pieces(
        self, key: str, demands: Mapping[int, Demand], total: int, there: int, sources: Counter[str]
    ) -> Iterator[Buffer]:
        end = 0
        for offset in sorted(demands):
            if offset < end:
                raise CorruptError("chunks overlap in an object", code="chunk-table", key=key, offset=offset)
            yield from self._gap(key, end, offset, there)
            name, stored = self._stored(demands[offset])
            sources[name] += 1
            yield stored
            end = offset + len(stored)
        yield from self._gap(key, end, total, there)

    def _gap(self, key: str, start: int, stop: int, there: int) -> Iterator[Buffer]:
        """What lies between chunks: the old bytes as far as there are any, else zeros."""
        while start < stop:
            nbytes = min(stop - start, _GAP_NBYTES)
            kept = min(nbytes, there - start)
            if kept > 0:
                yield self._store.get_range(key, start, kept)
                start += kept
            else:
                yield bytes(nbytes)
                start += nbytes

    def _stored(self, demand: Demand) -> tuple[str, Buffer]:
        """(tier, stored bytes) of a chunk."""
        chunk = demand.chunk
        try:
            return REMOTE, self._from_object(chunk)[0]
        except CorruptError:
            pass
        found = self._from_nodes(chunk, demand.holders)
        if found is None:
            raise CorruptError(
                "no copy of a chunk is good: neither in the store nor on a node that was asked",
                code="no-copy",
                key=chunk.object_key,
                offset=chunk.offset,
                holders=", ".join(f"{ident} rank {rank}" for ident, rank, _ in demand.holders),
            )
        name, raw = found
        codec, stored = close_chunk(chunk, raw, run=self._run)
        if (codec, len(stored)) != (chunk.codec, chunk.nbytes):
            raise CorruptError(
                "a good copy of a chunk compresses to another size than the one that was lost, so it cannot "
                "take its place; the version of zstandard that uploaded it may give the same",
                code="not-exact",
                key=chunk.object_key,
                offset=chunk.offset,
                nbytes=len(stored),
                expected=chunk.nbytes,
            )
        return name, stored

    def raw(self, demand: Demand) -> Buffer:
        """Return the raw bytes of a chunk, verified, from the object it should be in. Raises CorruptError."""
        return self._from_object(demand.chunk)[1]

    def _from_object(self, chunk: StoredChunk) -> tuple[Buffer, Buffer]:
        """(stored, raw) bytes from where the table says, verified."""
        try:
            stored = self._store.get_range(chunk.object_key, chunk.offset, chunk.nbytes)
        except NotFoundError as error:
            raise CorruptError("segment is not in the store", code="missing", key=chunk.object_key) from error
        raw = open_chunk(chunk, stored, run=self._run)
        if digest(raw) != chunk.digest:
            raise CorruptError(
                "digest does not match: the chunk is damaged",
                code="digest",
                key=chunk.object_key,
                offset=chunk.offset,
            )
        return stored, raw

    def _from_nodes(
        self, chunk: StoredChunk, holders: Sequence[tuple[CheckpointId, int, int]]
    ) -> tuple[str, Buffer] | None:
        for ident, rank, start in holders:
            for tier in self._copies.tiers(ident):
                data = memoryview(bytearray(chunk.raw_nbytes))
                try:
                    tier.read_into([data], ident, rank, start)
                except CkptError:
                    continue  # the next one may have it
                if digest(data) == chunk.digest:
                    return tier.name, data
        return None
