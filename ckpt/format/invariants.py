"""What must hold of a committed checkpoint, as functions. Run before a commit and by verify.

G1 Every group index is of this checkpoint: one run, id, world size, parent and number of groups.
G2 The groups are numbered in the order of their smallest rank, and each rank 0 .. world_size - 1 is in
   exactly one of them, with exactly one segment.
G3 Every segment summary is whole: its key is the one of its rank, its digests are 16 bytes, its index lies
   where the summaries before it end.
G4 Every layout that a segment names is there, and all agree on shape and dtype of each tensor.
G5 Every tensor is covered: each rank of its mesh has a segment that was written under this very layout. (What
   such a rank stores follows by arithmetic, so no box needs to be looked at, and no rank be counted twice.)
G6 The manifest says what the group indexes say: digest, number of groups and ranks, sizes, references.

Each function returns the violations it found, as errors not raised, so that a report can show them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ckpt.digest import DIGEST_NBYTES
from ckpt.errors import CkptError, CorruptError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import segment_key
from ckpt.format.layout import LayoutSet, Mesh, TensorLayout, merge_layout_sets
from ckpt.format.manifest import GroupIndex, groups_digest
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "check_coverage",
    "check_groups",
    "check_layouts",
    "check_manifest",
    "layout_digests",
    "merged_references",
    "raise_first",
]

_SHOWN = 5


def raise_first(problems: Sequence[CkptError]) -> None:
    """Raise the first of ``problems``, saying how many there are. Nothing where there is none."""
    if not problems:
        return
    first = problems[0]
    if len(problems) > 1:
        first.context["problems"] = len(problems)
    raise first


def check_groups(ident: CheckpointId, groups: Sequence[GroupIndex]) -> list[CkptError]:
    """Check G1, G2 and G3. ``groups``: all of them, in order."""
    if not groups:
        return [CorruptError("checkpoint has no group index", code="groups", checkpoint=ident)]
    problems: list[CkptError] = []
    first = groups[0].header
    for group in groups:
        problems += _check_identity(ident, group, first)
        problems += _check_segments(ident, group)
    problems += _check_ranks(ident, groups, first.world_size)
    return problems


def _check_identity(ident: CheckpointId, group: GroupIndex, first: disk_pb2.GroupHeader) -> list[CkptError]:
    header = group.header
    expected = {
        "id": (ident.step, ident.attempt),
        "run": first.run,
        "world_size": first.world_size,
        "parent": _parent(first),
        "group_count": first.group.count,
    }
    found = {
        "id": (header.id.step, header.id.attempt),
        "run": header.run,
        "world_size": header.world_size,
        "parent": _parent(header),
        "group_count": header.group.count,
    }
    return [
        CorruptError(
            "G1: group index belongs to something else",
            code="group-identity",
            key=group.key,
            field=field,
            found=found[field],
            expected=expected[field],
        )
        for field in expected
        if found[field] != expected[field]
    ]


def _parent(header: disk_pb2.GroupHeader) -> tuple[int, int] | None:
    return (header.parent.step, header.parent.attempt) if header.HasField("parent") else None


def _check_ranks(ident: CheckpointId, groups: Sequence[GroupIndex], world_size: int) -> list[CkptError]:
    problems: list[CkptError] = []
    numbers = [group.header.group.index for group in groups]
    smallest = [min(group.header.group.ranks, default=-1) for group in groups]
    if numbers != list(range(groups[0].header.group.count)) or smallest != sorted(smallest):
        problems.append(
            CorruptError(
                "G2: groups are not numbered by their smallest rank", code="groups", checkpoint=ident
            )
        )
    owners: dict[int, int] = defaultdict(int)
    for group in groups:
        for segment in group.header.segments:
            owners[segment.rank] += 1
        if [segment.rank for segment in group.header.segments] != list(group.header.group.ranks):
            problems.append(
                CorruptError("G2: group index lacks segments of its ranks", code="ranks", key=group.key)
            )
    missing = [rank for rank in range(world_size) if rank not in owners]
    extra = [rank for rank, count in owners.items() if count > 1 or rank >= world_size]
    if missing or extra:
        problems.append(
            CorruptError(
                "G2: not every rank has exactly one segment",
                code="ranks",
                checkpoint=ident,
                missing=missing[:_SHOWN],
                extra=sorted(extra)[:_SHOWN],
                total=len(missing) + len(extra),
            )
        )
    return problems


def _check_segments(ident: CheckpointId, group: GroupIndex) -> list[CkptError]:
    problems: list[CkptError] = []
    end = 0
    for segment in group.header.segments:
        sound = (
            segment.object_key == segment_key(ident, segment.rank)
            and len(segment.layout_digest) == len(segment.index_digest) == DIGEST_NBYTES
            and segment.index_offset == end
        )
        if not sound:
            problems.append(
                CorruptError(
                    "G3: segment summary is malformed", code="summary", key=group.key, rank=segment.rank
                )
            )
        end = segment.index_offset + segment.index_nbytes
    return problems


def layout_digests(groups: Iterable[GroupIndex]) -> dict[bytes, list[int]]:
    """Return the distinct layout digests of the segments, each with its ranks, in order of first rank."""
    found: dict[bytes, list[int]] = {}
    for group in groups:
        for segment in group.header.segments:
            found.setdefault(segment.layout_digest, []).append(segment.rank)
    return found


def check_layouts(
    used: Mapping[bytes, Sequence[int]], layouts: Mapping[bytes, LayoutSet]
) -> tuple[LayoutSet, list[CkptError]]:
    """Check G4 and return the merged layouts (of those that are there).

    Args:
        used: from :func:`layout_digests`.
        layouts: the layout sets that could be read, by digest.
    """
    problems: list[CkptError] = [
        CorruptError("G4: layout is not in the store", code="layout-missing", layout=key.hex(), rank=ranks[0])
        for key, ranks in used.items()
        if key not in layouts
    ]
    try:
        merged = merge_layout_sets(layouts[key] for key in used if key in layouts)
    except CorruptError as error:
        return LayoutSet(()), [*problems, error]
    return merged, problems


def check_coverage(
    merged: LayoutSet, used: Mapping[bytes, Sequence[int]], layouts: Mapping[bytes, LayoutSet]
) -> list[CkptError]:
    """Check G5. Costs O(tensors x distinct layout sets + ranks x distinct meshes), not ranks x tensors."""
    proofs: dict[tuple[Mesh, tuple[bytes, ...]], list[int]] = {}
    problems: list[CkptError] = []
    for name, layout in merged.items():
        writers = _writers(name, layout, used, layouts)
        proof = (layout.mesh, writers)
        if proof not in proofs:
            have = {rank for key in writers for rank in used[key]}
            proofs[proof] = [rank for rank in layout.mesh.ranks if rank not in have]
        holes = proofs[proof]
        if holes:
            problems.append(
                CorruptError(
                    "G5: ranks that hold part of a tensor have no segment with it",
                    code="coverage",
                    tensor=name,
                    ranks=holes[:_SHOWN],
                    total=len(holes),
                )
            )
    return problems


def _writers(
    name: str, layout: TensorLayout, used: Mapping[bytes, Sequence[int]], layouts: Mapping[bytes, LayoutSet]
) -> tuple[bytes, ...]:
    if len(used) == 1:  # nearly always: every rank was written under the one layout set there is
        return tuple(used)
    return tuple(key for key in used if key in layouts and layouts[key].get(name) == layout)


def merged_references(groups: Iterable[GroupIndex]) -> list[CheckpointId]:
    """Return the other checkpoints whose objects any segment needs, ascending."""
    return sorted(
        {
            CheckpointId.from_proto(other)
            for group in groups
            for segment in group.header.segments
            for other in segment.references
        }
    )


def check_manifest(
    manifest: disk_pb2.Manifest, groups: Sequence[GroupIndex], merged: LayoutSet
) -> list[CkptError]:
    """Check G6."""
    first = groups[0].header
    segments = [segment for group in groups for segment in group.header.segments]
    claims: dict[str, tuple[object, object]] = {
        "run": (manifest.run, first.run),
        "world_size": (manifest.world_size, first.world_size),
        "group_count": (manifest.group_count, len(groups)),
        "groups_digest": (manifest.groups_digest.hex(), groups_digest(groups).hex()),
        "layout_digest": (manifest.layout_digest.hex(), merged.digest.hex()),
        "nbytes": (manifest.nbytes, sum(segment.nbytes for segment in segments)),
        "tensor_count": (manifest.tensor_count, len(merged)),
        "has_explicit_boxes": (
            manifest.has_explicit_boxes,
            any(segment.has_explicit_boxes for segment in segments),
        ),
        "references": (
            [CheckpointId.from_proto(other) for other in manifest.references],
            merged_references(groups),
        ),
    }
    return [
        CorruptError(
            "G6: manifest and group indexes disagree",
            code="manifest",
            field=field,
            found=found,
            expected=real,
        )
        for field, (found, real) in claims.items()
        if found != real
    ]
