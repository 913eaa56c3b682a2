"""The segment summaries of all groups of a checkpoint as columns.

A commit at 100,000 ranks looks at every summary. Going through the messages once, and working on lists and
arrays from then on, costs a fraction of visiting each message in each check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.format.ids import CheckpointId
from ckpt.format.manifest import GroupIndex
from ckpt_proto.v1 import disk_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Summaries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summaries:
    """Every segment of some groups; each column has one entry per segment, in the order of the groups.

    Attributes:
        groups: the group indexes.
        segments: the messages themselves.
        counts: (groups,) segments of each group.
        ranks: (segments,) global ranks.
        nbytes: raw size of each segment.
        layouts: layout digest of each.
        states: state digest of each; empty where it has no state.
        references: (position in ``segments``, checkpoint) for every checkpoint a segment borrows chunks from.
        has_explicit_boxes: whether any segment has an array that follows no mesh.
    """

    groups: tuple[GroupIndex, ...]
    segments: list[disk_pb2.SegmentSummary]
    counts: NDArray[np.int64]
    ranks: NDArray[np.int64]
    nbytes: list[int]
    layouts: list[bytes]
    states: list[bytes]
    references: list[tuple[int, CheckpointId]]
    has_explicit_boxes: bool

    @classmethod
    def of(cls, groups: Sequence[GroupIndex]) -> Summaries:
        """Collect the columns. Costs about a microsecond per segment."""
        import numpy as np  # here: commands that only list have no use for it

        segments = [segment for group in groups for segment in group.header.segments]
        return cls(
            groups=tuple(groups),
            segments=segments,
            counts=np.array([len(group.header.segments) for group in groups], dtype=np.int64),
            ranks=np.array([segment.rank for segment in segments], dtype=np.int64),
            nbytes=[segment.nbytes for segment in segments],
            layouts=[segment.layout_digest for segment in segments],
            states=[segment.state_digest for segment in segments],
            references=[
                (position, CheckpointId.from_proto(other))
                for position, segment in enumerate(segments)
                if segment.references
                for other in segment.references
            ],
            has_explicit_boxes=any(segment.has_explicit_boxes for segment in segments),
        )

    def first_ranks(self) -> dict[tuple[bytes, bytes], int]:
        """Return the lowest rank with each (layout, state) pair of digests, ascending by that rank."""
        import numpy as np  # as above

        order = np.argsort(-self.ranks, kind="stable").tolist()
        # Later entries replace earlier ones: the lowest rank comes last and stays.
        lowest = {(self.layouts[i], self.states[i]): i for i in order}
        ranks = {pair: int(self.ranks[i]) for pair, i in lowest.items()}
        return dict(sorted(ranks.items(), key=lambda item: item[1]))
