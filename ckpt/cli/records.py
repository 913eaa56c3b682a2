"""What the commands show: plain values, the same whichever way they were fetched.

The field names are the keys of ``--json`` and stay. Checkpoints are in their text form, sizes in bytes,
times in Unix seconds, contexts of problems as text. Only the standard library is imported here, so that
``ckpt --help`` need not load protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "CopiesRow",
    "Details",
    "Listing",
    "MendedRow",
    "MeshRow",
    "Policy",
    "Problem",
    "PrunePlan",
    "Repair",
    "Row",
    "RunRow",
    "SegmentRow",
    "Shown",
    "Sweep",
    "SweptRow",
    "TensorRow",
    "VerdictRow",
    "Verified",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What a manifest says that a key does not.

    Attributes:
        nbytes: sum of the segments.
        world_size: ranks that saved.
        tensor_count: number of tensors.
        parent: what the attempt resumed from; None for a fresh start.
        run: name of the run that saved it.
        run_id: of its life; empty: an older version saved it.
    """

    nbytes: int
    world_size: int
    tensor_count: int
    parent: str | None
    run: str
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesRow:
    """What one node holds of a checkpoint.

    Attributes:
        node: address of its server, else the host's name.
        here: the node that was asked.
        ranks: sealed there.
        replica_ranks: replicas of other nodes' segments.
        problem: why the node does not say.
    """

    node: str
    here: bool
    ranks: list[int]
    replica_ranks: list[int]
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint of a listing.

    Attributes:
        checkpoint: its id.
        step, attempt: the parts of the id.
        committed: False: only sealed on this node so far.
        committed_at: by the store's clock; None where it is not committed.
        latest: what a restore would choose.
        pinned: retention leaves it alone.
        local: at least one of its segments is in the staging directory (of the server, where one is asked).
        copies: what nodes hold of it; None: they were not asked.
    """

    checkpoint: str
    step: int
    attempt: int
    committed: bool
    committed_at: float | None
    latest: bool
    pinned: bool
    local: bool
    copies: list[CopiesRow] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as ``--json`` shows it; ``context`` names object, chunk, rank, ..."""

    kind: str
    code: str
    message: str
    context: Mapping[str, str]

    def __str__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self.context.items())
        return f"{self.message} ({values})" if values else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every checkpoint of a run, newest first.

    Attributes:
        rows: the checkpoints.
        problem: why it is unknown which one is the latest.
        run_id: of the run's present life; empty: not known.
    """

    rows: list[Row]
    problem: Problem | None = None
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRow:
    """A device mesh: its shape and the names of its dims, where they have any."""

    shape: list[int]
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor.

    Attributes:
        name, dtype, shape: of the whole tensor.
        nbytes: of the whole tensor, stored once.
        mesh: over which it is split.
        placements: one per mesh dim: "Shard(0)", "Replicate()", "StridedShard(0, 2)".
        ranks: those that store a part of it.
    """

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    mesh: MeshRow
    placements: list[str]
    ranks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """One rank's segment.

    Attributes:
        rank: whose.
        nbytes: raw size.
        stored_nbytes: of its own object: compressed, without what is borrowed.
        object_key: where it is in the store, relative to the run's URL.
        local_path: the sealed copy in the staging directory, or None.
    """

    rank: int
    nbytes: int
    stored_nbytes: int
    object_key: str
    local_path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One checkpoint in full. ``committed_at`` is by the committer's clock; ``stored_nbytes`` is what its own
    objects take: compressed, without chunks that lie in older checkpoints' objects. ``copies`` is what nodes
    hold of it: this one, and through a server every one that it knows of the run. ``foreign`` says so where
    it is not of the run at this URL.
    """

    url: str
    checkpoint: str
    step: int
    attempt: int
    committed_at: float
    nbytes: int
    stored_nbytes: int
    world_size: int
    group_count: int
    tensor_count: int
    has_explicit_boxes: bool
    pinned: bool
    parent: str | None
    references: list[str]
    environment: Mapping[str, str]
    tensors: list[TensorRow]
    segments: list[SegmentRow]
    copies: list[CopiesRow]
    run: str
    run_id: str
    foreign: Problem | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Outcome of one verification.

    Attributes:
        checkpoint: which.
        checked_nbytes: bytes read and compared (deep), else 0.
        problems: all the damage that was found; empty: none.
    """

    checkpoint: str
    checked_nbytes: int
    problems: list[Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class MendedRow:
    """An object, or a copy on the node (its path), that was damaged and is good again.

    Attributes:
        key: which.
        code: what was wrong.
        sources: how many chunks came from which tier; "remote" were good in the object itself.
    """

    key: str
    code: str
    sources: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Outcome of a repair (of a dry run: what it would be).

    Attributes:
        checkpoint: which.
        mended: what is good again.
        left: what is still damaged.
        unreachable: peers that did not answer.
    """

    checkpoint: str
    mended: list[MendedRow]
    left: list[Problem]
    unreachable: Mapping[str, Problem]

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to prune: a retention rule, or exactly ``checkpoints`` (then the numbers are 0)."""

    keep_last: int = 0
    keep_every: int = 0
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    """What becomes of one checkpoint, and why."""

    checkpoint: str
    keep: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """Verdicts, newest first, and what the deletion comes to.

    Attributes:
        objects: how many go.
        held: those to delete whose objects stay, because others hold chunks in them.
        freed: those deleted earlier whose objects go now, because nobody needs them any more.
    """

    verdicts: list[VerdictRow]
    objects: int
    held: list[str]
    freed: list[str]

    @property
    def condemned(self) -> list[str]:
        """Those to delete, newest first."""
        return [verdict.checkpoint for verdict in self.verdicts if not verdict.keep]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRow:
    """What went (dry run: would go) of a checkpoint that does not exist: ``objects`` keys."""

    checkpoint: str
    objects: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Outcome of a sweep.

    Attributes:
        rows: by checkpoint, oldest first.
        uploads: unfinished uploads that were aborted; None where the store cannot list them.
    """

    rows: list[SweptRow]
    uploads: int | None

    @property
    def objects(self) -> int:
        return sum(row.objects for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run. ``checkpoints`` counts the committed ones; ``latest`` is None where there is none."""

    run: str
    url: str
    checkpoints: int
    latest: str | None
