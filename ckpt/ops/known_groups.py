"""What a committer remembers of a run, so that a later commit of many groups takes a listing.

See ckpt.format.marks for what a mark says, and why equal claims carry a proof over.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ckpt.digest import digest
from ckpt.errors import NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.invariants import check_segments, merged_references, raise_first
from ckpt.format.keys import group_key, index_prefix
from ckpt.format.manifest import GroupIndex
from ckpt.format.marks import (
    MARKS_FROM,
    GroupMark,
    MarkColumns,
    group_claims,
    mark_prefix,
    parse_mark_names,
)
from ckpt.format.summaries import Summaries
from ckpt.ops.groups import read_group_header
from ckpt.ops.proof import FirstRanks, Whole, check_references, is_late, odd_states, state_ranks
from ckpt.ops.threads import map_in_threads
from ckpt.storage.base import Store

__all__ = ["KnownGroups"]

_WORKERS = 16


@dataclass(frozen=True, slots=True)
class _Proved:
    """All claims of a checkpoint that was proved whole, its ranks and what its manifest said.

    Attributes:
        claims: of every group, one after the other, hexadecimal.
        ranks: (segments,) in the order of the groups.
        begins: (groups,) where each group's ranks begin.
        nbytes: (groups,) raw size of each group's segments.
        whole: as proved.
    """

    claims: str
    ranks: NDArray[np.int64]
    begins: NDArray[np.int64]
    nbytes: tuple[int, ...]
    whole: Whole


class KnownGroups:
    """The claims that the newest commit of a run proved. Thread-safe. One per run and committer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proved: _Proved | None = None  # guarded by self._lock

    def remember(self, summaries: Summaries, whole: Whole) -> None:
        """Note what was proved. Few groups are not worth it: reading them is as quick."""
        if len(summaries.groups) < MARKS_FROM or whole.warnings:
            return
        claims = "".join(found.hex() for found in group_claims(summaries))
        begins = np.cumsum(summaries.counts) - summaries.counts
        nbytes = tuple(
            sum(summaries.nbytes[begin : begin + count])
            for begin, count in zip(begins.tolist(), summaries.counts.tolist(), strict=True)
        )
        with self._lock:
            self._proved = _Proved(claims, summaries.ranks, begins, nbytes, whole)

    def recall(self, store: Store, ident: CheckpointId) -> Whole | None:
        """Return what a manifest of ``ident`` says, where its marks show it to be like the one proved before.

        Costs a listing of the marks, one or two requests for each distinct pattern among them, one per
        checkpoint borrowed from, and two for whether something newer exists.

        Returns:
            None: not all groups have a mark, or they claim something else, or a newer checkpoint exists (then
            the segments themselves must be looked at). Read all headers.

        Raises:
            CorruptError: code "reference-gone": as :func:`ckpt.ops.proof.prove_whole`.
        """
        with self._lock:
            proved = self._proved
        if proved is None:
            return None
        marks = _list_marks(store, ident)
        if marks is None or "".join(marks.claims) != proved.claims or is_late(store, ident):
            return None
        groups = _read(store, ident, marks)
        if groups is None:
            return None
        samples = Summaries.of(groups)
        raise_first(check_segments(ident, samples))
        pairs = _first_ranks(proved, marks, groups)
        if odd_states(pairs):  # worth a warning that names every rank
            return None
        references = merged_references(samples)
        raise_first(check_references(store, ident, references))
        return replace(
            proved.whole,
            first=groups[0].header,
            groups_digest=digest(bytes.fromhex("".join(marks.envelopes))),
            stored_nbytes=sum(
                int(stored, 16) if stored else raw
                for stored, raw in zip(marks.stored, proved.nbytes, strict=True)
            ),
            references=tuple(references),
            state_ranks=state_ranks(pairs),
        )


def _list_marks(store: Store, ident: CheckpointId) -> MarkColumns | None:
    start = len(index_prefix(ident))
    return parse_mark_names(info.key[start:] for info in store.list_keys(mark_prefix(ident)))


def _read(store: Store, ident: CheckpointId, marks: MarkColumns) -> list[GroupIndex] | None:
    """Read one group of each pattern, group 0 first. None where one is not what its mark says."""
    wanted = [marks[numbers[0]] for numbers in marks.members().values()]
    if len(wanted) * 4 > len(marks):  # so many kinds that reading all of them is no worse
        return None

    def read(mark: GroupMark) -> GroupIndex:
        return read_group_header(store, group_key(ident, mark.index, mark.count))

    try:
        groups = map_in_threads(read, wanted, workers=min(_WORKERS, len(wanted)))
    except NotFoundError:
        return None
    matches = all(GroupMark.of(group) == mark for group, mark in zip(groups, wanted, strict=True))
    return groups if matches else None


def _first_ranks(known: _Proved, marks: MarkColumns, groups: Sequence[GroupIndex]) -> FirstRanks:
    """Return the lowest rank of each (layout, state) pair. Groups of one pattern have the same pairs."""
    members = marks.members()
    lowest: dict[tuple[bytes, bytes], int] = {}
    for group in groups:
        segments = group.header.segments
        numbers = members[marks.patterns[group.header.group.index]]
        places = known.begins[numbers][:, None] + np.arange(len(segments))
        for segment, rank in zip(segments, known.ranks[places].min(axis=0).tolist(), strict=True):
            pair = (segment.layout_digest, segment.state_digest)
            lowest[pair] = min(rank, lowest.get(pair, rank))
    return dict(sorted(lowest.items(), key=lambda item: item[1]))
