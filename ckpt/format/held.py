"""What a node says it holds of a checkpoint, on the wire and between the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CorruptError
from ckpt.format.ids import CheckpointId
from ckpt.format.limits import MALFORMED, MAX_WORLD_SIZE
from ckpt_proto.v1 import peer_pb2

__all__ = ["Held", "ranks_from_text", "ranks_to_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one node holds of one checkpoint.

    Attributes:
        ident: which.
        world_size: number of ranks, each with one segment.
        is_committed: the node knows that it is; False: it may be all the same.
        own: ranks whose segment was sealed on the node, ascending.
        replicas: ranks of other nodes whose segment it has a replica of, ascending.
        run_id: of the run's life that saved it; empty: not known.
    """

    ident: CheckpointId
    world_size: int
    is_committed: bool
    own: tuple[int, ...]
    replicas: tuple[int, ...]
    run_id: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.own, *self.replicas)

    def to_json(self) -> list[Any]:
        """Return what JSON can carry, short where ranks are neighbours."""
        ranks = [ranks_to_text(self.own), ranks_to_text(self.replicas)]
        return [str(self.ident), self.world_size, self.is_committed, *ranks, self.run_id]

    @classmethod
    def from_json(cls, body: Sequence[Any]) -> Held:
        """Parse :meth:`to_json`. Raises CorruptError."""
        try:
            ident, world_size, is_committed, own, replicas, run_id = body
            return cls(
                ident=CheckpointId.parse(ident),
                world_size=int(world_size),
                is_committed=bool(is_committed),
                own=ranks_from_text(own),
                replicas=ranks_from_text(replicas),
                run_id=str(run_id),
            )
        except MALFORMED as error:
            raise CorruptError("what a node says it holds is malformed", code="decode") from error

    def to_proto(self) -> peer_pb2.HeldCheckpoint:
        """Return the message; headers are added by who wants them."""
        held = [(rank, False) for rank in self.own] + [(rank, True) for rank in self.replicas]
        return peer_pb2.HeldCheckpoint(
            id=self.ident.to_proto(),
            world_size=self.world_size,
            is_committed=self.is_committed,
            segments=[peer_pb2.HeldSegment(rank=rank, is_replica=replica) for rank, replica in sorted(held)],
            run_id=self.run_id,
        )

    @classmethod
    def from_proto(cls, message: peer_pb2.HeldCheckpoint) -> Held:
        return cls(
            ident=CheckpointId.from_proto(message.id),
            world_size=message.world_size,
            is_committed=message.is_committed,
            own=tuple(segment.rank for segment in message.segments if not segment.is_replica),
            replicas=tuple(segment.rank for segment in message.segments if segment.is_replica),
            run_id=message.run_id,
        )


def ranks_to_text(ranks: Iterable[int]) -> str:
    """Return ascending ``ranks`` as "0-7,12": a node of 8 takes a few characters, however many there are."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_from_text(text: str) -> tuple[int, ...]:
    """Parse :func:`ranks_to_text`. Raises ValueError."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ranks = range(int(first), int(last or first) + 1)
        if ranks.stop > MAX_WORLD_SIZE or len(found) + len(ranks) > MAX_WORLD_SIZE:
            raise ValueError("more ranks than any job has")
        found.extend(ranks)
    return tuple(found)
