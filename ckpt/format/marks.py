"""Group marks: empty objects whose names say what a group index says, so that a listing is enough to commit.

A job of 100,000 ranks has 12,500 group indexes. Reading them at every save is 12,500 requests; listing their
marks is 13. A mark names three digests:

claims    what G1, G2, G4, G5 speak of and a save leaves as it was: run, parent, ranks, sizes, layouts
pattern   what may differ from save to save and must be read once per distinct value: states, references
envelope  of the group index's header, as ``groups_digest`` of the manifest is made of

and, where a segment is compressed or borrows chunks, how many bytes the group's own objects take.

So once a committer has proved the invariants for all groups, equal claims carry the proof over. What is left
of G3 (keys, digests, packing) was checked by whoever put the mark, on the very bytes it names.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from ckpt.digest import DIGEST_NBYTES, digest
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import index_prefix
from ckpt.format.manifest import GroupIndex, stored_nbytes
from ckpt.format.summaries import Summaries
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "MARKS_FROM",
    "GroupMark",
    "MarkColumns",
    "group_claims",
    "mark_key",
    "mark_prefix",
    "parse_mark_names",
]

MARKS_FROM = 64
"""Checkpoints of at least so many groups have marks; below, reading the headers is cheap."""

_MARK = re.compile(
    r"^mark-(\d{5})-of-(\d{5})\.([0-9a-f]{32})\.([0-9a-f]{32})\.([0-9a-f]{32})(?:\.([0-9a-f]{16}))?$",
    re.MULTILINE | re.ASCII,
)
_HEAD = struct.Struct("<IIIQII")


@dataclass(frozen=True, slots=True)
class GroupMark:
    """What the name of a mark says. Digests are hexadecimal, as in the name.

    ``stored`` is the size of the group's own objects, 16 hexadecimal digits; empty: that of its segments.
    """

    index: int
    count: int
    claims: str
    pattern: str
    envelope: str
    stored: str = ""

    @classmethod
    def of(cls, group: GroupIndex) -> GroupMark:
        """Return the mark of a group index. The caller has checked the group (G3)."""
        header = group.header
        pattern = b"".join(map(_pattern, header.segments))
        is_raw = not any(segment.HasField("stored_nbytes") for segment in header.segments)
        return cls(
            header.group.index,
            header.group.count,
            group_claims(Summaries.of([group]))[0].hex(),
            digest(pattern).hex(),
            group.digest.hex(),
            "" if is_raw else f"{sum(map(stored_nbytes, header.segments)):016x}",
        )


def group_claims(summaries: Summaries) -> list[bytes]:
    """Return the claims digest of every group: of the bytes that docs/format.md, section 4.6, lists."""
    ranks = summaries.ranks.astype("<u4")
    sizes = struct.pack(f"<{len(summaries.nbytes)}Q", *summaries.nbytes)
    layouts = [layout.ljust(DIGEST_NBYTES, b"\0") for layout in summaries.layouts]
    explicit = [segment.has_explicit_boxes for segment in summaries.segments]
    ends = list(accumulate(summaries.counts.tolist(), initial=0))
    found = []
    for group, begin, end in zip(summaries.groups, ends, ends[1:], strict=False):
        header = group.header
        parent = header.parent  # absent: zeros, and no attempt is 0
        head = _HEAD.pack(
            header.group.index,
            header.group.count,
            header.world_size,
            parent.step,
            parent.attempt,
            end - begin,
        )
        parts = (
            head,
            ranks[begin:end].tobytes(),
            sizes[8 * begin : 8 * end],
            *layouts[begin:end],
            bytes(explicit[begin:end]),
            header.run.encode(),
            header.run_id.encode(),
        )
        found.append(digest(b"".join(parts)))
    return found


def _pattern(segment: disk_pb2.SegmentSummary) -> bytes:
    state = segment.state_digest.ljust(DIGEST_NBYTES, b"\0")
    references = [struct.pack("<QI", other.step, other.attempt) for other in segment.references]
    return b"".join((segment.layout_digest, state, struct.pack("<I", len(references)), *references))


def mark_prefix(ident: CheckpointId) -> str:
    """``index/<id>/mark-``."""
    return f"{index_prefix(ident)}mark-"


def mark_key(ident: CheckpointId, mark: GroupMark) -> str:
    """``index/<id>/mark-00002-of-12500.<claims>.<pattern>.<envelope>``, and ``.<stored>`` where there is."""
    name = f"mark-{mark.index:05d}-of-{mark.count:05d}.{mark.claims}.{mark.pattern}.{mark.envelope}"
    return index_prefix(ident) + name + (f".{mark.stored}" if mark.stored else "")


@dataclass(frozen=True, slots=True)
class MarkColumns:
    """The marks of all groups of a checkpoint, in order, as columns (digests hexadecimal).

    Attributes:
        claims, patterns, envelopes, stored: (groups,) what the names say.
    """

    claims: tuple[str, ...]
    patterns: tuple[str, ...]
    envelopes: tuple[str, ...]
    stored: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.claims)

    def __getitem__(self, number: int) -> GroupMark:
        return GroupMark(
            number,
            len(self),
            self.claims[number],
            self.patterns[number],
            self.envelopes[number],
            self.stored[number],
        )

    def members(self) -> dict[str, list[int]]:
        """Return the group numbers of each distinct pattern, ascending."""
        found: dict[str, list[int]] = {}
        for number, pattern in enumerate(self.patterns):
            found.setdefault(pattern, []).append(number)
        return found


def parse_mark_names(names: Iterable[str]) -> MarkColumns | None:
    """Return the marks that ``names`` are, or None unless every group of the checkpoint has exactly one.

    Args:
        names: keys without ``index/<id>/``, ascending; foreign ones are passed over.
    """
    # One call for all: a match object and a record per name would cost several times the listing itself.
    found = _MARK.findall("\n".join(names))
    if not found:
        return None
    indexes, counts, claims, patterns, envelopes, stored = zip(*found, strict=True)
    expected = [f"{number:05d}" for number in range(len(found))]
    if list(indexes) != expected or set(counts) != {f"{len(found):05d}"}:
        return None
    return MarkColumns(claims, patterns, envelopes, stored)
