"""Tensors of a checkpoint without a manager: into new tensors, or into a template that may be sharded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.layout import TensorLayout, local_region
from ckpt.geometry import Region
from ckpt.ops.fetch import fetch
from ckpt.plan.read import Want, plan_read
from ckpt.repository import Repository, choose_names
from ckpt_trainer_hooks.layout import LayoutBuilder, dtype_name, torch_dtype
from ckpt_trainer_hooks.mismatch import Mismatch
from ckpt_trainer_hooks.placing import TensorTargets
from ckpt_trainer_hooks.renaming import rename_layouts
from ckpt_trainer_hooks.selection import Rename, RestoreOptions, can_cast

__all__ = ["load", "load_into"]

_log = get_logger("load")


def load(
    url: str,
    names: str | Collection[str] | None = None,
    *,
    checkpoint: str | int = "latest",
    device: str | torch.device = "cpu",
    store_options: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Read tensors in full, by name; no template is needed. Beyond the result it takes a few chunks of host
    memory, also for another device.

    Tied tensors come under each of their names, as one tensor.

    Args:
        url: of the run.
        names: patterns (``*`` crosses dots), such as "model.*"; None: all tensors.
        checkpoint: "latest", a step, or an id.
        device: where the tensors are made.
        store_options: of the object store.

    Raises:
        NotFoundError: no such checkpoint, or a pattern fits no tensor.
        InvalidInputError: this torch lacks the dtype of a tensor.
        CorruptError: no good copy of the data is left.
    """
    with Repository(url, store_options) as run:
        opened = run.open(checkpoint)
        aliases = run.aliases(opened.ident)
        chosen = choose_names(names, [*opened.layouts, *aliases])
        stored = list(dict.fromkeys(aliases.get(name, name) for name in chosen))
        tensors = {name: _empty(opened.layouts[name], device) for name in stored}
        wants = [
            Want(name, Region.whole(opened.layouts[name].global_shape), number)
            for number, name in enumerate(stored)
            if tensors[name].numel()
        ]
        fetch(opened, plan_read(opened.layouts, wants), TensorTargets(list(tensors.values())))
    return {name: tensors[aliases.get(name, name)] for name in chosen}


def load_into(
    url: str,
    template: Mapping[str, torch.Tensor],
    *,
    checkpoint: str | int = "latest",
    rename: Rename | None = None,
    strict: bool = True,
    allow_missing: bool | None = None,
    allow_unexpected: bool | None = None,
    cast_dtypes: bool = False,
    store_options: Mapping[str, str] | None = None,
) -> CheckpointId:
    """Read into the tensors of ``template``, plain ones or DTensors, each rank its own part.

    Not collective: ranks that ask for "latest" while a run is going on may see different ones; name one.
    Nothing is written before everything is known to fit.

    Args:
        url: of the run.
        template: tensors by the name they have in the checkpoint (after ``rename``), written in place.
        checkpoint: "latest", a step, or an id.
        rename: names in the checkpoint to names of the template, as in ``CheckpointManager.restore``.
        strict, allow_missing, allow_unexpected: likewise; unexpected is what lies under the first component
            of a name of the template ("model") and is not in it.
        cast_dtypes: convert to the template's dtypes.
        store_options: of the object store.

    Returns:
        The checkpoint that was read.

    Raises:
        NotFoundError: no such checkpoint.
        InvalidInputError: it does not fit; all differences are listed.
        CorruptError: no good copy of the data is left; some tensors may be overwritten.
    """
    options = RestoreOptions.of(
        rename=rename,
        strict=strict,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        cast_dtypes=cast_dtypes,
    )
    with Repository(url, store_options) as run:
        opened = run.open(checkpoint)
        tied = {name: opened.layouts[stored] for name, stored in run.aliases(opened.ident).items()}
        matching = _Matching(rename_layouts({**opened.layouts, **tied}, rename), options, set(tied))
        for name, live in template.items():
            matching.add(name, live)
        matching.finish()
        written = TensorTargets(matching.tensors)
        fetch(opened, plan_read(opened.layouts, matching.wants), written)
        written.mark_written()
    return opened.ident


class _Matching:
    """A template against the tensors of a checkpoint by live name; its fields are the result."""

    def __init__(
        self, saved: Mapping[str, TensorLayout], options: RestoreOptions, tied: Collection[str]
    ) -> None:
        active = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if active else 0
        self._builder = LayoutBuilder(self._rank, dist.get_world_size() if active else 1)
        self._saved = saved
        self._tied = tied
        self._options = options
        self._mismatch = Mismatch()
        self._casts: Counter[tuple[str, str]] = Counter()
        self._names: set[str] = set()
        self.wants: list[Want] = []
        self.tensors: list[torch.Tensor] = []

    def add(self, name: str, live: Any) -> None:
        if not isinstance(live, torch.Tensor):
            raise InvalidInputError("a template holds tensors", tensor=name, type=type(live).__name__)
        self._names.add(name)
        layout = self._saved.get(name)
        if layout is None:
            self._mismatch.missing.append(name)
        elif layout.global_shape != tuple(live.shape):
            self._mismatch.shapes.append(
                f"{name}: saved {list(layout.global_shape)}, live {list(live.shape)}"
            )
        elif self._dtype_fits(name, layout.dtype, live.dtype):
            placed = self._builder.place(name, live)
            region = local_region(placed.layout, self._rank)
            if region is not None and placed.local.numel():
                self.wants.append(Want(layout.name, region, len(self.tensors)))
                self.tensors.append(placed.local)

    def _dtype_fits(self, name: str, saved: str, live: torch.dtype) -> bool:
        if saved == dtype_name(live):
            return True
        if self._options.cast_dtypes and can_cast(saved, live):
            self._casts[saved, dtype_name(live)] += 1
            return True
        self._mismatch.dtypes.append(f"{name}: saved {saved}, live {dtype_name(live)}")
        return False

    def finish(self) -> None:
        items = {name.partition(".")[0] for name in self._names}
        self._mismatch.unexpected += [
            name
            for name in self._saved
            if name not in self._names and name not in self._tied and name.partition(".")[0] in items
        ]
        self._mismatch.raise_if_any(
            allow_missing=self._options.allow_missing, allow_unexpected=self._options.allow_unexpected
        )
        for (saved, live), count in sorted(self._casts.items()):
            event(_log, logging.WARNING, "restore.cast", saved=saved, live=live, tensors=count)


def _empty(layout: TensorLayout, device: str | torch.device) -> torch.Tensor:
    return torch.empty(layout.global_shape, dtype=torch_dtype(layout.dtype), device=device)
