"""From live tensors to layouts: DTensor meshes and placements, or a replica on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckpt import dtypes
from ckpt.errors import InvalidInputError
from ckpt.format.layout import (
    Mesh,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    local_region,
    right_to_left,
)
from ckpt_trainer_hooks.compat import (
    PLAIN_TENSORS,
    as_dtensor,
    local_tensor,
    mesh_ranks,
    root_mesh,
    strided_split_factor,
)
from ckpt_trainer_hooks.meshes import with_replicas

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["LayoutBuilder", "Placed", "check_plain_class", "dtype_name", "torch_dtype"]


class Placed(NamedTuple):
    """A tensor and where it lies.

    Attributes:
        layout: of the global tensor.
        local: this rank's part, detached, no copy.
    """

    layout: TensorLayout
    local: torch.Tensor


@lru_cache(maxsize=256)
def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``float32`` -> ``torch.float32``. Raises InvalidInputError for a dtype this torch lacks."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError("this torch has no such dtype", dtype=name, torch=torch.__version__)
    return dtype


class LayoutBuilder:
    """Builds layouts for one rank; remembers those it has built, since they rarely change.

    Args:
        rank: global rank of this process.
        world_size: number of ranks; a plain tensor counts as replicated over all of them.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._replicated = Mesh.from_ranks((world_size,), ("replica",), list(range(world_size)))
        self._alone = Mesh.from_ranks((1,), ("rank",), [rank])
        self._peers: frozenset[int] = frozenset()  # unknown: no rank's tensors are replicas of another's
        self._meshes: dict[object, tuple[Mesh, int]] = {}
        self._known: dict[str, tuple[tuple[object, ...], TensorLayout]] = {}

    def replicate_over(self, ranks: Sequence[int]) -> None:
        """Count plain tensors as replicas of these ranks' (ascending) instead of all ranks'.

        Also DTensors on slices of one mesh whose ranks are all among these.
        """
        self._replicated = Mesh.from_ranks((len(ranks),), ("replica",), list(ranks))
        self._peers = frozenset(ranks)
        self._meshes.clear()
        self._known.clear()

    def place(self, name: str, tensor: torch.Tensor, *, alone: bool = False) -> Placed:
        """Return the layout and the local part of ``tensor``.

        Args:
            name: FQN, unique over the run.
            tensor: a DTensor, or a plain tensor that counts as a replica of every rank's.
            alone: a plain tensor that only this rank has.

        Raises:
            InvalidInputError: the tensor cannot be stored exactly (sparse, nested, quantized, a subclass with
                parts of its own, without data yet, a partial sum) or its local part is not what its
                placements say.
        """
        if tensor.is_nested:  # has no shape to ask for
            raise InvalidInputError("nested tensors cannot be stored; store their parts", tensor=name)
        distributed = as_dtensor(tensor)
        whole = tensor if distributed is None else local_tensor(distributed)
        if type(whole) not in PLAIN_TENSORS:
            _check_class(name, whole)  # before detach(), which may return something else
        local = whole.detach()
        signature: tuple[object, ...]
        if distributed is None:
            signature = (type(local), local.layout, local.device, local.dtype, local.shape, alone)
        else:
            signature = (
                type(local),
                local.layout,
                local.device,
                local.dtype,
                local.shape,
                alone,
                *_spec(distributed),
            )
        known = self._known.get(name)
        if known is not None and known[0] == signature:
            return Placed(known[1], local)
        _check_storable(name, local)
        layout = self._build(
            name, tensor.shape, local, distributed, self._alone if alone else self._replicated
        )
        self._known[name] = (signature, layout)
        return Placed(layout, local)

    def _build(
        self, name: str, shape: torch.Size, local: torch.Tensor, distributed: object, plain: Mesh
    ) -> TensorLayout:
        placements: tuple[Placement, ...]
        if distributed is None:
            mesh, placements = plain, (Replicate(),)
        else:
            mesh, replicas = self._mesh(distributed.device_mesh)  # type: ignore[attr-defined]
            own = (_placement(name, p) for p in distributed.placements)  # type: ignore[attr-defined]
            placements = (*(Replicate() for _ in range(replicas)), *own)
        layout = TensorLayout(
            name=name,
            dtype=dtype_name(local.dtype),
            global_shape=tuple(shape),
            mesh=mesh,
            placements=placements,
        )
        # FSDP2 over TP says StridedShard, but where sizes are uneven it puts the data as if TP had sharded
        # first. Decided by the placements alone, so that every rank decides the same.
        layout = right_to_left(layout) or layout
        region = local_region(layout, self._rank)
        expected = region.shape if region is not None else None
        if expected != tuple(local.shape) and not (expected is None and local.numel() == 0):
            raise InvalidInputError(
                "local shard is not what the placements say; declare its boxes or fix the placements",
                code="layout-mismatch",
                tensor=name,
                rank=self._rank,
                global_shape=tuple(shape),
                placements=placements,
                expected=expected,
                found=tuple(local.shape),
            )
        return layout

    def _mesh(self, mesh: object) -> tuple[Mesh, int]:
        """The mesh, with as many replica dims in front as the second value says."""
        known = self._meshes.get(mesh)
        if known is None:
            own = Mesh.from_ranks(*mesh_ranks(mesh))  # type: ignore[arg-type]
            root = Mesh.from_ranks(*mesh_ranks(root_mesh(mesh)))  # type: ignore[arg-type]
            known = self._meshes[mesh] = with_replicas(own, root, self._peers)
        return known


def _spec(distributed: DTensor) -> tuple[object, ...]:
    return (distributed.shape, distributed.device_mesh, distributed.placements)


def _placement(name: str, placement: object) -> Placement:
    split = strided_split_factor(placement)
    if split is not None:
        return StridedShard(placement.dim, split)  # type: ignore[attr-defined]
    if placement.is_shard():  # type: ignore[attr-defined]
        return Shard(placement.dim)  # type: ignore[attr-defined]
    if placement.is_replicate():  # type: ignore[attr-defined]
        return Replicate()
    raise InvalidInputError(
        "tensor is a partial sum; reduce it before it is saved", tensor=name, placement=placement
    )


def _check_class(name: str, local: torch.Tensor) -> None:
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise InvalidInputError(
            "tensor is made of parts that a copy of its elements would lose; parts are stored of plain "
            "parameters and buffers only, not of DTensors, optimizer state or plain values",
            tensor=name,
            type=f"{type(local).__module__}.{type(local).__qualname__}",
        )


def check_plain_class(name: str, tensor: torch.Tensor) -> None:
    """Refuse a subclass among plain values: what comes back there is a plain tensor.

    Raises:
        InvalidInputError: neither a tensor, a parameter or buffer, nor a DTensor.
    """
    known = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(tensor) not in known and as_dtensor(tensor) is None:
        raise InvalidInputError(
            "tensor subclass among plain values would come back as a plain tensor; store "
            "tensor.as_subclass(torch.Tensor), or the parts it is made of",
            tensor=name,
            type=f"{type(tensor).__module__}.{type(tensor).__qualname__}",
        )


def _check_storable(name: str, local: torch.Tensor) -> None:
    if local.is_meta:
        raise InvalidInputError("tensor is on the meta device and has no data", tensor=name)
    if local.layout != torch.strided:
        raise InvalidInputError("only strided tensors can be stored", tensor=name, layout=local.layout)
    if local.is_quantized:
        raise InvalidInputError("quantized tensors carry scales that would be lost", tensor=name)
    if not dtypes.is_known(dtype_name(local.dtype)):
        raise InvalidInputError("dtype cannot be stored", code="dtype", tensor=name, dtype=local.dtype)
