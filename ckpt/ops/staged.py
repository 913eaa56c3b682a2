"""A step that is sealed on nodes and not committed (yet), proved to be whole: used like a committed one.

What the commit will look at in the store (the group indexes), a restore collects from the nodes that hold
the segments: one header per segment. The proof is the same (ckpt.ops.proof). Nothing here makes it a
checkpoint for anybody else: listings, ``latest`` and other readers know only what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ckpt.clock import Clock
from ckpt.digest import digest
from ckpt.errors import CorruptError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import group_key
from ckpt.format.layout import LayoutSet
from ckpt.format.manifest import GroupIndex
from ckpt.format.summaries import Summaries
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.proof import make_manifest, prove_parts
from ckpt_proto.v1 import disk_pb2

__all__ = ["StagedCheckpoint", "join_headers", "prove_staged"]


class StagedCheckpoint(Checkpoint):
    """Has the interface of a committed checkpoint; its segments come from tiers.

    Asked for a segment index itself, it looks into the store: a node may have published its group index by
    now, and then the bytes are there too.

    Args:
        store: of the run.
        manifest: of :func:`prove_staged`; never stored.
        layouts: the merged layouts.
    """

    def _check(self, groups: Sequence[GroupIndex]) -> None:
        """Nothing: the manifest was made from sealed indexes, and these are the published ones."""


def join_headers(ident: CheckpointId, headers: Iterable[disk_pb2.GroupHeader]) -> Summaries:
    """Join headers with one segment each, of which several may be of copies, to those of whole groups.

    Raises:
        CorruptError: code "copies-differ": two copies of a segment are not the same segment;
            "group-identity": members of a group say different things about it.
    """
    by_rank: dict[int, disk_pb2.GroupHeader] = {}
    for header in headers:
        (summary,) = header.segments
        known = by_rank.setdefault(summary.rank, header)
        if known is not header and known != header:
            raise CorruptError(
                "nodes hold different segments of one rank and step",
                code="copies-differ",
                checkpoint=ident,
                rank=summary.rank,
            )
    groups: dict[int, disk_pb2.GroupHeader] = {}
    for _, header in sorted(by_rank.items()):
        group = groups.setdefault(header.group.index, header)
        if group is header:
            continue
        if _identity(group) != _identity(header):
            raise CorruptError(
                "G1: ranks of one group disagree on what it is",
                code="group-identity",
                checkpoint=ident,
                ranks=(group.segments[0].rank, header.segments[0].rank),
            )
        group.segments.extend(header.segments)
    return Summaries.of([_as_group_index(ident, groups[number]) for number in sorted(groups)])


def _identity(header: disk_pb2.GroupHeader) -> bytes:
    bare = disk_pb2.GroupHeader(
        run=header.run,
        id=header.id,
        group=header.group,
        world_size=header.world_size,
        run_id=header.run_id,
    )
    if header.HasField("parent"):
        bare.parent.CopyFrom(header.parent)
    return bare.SerializeToString(deterministic=True)


def _as_group_index(ident: CheckpointId, header: disk_pb2.GroupHeader) -> GroupIndex:
    return GroupIndex(
        key=group_key(ident, header.group.index, header.group.count),
        header=header,
        header_nbytes=0,
        digest=digest(header.SerializeToString(deterministic=True)),
    )


def prove_staged(
    ident: CheckpointId,
    headers: Iterable[disk_pb2.GroupHeader],
    read_layout: Callable[[bytes], LayoutSet],
    clock: Clock,
) -> tuple[disk_pb2.Manifest, Summaries]:
    """Prove from the headers of all segments that ``ident`` is whole, as a commit would.

    Args:
        ident: which step.
        headers: of :func:`ckpt.format.manifest.single_header`, at least one per rank, from any nodes.
        read_layout: returns the layout set of a digest.
        clock: for the time noted in the manifest.

    Returns:
        The manifest that a commit would write, and the summaries.

    Raises:
        CorruptError: a rank is missing, or the parts do not make this step.
        CkptError: what ``read_layout`` raises.
    """
    summaries = join_headers(ident, headers)
    _, whole = prove_parts(ident, summaries, read_layout)
    return make_manifest(ident, whole, {}, clock), summaries
