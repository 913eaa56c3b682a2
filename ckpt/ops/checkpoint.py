"""A committed checkpoint, opened: manifest and layouts at hand, indexes read when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckpt.errors import CorruptError, NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key
from ckpt.format.layout import LayoutSet
from ckpt.format.manifest import GroupIndex, groups_digest
from ckpt.ops.groups import list_groups, read_group_header, read_group_headers, read_segment_index
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Checkpoint"]


class Checkpoint:
    """Made by :func:`ckpt.ops.catalog.load_checkpoint`. Safe for threads.

    Attributes:
        store: of the run; must stay open.
        ident: which checkpoint.
        manifest: as stored.
        layouts: merged layout of every tensor.
    """

    def __init__(self, store: Store, manifest: disk_pb2.Manifest, layouts: LayoutSet) -> None:
        self.store = store
        self.ident = CheckpointId.from_proto(manifest.id)
        self.manifest = manifest
        self.layouts = layouts
        self._lock = threading.Lock()
        self._groups: dict[int, GroupIndex] = {}  # guarded by self._lock
        self._indexes: dict[int, disk_pb2.SegmentIndex] = {}  # guarded by self._lock

    def group(self, number: int) -> GroupIndex:
        """Return the header of a group index. Raises CorruptError, also where it is gone."""
        with self._lock:
            known = self._groups.get(number)
        if known is None:
            key = group_key(self.ident, number, self.manifest.group_count)
            try:
                known = read_group_header(self.store, key)
            except NotFoundError as error:
                raise _gone(key) from error
            with self._lock:
                self._groups[number] = known
        return known

    def groups(self) -> list[GroupIndex]:
        """Return every header, in order, and check them against the manifest. Raises CorruptError."""
        with self._lock:
            complete = len(self._groups) == self.manifest.group_count
        if not complete:
            listing = list_groups(self.store, self.ident)
            if listing.missing or listing.count != self.manifest.group_count:
                missing = next(iter(listing.missing), 0)
                raise _gone(group_key(self.ident, missing, self.manifest.group_count))
            headers = read_group_headers(self.store, listing.in_order())
            with self._lock:
                self._groups.update(enumerate(headers))
        with self._lock:
            groups = [self._groups[i] for i in range(self.manifest.group_count)]
        self._check(groups)
        return groups

    def _check(self, groups: Sequence[GroupIndex]) -> None:
        if groups_digest(groups) != self.manifest.groups_digest:
            raise CorruptError(
                "group indexes are not those that were committed", code="groups-digest", checkpoint=self.ident
            )

    def group_of(self, rank: int) -> GroupIndex:
        """Return the header of the group that has ``rank``.

        One request where ranks are spread evenly over the groups in order, as launchers do; else all
        headers are read.

        Raises:
            NotFoundError: code "rank": the checkpoint has no such rank.
            CorruptError: a group index is damaged or gone.
        """
        world = self.manifest.world_size
        if not 0 <= rank < world:
            raise NotFoundError(
                "checkpoint has no such rank", code="rank", checkpoint=self.ident, rank=rank, world_size=world
            )
        guess = self.group(rank * self.manifest.group_count // world)
        if guess.summary(rank) is not None:
            return guess
        for group in self.groups():
            if group.summary(rank) is not None:
                return group
        raise CorruptError("no group index has this rank", code="ranks", checkpoint=self.ident, rank=rank)

    def summary(self, rank: int) -> disk_pb2.SegmentSummary:
        """Return what the group index says of the segment of ``rank``. Raises as :meth:`group_of`."""
        found = self.group_of(rank).summary(rank)
        assert found is not None
        return found

    def summaries(self) -> list[disk_pb2.SegmentSummary]:
        """Return the summaries of all ranks, ascending. Reads every header. Raises CorruptError."""
        found = [summary for group in self.groups() for summary in group.header.segments]
        return sorted(found, key=lambda summary: summary.rank)

    def segment_index(self, rank: int) -> disk_pb2.SegmentIndex:
        """Return the segment index of ``rank``; do not change it. Raises as :meth:`group_of`."""
        with self._lock:
            known = self._indexes.get(rank)
        if known is None:
            known = read_segment_index(self.store, self.group_of(rank), rank)
            with self._lock:
                self._indexes[rank] = known
        return known


def _gone(key: str) -> CorruptError:
    return CorruptError("group index is not in the store", code="missing", key=key)
