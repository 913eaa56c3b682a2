"""What must hold of a committed checkpoint, as functions. Run before a commit and by verify.

G1 Every group index is of this checkpoint: one run, run id, id, world size, parent and number of groups. (A
   run id that is missing says nothing: an older version wrote it.)
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

from collections.abc import Mapping, Sequence

import numpy as np

from ckpt.digest import DIGEST_NBYTES
from ckpt.errors import CkptError, CorruptError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import segment_keys
from ckpt.format.layout import LayoutSet, Mesh, TensorLayout, merge_layout_sets
from ckpt.format.manifest import GroupIndex, groups_digest, stored_nbytes
from ckpt.format.summaries import Summaries
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "check_coverage",
    "check_groups",
    "check_layouts",
    "check_manifest",
    "check_segments",
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


def check_groups(ident: CheckpointId, summaries: Summaries) -> list[CkptError]:
    """Check G1, G2 and G3. ``summaries``: of all groups, in order."""
    groups = summaries.groups
    if not groups:
        return [CorruptError("checkpoint has no group index", code="groups", checkpoint=ident)]
    first = groups[0].header
    expected = {**_identity(first), "id": (ident.step, ident.attempt)}
    problems: list[CkptError] = []
    for group in groups:
        problems += _identity_problems(group, _identity(group.header), expected)
    problems += check_segments(ident, summaries)
    problems += _check_ranks(ident, summaries, first.world_size)
    return problems


def _identity(header: disk_pb2.GroupHeader) -> dict[str, object]:
    parent = (header.parent.step, header.parent.attempt) if header.HasField("parent") else None
    return {
        "id": (header.id.step, header.id.attempt),
        "run": header.run,
        "run_id": header.run_id,
        "world_size": header.world_size,
        "parent": parent,
        "group_count": header.group.count,
    }


def _identity_problems(
    group: GroupIndex, found: Mapping[str, object], expected: Mapping[str, object]
) -> list[CkptError]:
    if found == expected:
        return []
    unknown = [] if found["run_id"] and expected["run_id"] else ["run_id"]
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
        if found[field] != expected[field] and field not in unknown
    ]


def _check_ranks(ident: CheckpointId, summaries: Summaries, world_size: int) -> list[CkptError]:
    problems: list[CkptError] = []
    groups = summaries.groups
    named = [list(group.header.group.ranks) for group in groups]
    numbers = [group.header.group.index for group in groups]
    smallest = [min(ranks, default=-1) for ranks in named]
    is_complete = groups[0].header.group.count == len(groups)  # before a list of that length is made
    if not is_complete or numbers != list(range(len(groups))) or smallest != sorted(smallest):
        problems.append(
            CorruptError(
                "G2: groups are not numbered by their smallest rank", code="groups", checkpoint=ident
            )
        )
    listed = np.split(summaries.ranks, np.cumsum(summaries.counts)[:-1])
    if (
        summaries.ranks.tolist() != [rank for ranks in named for rank in ranks]
        or [len(ranks) for ranks in named] != summaries.counts.tolist()
    ):
        problems += [
            CorruptError("G2: group index lacks segments of its ranks", code="ranks", key=group.key)
            for group, have, ranks in zip(groups, listed, named, strict=True)
            if have.tolist() != ranks
        ]
    owners, count = np.unique(summaries.ranks, return_counts=True)
    extra = owners[(count > 1) | (owners >= world_size)]
    known = owners[owners < world_size]
    missing = world_size - len(known)
    if missing or len(extra):
        # The first ranks that are missing lie below the number of those that are there, plus as many.
        shown = np.setdiff1d(np.arange(min(world_size, len(known) + _SHOWN)), known)[:_SHOWN]
        problems.append(
            CorruptError(
                "G2: not every rank has exactly one segment",
                code="ranks",
                checkpoint=ident,
                missing=shown.tolist(),
                extra=extra[:_SHOWN].tolist(),
                total=missing + len(extra),
            )
        )
    return problems


def check_segments(ident: CheckpointId, summaries: Summaries) -> list[CkptError]:
    """Check G3: one comparison per property over all segments; only what is wrong is looked at singly."""
    segments = summaries.segments
    offsets = np.array([segment.index_offset for segment in segments], dtype=np.uint64)
    sizes = np.array([segment.index_nbytes for segment in segments], dtype=np.uint64)
    ends = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(sizes, dtype=np.uint64)])
    begins = np.cumsum(summaries.counts) - summaries.counts
    expected = ends[:-1] - np.repeat(ends[begins], summaries.counts)
    wrong = set(np.flatnonzero(offsets != expected).tolist())
    wrong |= _unlike(
        [segment.object_key for segment in segments], segment_keys(ident, summaries.ranks.tolist())
    )
    right = [DIGEST_NBYTES] * len(segments)
    wrong |= _unlike([len(segment.index_digest) for segment in segments], right)
    wrong |= _unlike(list(map(len, summaries.layouts)), right)
    owner = np.repeat(np.arange(len(summaries.groups)), summaries.counts) if wrong else ()
    return [
        CorruptError(
            "G3: segment summary is malformed",
            code="summary",
            key=summaries.groups[owner[position]].key,
            rank=segments[position].rank,
        )
        for position in sorted(wrong)
    ]


def _unlike(found: Sequence[object], expected: Sequence[object]) -> set[int]:
    """Return the positions at which two lists of one length differ."""
    if found == expected:  # the whole at once: nearly always
        return set()
    return {i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b}


def layout_digests(summaries: Summaries) -> dict[bytes, list[int]]:
    """Return the distinct layout digests of the segments, each with its ranks, in order of first segment."""
    found: dict[bytes, list[int]] = {}
    for key, rank in zip(summaries.layouts, summaries.ranks.tolist(), strict=True):
        found.setdefault(key, []).append(rank)
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


def merged_references(summaries: Summaries) -> list[CheckpointId]:
    """Return the other checkpoints whose objects any segment needs, ascending."""
    return sorted({other for _, other in summaries.references})


def check_manifest(manifest: disk_pb2.Manifest, summaries: Summaries, merged: LayoutSet) -> list[CkptError]:
    """Check G6."""
    groups = summaries.groups
    first = groups[0].header
    run_id = next((group.header.run_id for group in groups if group.header.run_id), "")
    claims: dict[str, tuple[object, object]] = {
        "run": (manifest.run, first.run),
        "run_id": (manifest.run_id or run_id, run_id or manifest.run_id),
        "world_size": (manifest.world_size, first.world_size),
        "group_count": (manifest.group_count, len(groups)),
        "groups_digest": (manifest.groups_digest.hex(), groups_digest(groups).hex()),
        "layout_digest": (manifest.layout_digest.hex(), merged.digest.hex()),
        "nbytes": (manifest.nbytes, sum(summaries.nbytes)),
        "stored_nbytes": (stored_nbytes(manifest), sum(map(stored_nbytes, summaries.segments))),
        "tensor_count": (manifest.tensor_count, len(merged)),
        "has_explicit_boxes": (manifest.has_explicit_boxes, summaries.has_explicit_boxes),
        "references": (
            [CheckpointId.from_proto(other) for other in manifest.references],
            merged_references(summaries),
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
