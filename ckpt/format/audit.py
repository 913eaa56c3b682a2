"""Replicated state is stored once and striped, which trusts replicas to be equal. Here they are compared.

In an audited snapshot each rank digests, from its own copy of a replicated tensor, the stripe that another
replica stores; that replica digests what it stores. The committer compares the two. One audit costs a rank
one more pass over its share, and finds at once state that was never replicated; a single corrupted replica
is found by the audit whose shift meets the damaged stripe, after all R - 1 shifts at the latest. Small
tensors, which one replica keeps whole, are compared by every replica in every audit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import CkptError, CorruptError
from ckpt.format.layout import (
    LayoutSet,
    Mesh,
    Stripe,
    TensorLayout,
    local_region,
    owned_stripe,
    replica_at,
    replication,
)
from ckpt_proto.v1 import disk_pb2

__all__ = ["AUDIT_DIGEST_NBYTES", "audited_stripe", "check_replicas"]

AUDIT_DIGEST_NBYTES = 8
_SHOWN = 8


def audited_stripe(layout: TensorLayout, rank: int, shift: int) -> Stripe | None:
    """Return what ``rank`` digests for comparison: the stripe that its peer stores.

    None where the tensor has no other replica, or ``rank`` keeps it alone (all others compare with it).
    """
    count, index, keeper = replication(layout, rank)
    region = local_region(layout, rank)
    if count == 1 or region is None or region.is_empty or index == keeper:
        return None
    peer = keeper if keeper is not None else (index + _step(count, shift)) % count
    return owned_stripe(layout, replica_at(layout, rank, peer))


def _step(count: int, shift: int) -> int:
    return 1 + shift % (count - 1)


@lru_cache(maxsize=1024)
def _replicas(mesh: Mesh, replica_dims: tuple[int, ...]) -> NDArray[np.int64]:
    """Return ranks as (shards, replicas): a row holds the replicas of one shard, by replica index."""
    ranks = np.array(mesh.ranks, dtype=np.int64).reshape(mesh.shape)
    others = [dim for dim in range(len(mesh.shape)) if dim not in replica_dims]
    count = math.prod(mesh.shape[dim] for dim in replica_dims)
    return ranks.transpose([*others, *replica_dims]).reshape(-1, count)


@dataclass(frozen=True, slots=True)
class _Digests:
    """What the ranks with one layout set say: (ranks, tensors) each."""

    names: Mapping[str, int]
    ranks: NDArray[np.int64]
    own: NDArray[np.uint64]
    other: NDArray[np.uint64]


def check_replicas(
    segments: Sequence[disk_pb2.SegmentSummary], layouts: Mapping[bytes, LayoutSet], *, world_size: int
) -> list[CkptError]:
    """Compare the replicas of an audited snapshot; return one error per tensor that differs, naming ranks.

    A snapshot without audit, or one that not every rank audited, is not compared.

    Args:
        segments: of every rank.
        layouts: by digest.
        world_size: number of ranks.
    """
    audited = [segment for segment in segments if segment.HasField("audit")]
    if len(audited) != len(segments) or not audited:
        return []
    shifts = {segment.audit.shift for segment in audited}
    if len(shifts) != 1:
        return []
    tables = [_table(key, layouts[key], audited) for key in {segment.layout_digest for segment in audited}]
    named: dict[str, TensorLayout] = {}
    for key in {segment.layout_digest for segment in audited}:
        for name, layout in layouts[key].items():
            named.setdefault(name, layout)
    found = []
    for name, layout in named.items():
        wrong = _compare(name, layout, tables, shifts.copy().pop(), world_size)
        if wrong:
            found.append(_error(name, wrong))
    return found


def _table(key: bytes, layouts: LayoutSet, segments: Iterable[disk_pb2.SegmentSummary]) -> _Digests:
    mine = [segment for segment in segments if segment.layout_digest == key]
    size = len(layouts)

    def matrix(rows: list[bytes]) -> NDArray[np.uint64]:
        padded = [row.ljust(size * AUDIT_DIGEST_NBYTES, b"\0")[: size * AUDIT_DIGEST_NBYTES] for row in rows]
        return np.frombuffer(b"".join(padded), dtype="<u8").reshape(len(rows), size)

    return _Digests(
        names={name: position for position, name in enumerate(layouts)},
        ranks=np.array([segment.rank for segment in mine], dtype=np.int64),
        own=matrix([segment.audit.own for segment in mine]),
        other=matrix([segment.audit.other for segment in mine]),
    )


def _compare(
    name: str, layout: TensorLayout, tables: Sequence[_Digests], shift: int, world_size: int
) -> list[int]:
    """Return the ranks that are at odds over the tensor."""
    dims = layout.replica_dims
    count = math.prod(layout.mesh.shape[dim] for dim in dims)
    if count == 1:
        return []
    own: NDArray[Any] = np.zeros(world_size, dtype=np.uint64)
    other: NDArray[Any] = np.zeros(world_size, dtype=np.uint64)
    for table in tables:
        position = table.names.get(name)
        if position is not None:
            own[table.ranks] = table.own[:, position]
            other[table.ranks] = table.other[:, position]
    rows = _replicas(layout.mesh, dims)
    _, _, keeper = replication(layout, int(rows[0, 0]))
    if keeper is not None:
        peers = np.broadcast_to(rows[:, keeper : keeper + 1], rows.shape)
    else:
        peers = np.roll(rows, -_step(count, shift), axis=1)
    told = (other[rows] != 0) & (own[peers] != 0)
    differs = told & (other[rows] != own[peers])
    wrong: set[int] = set()
    for shard in np.flatnonzero(differs.any(axis=1)):
        odd = {int(rank) for rank in rows[shard][differs[shard]]}
        if keeper is None or count == 2:  # one rank against one: who is right cannot be told
            wrong |= odd | {int(peer) for peer in peers[shard][differs[shard]]}
        else:
            wrong |= _minority(odd, int(rows[shard][keeper]), other, count)
    return sorted(wrong)


def _minority(odd: set[int], keeper: int, other: NDArray[Any], count: int) -> set[int]:
    """Every replica compared the whole tensor with the keeper's, and ``odd`` found another one."""
    votes = Counter(int(other[rank]) for rank in odd)
    # Most agree with each other and not with the keeper: then it is the keeper that is wrong.
    return {keeper} if votes.most_common(1)[0][1] * 2 > count - 1 else odd


def _error(name: str, ranks: list[int]) -> CkptError:
    return CorruptError(
        "replicas of a tensor differ: silent corruption, or state that was never replicated and must be "
        "declared per rank",
        code="replicas-differ",
        tensor=name,
        ranks=ranks[:_SHOWN],
        total=len(ranks),
    )
