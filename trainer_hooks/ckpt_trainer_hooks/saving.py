"""One save of a manager: whether it may be made here and now, and how."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ckpt.errors import BusyError, InvalidInputError, SnapshotTornError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.accumulation import Accumulation
from ckpt_trainer_hooks.backlog import Backlog
from ckpt_trainer_hooks.compat import inside_pipeline_schedule
from ckpt_trainer_hooks.fence import OptimizerFence
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.lineage import Lineage
from ckpt_trainer_hooks.pipeline import SavePipeline
from ckpt_trainer_hooks.state import TrainState
from ckpt_trainer_hooks.waiting import arena_is_free

__all__ = ["Saver"]

_log = get_logger("manager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Makes saves in the order of training.

    Attributes:
        overlapped: copy while the next forward and backward run.
        on_busy: see :class:`ckpt_trainer_hooks.CheckpointManager`.
    """

    state: TrainState
    pipeline: SavePipeline
    lineage: Lineage
    accumulation: Accumulation
    fence: OptimizerFence
    overlapped: bool
    on_busy: str
    backlog: Backlog = field(default_factory=Backlog)

    def save(
        self, step: int, group: common_pb2.NodeGroup | None, *, on_busy: str | None = None
    ) -> SaveHandle:
        """Save the state after ``step`` completed optimizer steps.

        Args:
            step: see above.
            group: this rank's node group; None before the first restore().
            on_busy: instead of the usual one.

        Raises:
            InvalidInputError: something in the state cannot be stored, or it is not the place for a save.
            RefusedError: ``step`` is not above the last one saved.
            BusyError: the save before is still being written and ``on_busy`` is "fail".
        """
        if self.lineage.attempt is None or group is None:
            # Not done here: it talks to the store and to other ranks, and a save does neither.
            raise InvalidInputError(
                "call restore() before the first save, also for a fresh run: it gives this start of the run "
                "its number, and keeps it from beginning over existing checkpoints by accident",
                code="not-started",
            )
        if inside_pipeline_schedule():
            raise InvalidInputError(
                "a save from inside a pipeline schedule would hold a part of a step; save after its step()",
                code="inside-schedule",
            )
        ident = CheckpointId(step, self.lineage.attempt)
        if (deferred := self.accumulation.before_save(ident)) is not None:
            return deferred
        self.pipeline.wait_until_captured()
        self.lineage.check_order(step, retake=self.pipeline.retake_wanted)
        self.fence.warn_if_off_by_one(step, self.lineage.first_step)
        if self.pipeline.busy and not arena_is_free(self.pipeline, on_busy or self.on_busy, step):
            handle = SaveHandle(ident, skipped=True)
            handle.fail(BusyError("skipped: the save before is still being written", step=step))
            return handle
        return self._make(ident, group)

    def remember_boundary(self) -> None:
        """Keep the state between two iterations, where the accumulation wants that."""
        if self.accumulation.wants_boundaries:
            self.accumulation.remember(self.state.flatten())

    def check_all_saved(self) -> None:
        """Raise what went wrong with saves that are over, or was never made."""
        self.pipeline.finish_selftests()
        problems = self.pipeline.take_problems()
        if problems:
            raise problems[0]
        if (lost := self.accumulation.give_up("training ended before the optimizer stepped")) is not None:
            raise lost
        if self.pipeline.retake_wanted:
            raise SnapshotTornError(
                "the last snapshot was torn and thrown away, and no save took its place",
                step=self.lineage.last_saved,
            )

    def _make(self, ident: CheckpointId, group: common_pb2.NodeGroup) -> SaveHandle:
        retake = self.pipeline.retake_wanted
        self.pipeline.retake_wanted = False
        if retake:
            event(_log, logging.WARNING, "save.retaken", step=ident.step, reason="the last snapshot was torn")
        handle = self.pipeline.save(
            ident,
            self.lineage.origin(group),
            overlapped=self.overlapped and not retake,
            audit_shift=self.lineage.audit_shift(),
            flat=self.accumulation.state_to_save(),
        )
        self.lineage.note_saved(ident.step)
        self.backlog.look(self.pipeline.pending())
        return handle
