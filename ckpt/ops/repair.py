"""Rebuild in the store what of a committed checkpoint is damaged or gone, from what nodes still hold.

The manifest is the authority, and is never rebuilt: it fixes the group indexes by their digest, they fix the
layouts and every chunk. Whatever is put has these digests; what is good is not touched. So two repairs, or a
repair and an upload that is repeated, can only put the same. A checkpoint that is pruned meanwhile stays
pruned: the sweep takes what was put.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt.errors import CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import checkpoint_of_data_key, layout_key, own_object_key
from ckpt.format.layout import LayoutSet, merge_layout_sets
from ckpt.format.manifest import stored_nbytes
from ckpt.ops.catalog import exists, list_checkpoints, read_manifest
from ckpt.ops.copies import Copies
from ckpt.ops.groups import put_encoded_layout, read_layout
from ckpt.ops.rebuild import Demand, Rebuilder, demands_by_object
from ckpt.ops.records import repair_records
from ckpt.ops.regroup import Groups, find_groups, read_all_groups
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Mended", "OnMended", "RepairReport", "repair_checkpoint"]

_log = get_logger("ops.repair")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """One object that was put again (dry run: can be).

    Attributes:
        key: of the object; the path of a local file.
        code: what was wrong with it.
        sources: chunks by the tier that gave them; empty for what is no segment.
    """

    key: str
    code: str
    sources: Mapping[str, int] = field(default_factory=dict)


OnMended: TypeAlias = Callable[[Mended], None]
"""Called with each object as soon as it is mended."""


@dataclass(slots=True, kw_only=True)
class RepairReport:
    """What came of a repair.

    Attributes:
        ident: of which checkpoint.
        mended: what is good again (dry run: would be).
        left: what is still damaged, and why.
        indexes: by rank, the segment indexes as they were committed; empty where they are not known.
    """

    ident: CheckpointId
    mended: list[Mended] = field(default_factory=list)
    left: list[CorruptError] = field(default_factory=list)
    indexes: dict[int, disk_pb2.SegmentIndex] = field(default_factory=dict)


def repair_checkpoint(
    store: Store,
    ident: CheckpointId,
    copies: Copies,
    *,
    dry_run: bool = False,
    on_mended: OnMended | None = None,
) -> RepairReport:
    """Read all of a checkpoint and put again what is damaged or missing, where a good copy is left.

    Blocks: it reads every byte of the checkpoint once, and twice what it rebuilds.

    Args:
        store: of the run.
        ident: a committed checkpoint.
        copies: where good bytes may be.
        dry_run: look for the copies, put nothing.
        on_mended: see :data:`OnMended`.

    Raises:
        NotFoundError: it is not committed, or was pruned meanwhile.
        UnavailableError: the store cannot be reached.
    """
    report = RepairReport(ident=ident)
    try:
        manifest = read_manifest(store, ident)
    except CorruptError as error:
        report.left.append(error)
        return report
    work = _Repair(store, manifest, copies, report, dry_run=dry_run, on_mended=on_mended)
    work.run()
    _require_exists(store, ident)
    return report


def _require_exists(store: Store, ident: CheckpointId) -> None:
    if not exists(store, ident):
        raise NotFoundError(
            "checkpoint was deleted while it was repaired; `ckpt sweep` removes what was put",
            code="no-checkpoint",
            checkpoint=ident,
            url=store.url,
        )


class _Repair:
    def __init__(
        self,
        store: Store,
        manifest: disk_pb2.Manifest,
        copies: Copies,
        report: RepairReport,
        *,
        dry_run: bool,
        on_mended: OnMended | None,
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._ident = report.ident
        self._copies = copies
        self._report = report
        self._dry_run = dry_run
        self._on_mended = on_mended or (lambda _: None)
        self._rebuilder = Rebuilder(store, copies)

    def run(self) -> None:
        groups, left = find_groups(self._store, self._manifest, self._copies)
        self._report.left += left
        if groups is None:  # nothing says any more what the objects must hold
            return
        for key, code in groups.damaged.items():
            self._put(key, code, lambda key=key: self._store.put(key, groups.data[key]))  # type: ignore[misc]
        self._report.indexes = {index.rank: index for index in groups.indexes}
        for key, code in repair_records(self._store, self._manifest, groups.indexes, dry_run=self._dry_run):
            self._note(key, code)
        self._layouts(groups)
        self._objects(groups)

    def _put(self, key: str, code: str, put: Callable[[], None]) -> None:
        if not self._dry_run:
            _require_exists(self._store, self._ident)
            put()
        self._note(key, code)

    def _note(self, key: str, code: str, sources: Mapping[str, int] | None = None) -> None:
        mended = Mended(key=key, code=code, sources=sources or {})
        self._report.mended.append(mended)
        self._on_mended(mended)
        if not self._dry_run:
            event(_log, logging.INFO, "repair.done", checkpoint=self._ident, key=key, problem=code)

    # --- layouts ---

    def _layouts(self, groups: Groups) -> None:
        known: dict[bytes, LayoutSet] = {}
        of_ranks: dict[bytes, list[int]] = {}
        for index in groups.indexes:
            of_ranks.setdefault(index.layout_digest, []).append(index.rank)
        for key, ranks in of_ranks.items():
            try:
                known[key] = read_layout(self._store, key)
            except CorruptError as error:
                payload = next(filter(None, (self._copies.layout(self._ident, r, key) for r in ranks)), None)
                if payload is None:
                    self._report.left.append(error)
                else:
                    known[key] = LayoutSet.decode(payload)
                    self._put_layout(key, payload, error)
        merged = self._manifest.layout_digest
        if merged in of_ranks:
            return
        try:
            read_layout(self._store, merged)
        except CorruptError as error:
            found = merge_layout_sets(known.values()) if len(known) == len(of_ranks) else None
            if found is None or found.digest != merged:
                self._report.left.append(error)
            else:
                self._put_layout(merged, found.encode(), error)

    def _put_layout(self, layout_digest: bytes, payload: bytes, error: CorruptError) -> None:
        self._put(
            layout_key(layout_digest),
            error.code,
            lambda: put_encoded_layout(self._store, layout_digest, payload),
        )

    # --- objects ---

    def _objects(self, groups: Groups) -> None:
        own = [(self._ident, index) for index in groups.indexes]
        exact = {
            own_object_key(summary.object_key, summary.pack): stored_nbytes(summary)
            for summary in groups.summaries
        }
        try:
            demands = demands_by_object(own)
        except CorruptError as error:
            self._report.left.append(error)
            return
        for key, wanted in demands.items():
            problem = self._rebuilder.problem(key, wanted, exact_nbytes=exact.get(key))
            if problem is None:
                continue
            try:
                self._object(key, wanted, exact.get(key), problem)
            except CorruptError as error:
                error.context.setdefault("problem", problem.code)
                self._report.left.append(error)

    def _object(
        self, key: str, wanted: dict[int, Demand], exact_nbytes: int | None, problem: CorruptError
    ) -> None:
        users = list(self._users(key))
        if users:
            everything = demands_by_object([*users, *_indexes_of(wanted, self._report, self._ident)])
            wanted = everything[key]
        if not self._dry_run:
            _require_exists(self._store, self._ident)
        sources = self._rebuilder.rebuild(key, wanted, exact_nbytes=exact_nbytes, dry_run=self._dry_run)
        if not self._dry_run:
            again = self._rebuilder.problem(key, wanted, exact_nbytes=exact_nbytes)
            if again is not None:
                raise again
        self._note(key, problem.code, dict(Counter(sources)))

    def _users(self, key: str) -> Iterator[tuple[CheckpointId, disk_pb2.SegmentIndex]]:
        """Other checkpoints that hold chunks in another one's object, and that one itself: all of them must
        find their chunks in what is rebuilt.

        Raises:
            CorruptError: what one of them needs is not known.
        """
        owner = checkpoint_of_data_key(key)
        if owner is None or owner == self._ident:
            return
        for info in list_checkpoints(self._store):
            if info.ident == self._ident:
                continue
            manifest = read_manifest(self._store, info.ident)
            if owner == info.ident or owner in map(CheckpointId.from_proto, manifest.references):
                for index in read_all_groups(self._store, manifest):
                    if key in index.chunks.object_keys:
                        yield info.ident, index


def _indexes_of(
    wanted: Mapping[int, Demand], report: RepairReport, ident: CheckpointId
) -> Iterator[tuple[CheckpointId, disk_pb2.SegmentIndex]]:
    ranks = {rank for demand in wanted.values() for found, rank, _ in demand.holders if found == ident}
    for rank in sorted(ranks):
        yield ident, report.indexes[rank]
