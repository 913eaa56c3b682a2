"""This start of the run: its number, what it resumed from, and what it has saved so far."""

from __future__ import annotations

from ckpt.errors import RefusedError
from ckpt.format.ids import CheckpointId
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.pipeline import Origin

__all__ = ["Lineage"]


class Lineage:
    """Bookkeeping of one attempt after another; every rank's is the same.

    Args:
        run: name of the run.
        rank: global rank.
        world_size: number of ranks.
        audit_every: see :class:`ckpt_trainer_hooks.CheckpointManager`.
    """

    def __init__(self, run: str, *, rank: int, world_size: int, audit_every: int) -> None:
        self.attempt: int | None = None  # None before the first restore()
        self.parent: CheckpointId | None = None
        self.run_id = ""  # of the run's life
        self._run, self._rank, self._world_size = run, rank, world_size
        self._audit_every = audit_every
        self._saves = 0
        self.last_saved: int | None = None

    @property
    def first_step(self) -> int:
        """Completed optimizer steps when this attempt began."""
        return 0 if self.parent is None else self.parent.step

    def begin(self, attempt: int, parent: CheckpointId | None, run_id: str) -> None:
        """A new attempt of the run ``run_id``, which resumed from ``parent`` or began afresh."""
        self.attempt, self.parent, self.run_id = attempt, parent, run_id
        self._saves, self.last_saved = 0, None

    def check_order(self, step: int, *, retake: bool) -> None:
        """Raise RefusedError unless ``step`` comes after the last one saved, or is it where that was torn."""
        last = self.last_saved
        if last is None or step > last or (step == last and retake):
            return  # of a torn snapshot nothing was handed over
        raise RefusedError("steps of one attempt must grow", code="step-order", step=step, last=last)

    def audit_shift(self) -> int | None:
        """Which audit the next save is, or None; counted alike on every rank."""
        due = self._audit_every > 0 and self._saves % self._audit_every == 0
        return self._saves // self._audit_every if due and self._world_size > 1 else None

    def note_saved(self, step: int) -> None:
        self._saves += 1
        self.last_saved = step

    def origin(self, group: common_pb2.NodeGroup) -> Origin:
        """What segment indexes say about where they come from."""
        assert self.attempt is not None
        return Origin(
            run=self._run,
            run_id=self.run_id,
            rank=self._rank,
            world_size=self._world_size,
            attempt=self.attempt,
            parent=self.parent,
            group=group,
        )
