"""Saves in the middle of gradient accumulation: put off, taken back to the boundary, or gradients and all.

for iteration in range(manager.restore(), iterations):
    for i in manager.remaining_microbatches(4):
        with manager.microbatch(i, of=4):
            loss(next(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step(iteration)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch

from ckpt.errors import CkptError, InvalidInputError, RefusedError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt_trainer_hooks.gradients import GradientState, clear_gradients
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.layout import Placed
from ckpt_trainer_hooks.leaves import FlatState, Leaf
from ckpt_trainer_hooks.options import check_choice

__all__ = ["GRADIENTS_ITEM", "Accumulation", "AccumulationPolicy"]

AccumulationPolicy = Literal["boundary", "discard", "capture"]

GRADIENTS_ITEM = "accumulated_gradients"

_log = get_logger("accumulation")
_POLICIES = ("boundary", "discard", "capture")


class Accumulation:
    """Where a rank's loop is between two optimizer steps, and what a save there means.

    Args:
        policy: "boundary" puts the save off until the optimizer has stepped; "discard" saves the state of the
            last boundary, and a restore begins the accumulation again; "capture" saves the sums of gradients
            too, and a restore goes on with the next microbatch.

    Raises:
        InvalidInputError: another policy.
    """

    def __init__(self, policy: AccumulationPolicy) -> None:
        check_choice("accumulation", policy, _POLICIES)
        self._policy = policy
        self.gradients = GradientState()
        self._is_inside = False
        self._is_broken = False
        self._resumed_at = 0
        self._deferred: SaveHandle | None = None
        self._boundary: FlatState | None = None

    @property
    def items(self) -> Mapping[str, GradientState]:
        """What the policy adds to the state."""
        return {GRADIENTS_ITEM: self.gradients} if self._policy == "capture" else {}

    @property
    def has_deferred(self) -> bool:
        """Whether a save was put off and waits for the boundary."""
        return self._deferred is not None

    @property
    def _is_under_way(self) -> bool:
        return self._is_inside or self._is_broken or self.gradients.done > 0

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
        """Be told of optimizer steps; returns handles whose ``remove()`` ends that."""
        return [optimizer.register_step_post_hook(lambda *_: self.stepped()) for optimizer in optimizers]

    @contextlib.contextmanager
    def microbatch(self, index: int, of: int) -> Iterator[None]:
        """Hold around forward and backward of microbatch ``index`` (from 0) of ``of``.

        Raises:
            InvalidInputError: not the microbatch whose turn it is: its gradients would be summed twice, or
                never.
        """
        gradients = self.gradients
        if index == 0 and not self._resumed_at:
            gradients.done = 0  # whoever begins again has dropped what there was
        if index != gradients.done or not index < of or self._is_inside:
            raise InvalidInputError(
                "not the microbatch whose turn it is; loop over remaining_microbatches()",
                code="microbatch",
                given=index,
                of=of,
                expected=gradients.done,
            )
        self._is_inside, self._is_broken = True, True
        gradients.of = of
        try:
            yield
            if self._is_inside:  # else the optimizer has stepped in the block
                gradients.done = index + 1
            self._is_broken = False
        finally:
            self._is_inside = False

    def remaining(self, of: int) -> range:
        """Return the microbatches still to be run of ``of`` before the optimizer steps.

        Raises:
            InvalidInputError: the accumulation that was restored was one of another number.
        """
        if self._resumed_at and of != self.gradients.of:
            raise InvalidInputError(
                "the restored accumulation has another number of microbatches; finish it with that number",
                code="microbatch",
                given=of,
                saved=self.gradients.of,
            )
        return range(self._resumed_at, of)

    def stepped(self) -> None:
        """The optimizer has stepped, or the iteration is over without."""
        self.gradients.done = self._resumed_at = 0
        self._is_inside = self._is_broken = False
        self._boundary = None

    def remember(self, flat: FlatState) -> None:
        """Keep the state at a boundary, for "discard": what may change before the next one is copied."""
        self._boundary = FlatState(
            [leaf if leaf.deferred else _copied(leaf) for leaf in flat.leaves], flat.values, flat.rank_values
        )

    @property
    def wants_boundaries(self) -> bool:
        """Whether :meth:`remember` is to be called at each boundary."""
        return self._policy == "discard"

    def before_restore(self) -> None:
        """A restore begins; tells a restored accumulation from one that was left alone."""
        self.gradients.is_restored = False

    def after_restore(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """A restore has succeeded: sums of a state that is no more must not go into the next step."""
        gradients = self.gradients
        if not gradients.is_restored:
            if self._is_under_way:
                clear_gradients(modules)
            gradients.done = 0
        self._resumed_at = gradients.done
        self._is_inside = self._is_broken = False
        self._boundary = None
        self.give_up("the state was restored before it could be made")

    def before_save(self, ident: CheckpointId) -> SaveHandle | None:
        """Return the handle of a save that is put off; None where it can be made now.

        Raises:
            RefusedError: the policy cannot make it here.
        """
        if not self._is_under_way:
            return None
        if self._policy == "boundary":
            return self._defer(ident)
        if self._policy == "discard" and self._boundary is None:
            raise RefusedError(
                "the state at the last boundary is not known; call step() after each optimizer step",
                code="no-boundary",
                step=ident.step,
            )
        if self._policy == "capture" and self._is_broken:
            raise RefusedError(
                "a save inside a microbatch would hold part of its gradients; save after the block",
                code="inside-microbatch",
                step=ident.step,
                microbatch=self.gradients.done,
            )
        return None

    def state_to_save(self) -> FlatState | None:
        """The state to save instead of the live one, or None."""
        return self._boundary if self._policy == "discard" and self._is_under_way else None

    def settled(self, handle: SaveHandle) -> SaveHandle:
        """Take ``handle`` for the save that was put off, if there is one; returns it."""
        deferred = self._deferred
        if deferred is not None and handle is not deferred:
            self._deferred = None
            deferred.ident, deferred.skipped = handle.ident, handle.skipped
            for name in ("staging_completion", "local_completion", "upload_completion"):
                _follow(getattr(deferred, name), getattr(handle, name))
        return handle

    def give_up(self, reason: str) -> CkptError | None:
        """Fail a save that was put off and can no longer be made; returns its error."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return None
        error = RefusedError(
            "a save was put off to the next optimizer step, and was not made",
            code="deferred",
            step=deferred.step,
            reason=reason,
        )
        deferred.fail(error)
        event(_log, logging.WARNING, "save.deferred_lost", error=error)
        return error

    def _defer(self, ident: CheckpointId) -> SaveHandle:
        if self._deferred is None:
            self._deferred = SaveHandle(CheckpointId(ident.step + 1, ident.attempt))
            event(
                _log,
                logging.WARNING,
                "save.deferred",
                step=ident.step,
                microbatches_done=self.gradients.done,
                reason="gradients are being accumulated; the save is made after the next optimizer step",
            )
        return self._deferred


def _copied(leaf: Leaf) -> Leaf:
    return leaf._replace(placed=Placed(leaf.placed.layout, leaf.placed.local.clone()), deferred=False)


def _follow(follower: Future[None], leader: Future[None]) -> None:
    def pass_on(done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            SaveHandle.settle(follower)
        elif not follower.done():
            with contextlib.suppress(CkptError):
                follower.set_exception(error)

    leader.add_done_callback(pass_on)
