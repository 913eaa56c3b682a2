"""Where restored optimizer state goes: the live tensor if it fits, else a new one in the form it had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpt.format.layout import TensorLayout, local_region
from ckpt.geometry import Box, Region
from ckpt_trainer_hooks.compat import as_dtensor
from ckpt_trainer_hooks.layout import LayoutBuilder, torch_dtype
from ckpt_trainer_hooks.local_state import LocalState, flat_range, rank_name, scales_region

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Destination", "StateForms"]

# 0-dim state that torch's optimizers keep on the CPU unless the group is capturable or fused.
_HOST_STATE = ("step", "mu_product")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one stored tensor goes.

    Attributes:
        tensor: belongs into the optimizer's state.
        source: live name of the stored tensor to read.
        written: memory of ``tensor``, of the region's shape; with ``region`` only.
        region: of the stored tensor; None: what the layout of ``tensor`` says.
        problem: why it cannot be restored here; empty if it can.
    """

    tensor: torch.Tensor
    source: str
    written: torch.Tensor | None = None
    region: Region | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StateForms:
    """The forms of one optimizer item's state: as saved, and as declared for the live optimizer.

    Attributes:
        saved: layouts by live name.
        builder: of this rank.
        rank: global.
        forms: of the item's value (see ckpt_trainer_hooks.optimizer_capture).
        block_size: of the item's value.
        declared: for the live optimizer.
    """

    saved: Mapping[str, TensorLayout]
    builder: LayoutBuilder
    rank: int
    forms: Mapping[str, Mapping[str, str]]
    block_size: int
    declared: LocalState

    @classmethod
    def of(
        cls,
        item: Mapping[str, Any],
        saved: Mapping[str, TensorLayout],
        builder: LayoutBuilder,
        rank: int,
        declared: LocalState,
    ) -> StateForms:
        """The forms of a decoded item value; checkpoints from before there were any have none."""
        return cls(saved, builder, rank, item.get("forms", {}), item.get("block_size", 0), declared)

    def destination(
        self, name: str, fqn: str, key: str, parameter: torch.Tensor, live: object, *, on_device: bool
    ) -> Destination:
        """Return where the stored tensor ``name`` goes.

        Args:
            name: live name of the stored tensor; where ranks have stored their own, of any of them.
            fqn: of the parameter.
            key: in the parameter's state; may end in ``@rank<n>``.
            parameter: live.
            live: what the optimizer has there now.
            on_device: whether 0-dim counters belong on the parameter's device.
        """
        base = key.partition("@rank")[0]
        form = self._form(fqn, base, name)
        if form == "scales":
            return self._scales(name.removesuffix(key) + base, name, fqn, parameter, live)
        if form.startswith("shard"):
            return self._shard(name, parameter, live, flat=form == "shard-flat")
        layout = self.saved[name]
        dtype = torch_dtype(layout.dtype)
        as_distributed = self._is_distributed(form, base, layout, parameter)
        if (
            isinstance(live, torch.Tensor)
            and tuple(live.shape) == layout.global_shape
            and live.dtype == dtype
            and (as_dtensor(live) is not None) is as_distributed
        ):
            return Destination(live, name)
        return Destination(
            _new(layout, dtype, parameter, base, as_distributed=as_distributed, on_device=on_device), name
        )

    def _form(self, fqn: str, key: str, name: str) -> str:
        if key in self.declared.scales:
            return "scales"
        if key in self.declared.replicated:
            return "plain"
        form = self.forms.get(fqn, {}).get(key, "")
        if key in self.declared.shards and not form.startswith("shard"):
            return "shard"
        return form

    def _is_distributed(self, form: str, key: str, layout: TensorLayout, parameter: torch.Tensor) -> bool:
        if as_dtensor(parameter) is None or form == "plain":
            return False
        saved, shape = layout.global_shape, tuple(parameter.shape)
        if form == "dtensor" or (saved == shape and (shape != () or key not in _HOST_STATE)):
            return True
        # Saved where the parameter was not sharded. A factor of its second moments (Adafactor) is computed
        # from a DTensor here, and so has to be one.
        return len(saved) == len(shape) > 1 and all(
            mine in (1, whole) for mine, whole in zip(saved, shape, strict=True)
        )

    def _shard(self, name: str, parameter: torch.Tensor, live: object, *, flat: bool) -> Destination:
        """State in plain tensors, one element per element of this rank's part of the parameter."""
        layout = self.saved[name]
        dtype = torch_dtype(layout.dtype)
        local, region = self._part(name, parameter)
        shape = (local.numel(),) if flat else tuple(local.shape)
        tensor = _fitting(live, shape, dtype, local.device)
        if layout.global_shape == tuple(parameter.shape):
            return Destination(tensor, name, tensor.view(local.shape), region)
        span = flat_range(region, tuple(parameter.shape))
        if layout.global_shape == (parameter.numel(),) and span is not None:
            return Destination(
                tensor, name, tensor.view(-1), Region.of_box(Box((span[0],), (span[1] - span[0],)))
            )
        return Destination(
            tensor, name, problem=f"{name}: saved {list(layout.global_shape)}, of another layout than here"
        )

    def _scales(self, name: str, found: str, fqn: str, parameter: torch.Tensor, live: object) -> Destination:
        """One scale per block of this rank's part of the parameter."""
        block = self.declared.block_size or self.block_size
        local, region = self._part(name, parameter)
        dtype = torch_dtype(self.saved[found].dtype)
        blocks = -(-local.numel() // block)
        tensor = _fitting(live, (blocks,), dtype, local.device)
        if self.block_size and block != self.block_size:
            text = f"{name}: saved with blocks of {self.block_size}, live {block}"
            return Destination(tensor, found, problem=text)
        if name in self.saved:
            shape = tuple(parameter.shape)
            span = flat_range(region, shape)
            wanted = None if span is None else scales_region(self.saved[name], shape, *span, block)
            if wanted is not None:
                return Destination(tensor, name, tensor.view(wanted.shape), wanted)
        own = rank_name(name, self.rank)
        if own in self.saved and self._is_laid_out_as_saved(name, parameter, fqn):
            return Destination(tensor, own, tensor, Region.whole(self.saved[own].global_shape))
        text = (
            f"{name}: this layout would cut blocks of {block} elements; restore it on the layout it was "
            "saved from, or on one whose shards end at block borders"
        )
        return Destination(tensor, found, problem=text)

    def _part(self, name: str, parameter: torch.Tensor) -> tuple[torch.Tensor, Region]:
        """This rank's part of the parameter, and where it lies."""
        placed = self.builder.place(f"{name}@parameter", parameter.detach())
        return placed.local, local_region(placed.layout, self.rank) or Region.whole(placed.local.shape)

    def _is_laid_out_as_saved(self, name: str, parameter: torch.Tensor, fqn: str) -> bool:
        here = self.builder.place(f"{name}@parameter", parameter.detach()).layout
        prefix = name.rpartition(".")[0]
        codes = [
            layout
            for key, form in self.forms.get(fqn, {}).items()
            if form.startswith("shard") and (layout := self.saved.get(f"{prefix}.{key}")) is not None
        ]
        return bool(codes) and all(
            (layout.global_shape, layout.mesh, layout.placements)
            == (here.global_shape, here.mesh, here.placements)
            for layout in codes
        )


def _fitting(live: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if (
        isinstance(live, torch.Tensor)
        and tuple(live.shape) == shape
        and live.dtype == dtype
        and live.is_contiguous()
        and as_dtensor(live) is None
    ):
        return live
    return torch.zeros(shape, dtype=dtype, device=device)


def _new(
    layout: TensorLayout,
    dtype: torch.dtype,
    parameter: torch.Tensor,
    key: str,
    *,
    as_distributed: bool,
    on_device: bool,
) -> torch.Tensor:
    """A new state tensor (state is created lazily)."""
    if key in _HOST_STATE and layout.global_shape == ():  # also where the parameter is 0-dim
        return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    sharded = as_dtensor(parameter)
    if tuple(parameter.shape) == layout.global_shape and (as_distributed or sharded is None):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if sharded is not None and as_distributed:
        return _new_dtensor(layout, dtype, sharded)
    return torch.zeros(layout.global_shape, dtype=dtype, device=parameter.device)


def _new_dtensor(layout: TensorLayout, dtype: torch.dtype, sharded: DTensor) -> torch.Tensor:
    """On the parameter's mesh, placed as saved where the mesh has as many dimensions, else replicated."""
    from torch.distributed.tensor import Replicate, Shard, zeros

    from ckpt.format.layout import Shard as SavedShard

    placements: list[Any] = [Replicate()] * sharded.device_mesh.ndim
    if len(layout.placements) == len(placements):
        placements = [Shard(p.dim) if isinstance(p, SavedShard) else Replicate() for p in layout.placements]
    return zeros(
        layout.global_shape, dtype=dtype, device_mesh=sharded.device_mesh, placements=tuple(placements)
    )
