"""The optimizer's step as the fence of overlapped copies, and as a count of the steps that were made."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from ckpt.events import event, get_logger
from ckpt_trainer_hooks.liveness import Pulse
from ckpt_trainer_hooks.pipeline import SavePipeline

__all__ = ["OptimizerFence"]

_log = get_logger("manager")


class OptimizerFence:
    """Hooks on every registered optimizer; steps are counted on the first.

    Args:
        optimizers: in registration order.
        pipeline: whose copies must be over when a step begins.
        pulse: told of the steps of the first.
    """

    def __init__(
        self, optimizers: Collection[torch.optim.Optimizer], pipeline: SavePipeline, pulse: Pulse
    ) -> None:
        self._pipeline = pipeline
        self._pulse = pulse
        self._steps: int | None = None
        self._hooks: list[Any] = []
        for number, optimizer in enumerate(optimizers):
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            if number == 0:
                self._hooks.append(optimizer.register_step_pre_hook(lambda *_: pulse.enter("optimizer")))
                self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def restart(self) -> None:
        """Count from 0."""
        self._steps = 0

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def warn_if_off_by_one(self, step: int, start: int) -> None:
        """Warn of a save as ``step`` that comes one step later, counted from ``start``."""
        if self._steps and step == start + self._steps - 1:
            event(
                _log,
                logging.WARNING,
                "save.step_looks_off_by_one",
                step=step,
                optimizer_steps=start + self._steps,
                hint="pass the number of completed steps to save(), or the iteration to step()",
            )

    def _before_step(self, *_: object) -> None:
        if self._pipeline.is_capturing:
            with self._pulse.phase("save"):  # what is waited for here is the price of the save
                self._pipeline.before_optimizer_step()

    def _after_step(self, *_: object) -> None:
        self._pulse.enter("train")
        self._steps = (self._steps or 0) + 1
        if self._steps == 1:
            self._pipeline.prepare()  # optimizers make their state in the first step; now the size is known
