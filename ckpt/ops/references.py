"""Which objects somebody needs besides the checkpoint that wrote them. Prune and sweep ask here.

Needed by: the manifests that exist (``references``), and the uploads under way (``borrows-*`` records beside
the group indexes of what is not committed yet; see :mod:`ckpt.ops.borrow`). A pruned checkpoint whose objects
are needed is *held*: ``index/<id>/held.pb`` lists them, so that the prune that takes the last user can delete
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.envelope import Kind, open_message, seal_message
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    INDEX,
    checkpoint_of_data_key,
    held_key,
    index_prefix,
    parse_borrows_key,
    require_below,
)
from ckpt.ops.borrow import read_borrows
from ckpt.ops.catalog import list_checkpoints, read_manifest
from ckpt.ops.threads import map_in_threads
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Manifests", "Unpublished", "look_at_unpublished", "put_held", "read_held"]

_WORKERS = 16


class Manifests:
    """What the manifests of a run refer to. Manifests never change, so each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[CheckpointId, frozenset[CheckpointId]] = {}

    def references(self, without: Collection[CheckpointId] = ()) -> set[CheckpointId]:
        """List the manifests there are now and return what they refer to, ``without`` some of them.

        Raises:
            CorruptError: a manifest cannot be read, so what it needs is unknown.
        """
        left_out = frozenset(without)  # a list of many would be searched for each
        stay = [info.ident for info in list_checkpoints(self._store) if info.ident not in left_out]
        new = [ident for ident in stay if ident not in self._read]
        self._read.update(zip(new, map_in_threads(self._of, new, workers=_WORKERS), strict=True))
        return {other for ident in stay for other in self._read[ident]}

    def _of(self, ident: CheckpointId) -> frozenset[CheckpointId]:
        try:
            manifest = read_manifest(self._store, ident)
        except NotFoundError:  # deleted meanwhile by somebody else
            return frozenset()
        return frozenset(map(CheckpointId.from_proto, manifest.references))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """What lies under ``index/`` of checkpoints without a manifest.

    Attributes:
        borrowed: by checkpoint that is not committed: those it may borrow from.
        held: pruned checkpoints with a record of their objects.
    """

    borrowed: dict[CheckpointId, set[CheckpointId]]
    held: set[CheckpointId]


def look_at_unpublished(store: Store, *, published: Collection[CheckpointId] | None = None) -> Unpublished:
    """Read the records of every checkpoint that has no manifest. One listing each, and one in all.

    Call it after the manifests were deleted (or found gone) whose objects are in question.

    Args:
        store: of the run.
        published: not to be looked at; by default those that have a manifest after the first listing.

    Raises:
        CorruptError: a record cannot be read, so what it protects is unknown.
    """
    idents: list[CheckpointId] = []
    for name in store.list_dirs(INDEX):
        try:
            idents.append(CheckpointId.parse(name))
        except InvalidInputError:
            continue
    if published is None:
        published = {info.ident for info in list_checkpoints(store)}
    borrowed: dict[CheckpointId, set[CheckpointId]] = {}
    held: set[CheckpointId] = set()

    def look(ident: CheckpointId) -> None:
        for info in store.list_keys(index_prefix(ident)):
            if info.key == held_key(ident):
                held.add(ident)
            elif parse_borrows_key(info.key) is not None:
                try:
                    borrowed.setdefault(ident, set()).update(read_borrows(store, info.key))
                except NotFoundError:
                    continue

    map_in_threads(look, [ident for ident in idents if ident not in published], workers=_WORKERS)
    return Unpublished(borrowed=borrowed, held=held)


def put_held(store: Store, ident: CheckpointId, object_keys: Iterable[str]) -> None:
    """Note that the objects of ``ident`` outlive it."""
    record = disk_pb2.Held(id=ident.to_proto(), object_keys=object_keys)
    store.put(held_key(ident), seal_message(Kind.HELD, record))


def read_held(store: Store, ident: CheckpointId) -> list[str]:
    """Return the keys of the objects that outlived ``ident``. Raises NotFoundError, CorruptError."""
    key = held_key(ident)
    record = open_message(Kind.HELD, store.get(key), disk_pb2.Held(), where=key)
    for found in record.object_keys:
        if checkpoint_of_data_key(require_below(found)) != ident:
            raise CorruptError(
                "a record of held objects names another's", code="identity", key=key, found=found
            )
    return list(record.object_keys)
