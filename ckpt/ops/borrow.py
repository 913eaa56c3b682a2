"""Chunks of the checkpoint before this one, and the right to point into its objects instead of sending them.

A checkpoint borrows from *base*: the highest committed step below it of its own attempt, else the checkpoint
that the attempt resumed from. Tables are flat: what base borrowed itself is borrowed from where it lies.

Nobody may delete what an upload under way relies on, although no manifest names it yet:

1. the borrower puts ``index/<id>/borrows-<base>.pb``, which names every checkpoint it may borrow from;
2. then it looks whether base's manifest is (still) there, and nobody deletes base (:mod:`ckpt.ops.condemn`).
   Only if so it borrows.
3. Prune and sweep first delete base's manifest, or find it gone, and then read what is borrowed.

Whichever order the four requests come in, either the borrower sees that base is gone, or the deleter sees
the record. Once the borrower is committed, its manifest names what it needs; the record stays beside its
group indexes and goes with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckpt.errors import CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.chunks import StoredChunk, stored_chunks
from ckpt.format.envelope import Kind, open_message, seal_message
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    MANIFESTS,
    borrows_key,
    checkpoint_of_data_key,
    index_prefix,
    manifest_key,
    parse_borrows_key,
    parse_manifest_key,
)
from ckpt.format.layout import LayoutSet
from ckpt.ops.catalog import exists, read_manifest
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.condemn import is_condemned
from ckpt.ops.groups import read_segment_indexes
from ckpt.plan.retention import newest_first
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "LEAST_LIVE",
    "MOST_REFERENCES",
    "Lender",
    "borrows_of",
    "find_base",
    "open_lender",
    "read_borrows",
    "secure",
]

_log = get_logger("ops.borrow")
_WORKERS = 8

MOST_REFERENCES = 8
"""Checkpoints that one checkpoint borrows from at most: the newest ones. What lies in older ones is sent
again, so that their objects can be deleted."""

LEAST_LIVE = 0.25
"""An object of which a segment would borrow a smaller part is left alone: it would be kept for that part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lender:
    """What can be borrowed from one base checkpoint.

    Attributes:
        base: the checkpoint whose tables these are.
        references: checkpoints whose objects may be borrowed from, newest first.
        chunks: where a chunk lies, by its digest.
    """

    base: CheckpointId
    references: tuple[CheckpointId, ...]
    chunks: Mapping[bytes, StoredChunk] = field(repr=False)

    def lendable(self, store: Store, wanted: Iterable[bytes]) -> dict[bytes, StoredChunk]:
        """Return those of the chunks ``wanted`` (by digest) that one segment should borrow.

        Asks the store for each object that is concerned: one that is gone or too short, which should not be,
        or of which too little is wanted (:data:`LEAST_LIVE`) is left out.
        """
        found = {key: self.chunks[key] for key in wanted if key in self.chunks}
        by_object: dict[str, dict[bytes, StoredChunk]] = {}
        for key, chunk in found.items():
            by_object.setdefault(chunk.object_key, {})[key] = chunk
        good: dict[bytes, StoredChunk] = {}
        for object_key, chunks in by_object.items():
            try:
                nbytes = store.head(object_key).nbytes
            except NotFoundError:
                nbytes = 0
            if any(chunk.offset + chunk.nbytes > nbytes for chunk in chunks.values()):
                event(_log, logging.ERROR, "borrow.object_bad", key=object_key, nbytes=nbytes, base=self.base)
                continue
            if sum({chunk.offset: chunk.nbytes for chunk in chunks.values()}.values()) >= LEAST_LIVE * nbytes:
                good |= chunks
        return good


def find_base(store: Store, ident: CheckpointId, parent: CheckpointId | None) -> CheckpointId | None:
    """Return the committed checkpoint before ``ident`` on its line, or None where there is none."""
    own_attempt = manifest_key(ident)[: len(MANIFESTS) + 6]
    for info in store.list_keys(own_attempt):
        found = parse_manifest_key(info.key)
        if found is not None and found.step < ident.step:
            return found
    return parent if parent is not None and exists(store, parent) else None


def open_lender(
    store: Store, ident: CheckpointId, parent: CheckpointId | None, ranks: Iterable[int]
) -> Lender | None:
    """Return what segments of ``ident`` may borrow, or None where there is nothing to borrow from.

    Reads base's manifest and the group indexes that have ``ranks``. A base that cannot be read is logged and
    not used: nothing that only spares bytes may keep a checkpoint from being saved.

    Raises:
        UnavailableError: the store cannot be reached.
    """
    base = find_base(store, ident, parent)
    if base is None:
        return None
    try:
        manifest = read_manifest(store, base)
        checkpoint = Checkpoint(store, manifest, LayoutSet(()))
        groups = {
            group.key: group
            for rank in ranks
            if rank < manifest.world_size
            for group in [checkpoint.group_of(rank)]
        }
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-lender") as pool:
            indexes = [
                index
                for found in pool.map(lambda group: read_segment_indexes(store, group), groups.values())
                for index in found
            ]
        references = newest_first([base, *map(CheckpointId.from_proto, manifest.references)])
        allowed = tuple(references[:MOST_REFERENCES])
        chunks = _by_digest(indexes, set(allowed))
    except (CorruptError, NotFoundError) as error:
        event(_log, logging.WARNING, "borrow.base_unreadable", checkpoint=ident, base=base, error=error)
        return None
    return Lender(base=base, references=allowed, chunks=chunks)


def _by_digest(
    indexes: Iterable[disk_pb2.SegmentIndex], allowed: set[CheckpointId]
) -> dict[bytes, StoredChunk]:
    found: dict[bytes, StoredChunk] = {}
    owners: dict[str, bool] = {}
    for index in indexes:
        for chunk in stored_chunks(index):
            key = chunk.object_key
            if key not in owners:
                owners[key] = checkpoint_of_data_key(key) in allowed
            if owners[key]:
                found.setdefault(chunk.digest, chunk)
    return found


def secure(store: Store, lender: Lender, ident: CheckpointId) -> bool:
    """Put the record of what ``ident`` borrows; return whether it may (see the module). Idempotent."""
    record = disk_pb2.Borrows(
        id=ident.to_proto(),
        base=lender.base.to_proto(),
        references=[other.to_proto() for other in lender.references],
    )
    key = borrows_key(ident, lender.base)
    store.put(key, seal_message(Kind.BORROWS, record))
    # In this order: the record is there until everything else of base is gone.
    return not is_condemned(store, lender.base, since=key) and exists(store, lender.base)


def borrows_of(store: Store, ident: CheckpointId) -> set[CheckpointId]:
    """Return every checkpoint that uploads of ``ident`` may have borrowed from. Raises CorruptError."""
    found: set[CheckpointId] = set()
    for info in store.list_keys(f"{index_prefix(ident)}borrows-"):
        if parse_borrows_key(info.key) is not None:
            found |= read_borrows(store, info.key)
    return found


def read_borrows(store: Store, key: str) -> set[CheckpointId]:
    """Return the checkpoints that the record at ``key`` names. Raises NotFoundError, CorruptError."""
    record = open_message(Kind.BORROWS, store.get(key), disk_pb2.Borrows(), where=key)
    return {CheckpointId.from_proto(other) for other in record.references}
