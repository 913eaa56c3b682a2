"""Tensors to be filled from a checkpoint, by name: what fits is wanted, what does not is noted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ckpt.events import event, get_logger
from ckpt.format.layout import TensorLayout, local_region
from ckpt.geometry import Region
from ckpt.plan.read import Want
from ckpt_trainer_hooks.indirect import filled_later
from ckpt_trainer_hooks.layout import dtype_name
from ckpt_trainer_hooks.mismatch import Mismatch
from ckpt_trainer_hooks.selection import RestoreOptions, can_cast
from ckpt_trainer_hooks.state import TrainState

__all__ = ["Filling", "RestoreTargets"]

_log = get_logger("restore")


@dataclass(slots=True)
class RestoreTargets:
    """What to read and what to do with it.

    Attributes:
        wants: one per destination; ``target`` indexes ``tensors``.
        tensors: local destination tensors, written in place.
        mismatch: what does not fit.
        apply: called in order, after every byte is in place.
        casts: how many tensors are converted, by (saved, live) dtype.
        own: whether this rank has a saved state, by name of each item wanted that is every rank's own.
    """

    wants: list[Want] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    mismatch: Mismatch = field(default_factory=Mismatch)
    apply: list[Callable[[], None]] = field(default_factory=list)
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    own: dict[str, bool] = field(default_factory=dict)


class Filling:
    """Matches live tensors with saved ones, one at a time; :class:`RestoreTargets` is the result.

    Args:
        state: whose builder says where live tensors lie.
        options: what may be converted.
    """

    def __init__(self, state: TrainState, options: RestoreOptions) -> None:
        self._state = state
        self._options = options
        self._result = RestoreTargets()
        self._saved: Mapping[str, TensorLayout] = {}  # by live name
        self._aliases: Mapping[str, str] = {}
        self._used: set[str] = set()  # stored names
        self._filled: dict[tuple[object, ...], tuple[str, str]] = {}  # place: live name, stored name

    def _into(self, name: str, live: torch.Tensor) -> None:
        """Want ``name`` in place of ``live`` (a plain tensor or a DTensor), if it fits."""
        source = self._aliases.get(name, name)
        layout = self._saved.get(source)
        if layout is None:
            self._result.mismatch.missing.append(name)
            return
        self._used.add(layout.name)
        if layout.global_shape != tuple(live.shape):
            self._result.mismatch.shapes.append(
                f"{name}: saved {list(layout.global_shape)}, live {list(live.shape)}"
            )
            return
        if not self._has_fitting_dtype(name, layout, live):
            return
        placed = self._state.builder.place(name, live)
        region = local_region(placed.layout, self._state.rank)
        if region is None or placed.local.numel() == 0 or self._is_filled(name, source, placed.local):
            return
        self._want(layout, placed.local, region)

    def _has_fitting_dtype(self, name: str, layout: TensorLayout, live: torch.Tensor) -> bool:
        dtype = dtype_name(live.dtype)
        if layout.dtype == dtype:
            return True
        if self._options.cast_dtypes and can_cast(layout.dtype, live.dtype):
            self._result.casts[layout.dtype, dtype] += 1
            return True
        reason = ", which cast_dtypes does not convert" if self._options.cast_dtypes else ""
        self._result.mismatch.dtypes.append(f"{name}: saved {layout.dtype}, live {dtype}{reason}")
        return False

    def _is_filled(self, name: str, source: str, local: torch.Tensor) -> bool:
        """Whether these very elements get their values under another name: a tied weight is read once."""
        place = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)
        first = self._filled.setdefault(place, (name, source))
        if first[1] != source:
            event(_log, logging.WARNING, "restore.tied_here", left_out=name, kept=first[0])
        return first[0] != name

    def _want(self, layout: TensorLayout, tensor: torch.Tensor, region: Region) -> None:
        self._used.add(layout.name)
        if tensor.numel() == 0:
            return
        later = filled_later(layout.name, tensor)
        if later is not None:
            tensor, write = later
            self._result.apply.append(write)
        self._result.wants.append(Want(layout.name, region, len(self._result.tensors)))
        self._result.tensors.append(tensor)
