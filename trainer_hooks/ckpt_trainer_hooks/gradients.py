"""Gradients of an accumulation under way: where they are, how they are saved and put back.

They are in no state dict. Between two microbatches the sum is in ``p.grad`` (plain modules, DDP, FSDP2 after
a reduced backward), or inside FSDP2 (backward without reduction). What FSDP2 has reduced is sharded like its
parameter and restores onto any layout; everything else is this rank's alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.compat import (
    as_dtensor,
    fsdp_groups,
    fsdp_parameters,
    gradient_device,
    local_tensor,
    mesh_ranks,
    partial_reduction,
    set_partial_reduction,
    set_unsharded_gradient,
    unsharded_gradient,
    unsharded_mesh,
)
from ckpt_trainer_hooks.names import canonical_names

__all__ = [
    "GradientState",
    "Slot",
    "clear_gradients",
    "gradient_slots",
    "misfit",
    "own_record",
    "put_record",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """One place that can hold a sum of gradients.

    Attributes:
        name: ``<item>.<fqn of the parameter>``, and what FSDP2 keeps beside ``grad`` after an "@".
        place: "grad"; "unsharded" and "partial" are inside FSDP2.
        owner: the parameter, the FSDPParam or the FSDPParamGroup.
        is_managed: the parameter is FSDP2's, so its ``grad`` is reduced over all of its mesh.
        members: of "partial", the names of all parameters in the group.
    """

    name: str
    place: Literal["grad", "unsharded", "partial"]
    owner: Any
    is_managed: bool
    members: tuple[str, ...] = ()

    def get(self) -> torch.Tensor | None:
        """The sum, not copied."""
        if self.place == "unsharded":
            return unsharded_gradient(self.owner)
        if self.place == "partial":
            return partial_reduction(self.owner)
        found: torch.Tensor | None = self.owner.grad
        return found

    def set(self, value: torch.Tensor | None) -> None:
        """Replace the sum."""
        if self.place == "unsharded":
            set_unsharded_gradient(self.owner, value)
        elif self.place == "partial":
            set_partial_reduction(self.owner, value)
        else:
            self.owner.grad = value

    def is_shared(self, value: torch.Tensor) -> bool:
        """Whether ``value`` is sharded over all ranks of the parameter's mesh, nothing left to be summed."""
        distributed = as_dtensor(value)
        return (
            self.place == "grad"
            and self.is_managed
            and distributed is not None
            and not any(placement.is_partial() for placement in distributed.placements)
        )


@dataclass(slots=True)
class GradientState:
    """The item that stands for the gradients of an accumulation under way.

    Attributes:
        done: microbatches that are in the sums; 0: nothing to save.
        of: how many there will be.
        is_restored: the numbers come from a checkpoint.
    """

    done: int = 0
    of: int = 0
    is_restored: bool = False

    def go_on(self, done: int, of: int) -> None:
        """Take over the numbers of a checkpoint."""
        self.done, self.of, self.is_restored = done, of, True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to save."""
        return self.done == 0


def gradient_slots(modules: Mapping[str, torch.nn.Module]) -> Iterator[Slot]:
    """Yield every place, each parameter once however many names it has."""
    seen: set[int] = set()
    for item, root in modules.items():
        paths = {id(module): path for path, module in root.named_modules(remove_duplicate=False)}
        for group in fsdp_groups(root):
            members = fsdp_parameters(group)
            names = _full_names(root, [(paths[id(module)], name) for module, name, _ in members])
            for name, (module, local_name, param) in zip(names, members, strict=True):
                # Right now the module may have the unsharded parameter in its place.
                seen.update((id(param.sharded_param), id(getattr(module, local_name))))
                yield Slot(f"{item}.{name}", "grad", param.sharded_param, is_managed=True)
                yield Slot(f"{item}.{name}@unsharded", "unsharded", param, is_managed=True)
            if names:
                yield Slot(
                    f"{item}.{names[0]}@partial", "partial", group, is_managed=True, members=tuple(names)
                )
        raw = dict(root.named_parameters(remove_duplicate=False))
        for raw_name, fqn in canonical_names(root, list(raw)).items():
            parameter = raw[raw_name]
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Slot(f"{item}.{fqn}", "grad", parameter, is_managed=False)


def clear_gradients(modules: Mapping[str, torch.nn.Module]) -> None:
    """Forget every sum."""
    for slot in gradient_slots(modules):
        if slot.get() is not None:
            slot.set(None)


def own_record(slot: Slot, value: torch.Tensor) -> dict[str, Any]:
    """Describe a sum that only this rank has, for its own values."""
    distributed = as_dtensor(value)
    record: dict[str, Any] = {"place": slot.place, "dtensor": None}
    if slot.place == "partial":
        record |= {"members": list(slot.members), "mesh": _mesh_code(slot)}
    if distributed is None:
        return {**record, "tensor": value.detach()}
    record["dtensor"] = {
        "placements": [_code_of(placement) for placement in distributed.placements],
        "shape": list(distributed.shape),
        "stride": list(distributed.stride()),
        "mesh": _mesh_code(slot),
    }
    return {**record, "tensor": local_tensor(distributed).detach()}


def misfit(slot: Slot | None, record: Mapping[str, Any]) -> str | None:
    """Say why a record cannot go into a slot of this layout, or return None."""
    if slot is None:
        return "gradient of one rank alone, and there is no such place in the live layout"
    if slot.place == "partial":
        same = list(slot.members) == record["members"] and _mesh_code(slot) == record["mesh"]
        return None if same else "partly reduced gradients of another group of parameters, or another mesh"
    parameter = slot.owner if slot.place == "grad" else slot.owner.sharded_param
    description = record["dtensor"]
    saved = tuple(description["shape"] if description else record["tensor"].shape)
    if saved != tuple(parameter.shape):
        return f"gradient of shape {list(saved)}, parameter {list(parameter.shape)}"
    if (description["mesh"] if description else None) != _mesh_code(slot):
        return "gradient of one rank alone, and its parameter lies on another device mesh here"
    return None


def put_record(slot: Slot, record: Mapping[str, Any]) -> None:
    """Set the sum that :func:`own_record` described."""
    parameter = slot.owner if slot.place == "grad" else None
    device = gradient_device(slot.owner) if parameter is None else parameter.device
    value: torch.Tensor = record["tensor"].to(device)
    description = record["dtensor"]
    if description is not None:
        from torch.distributed.tensor import DTensor  # costs 0.3 s at import; plain runs never need it

        value = DTensor.from_local(
            value,
            _mesh_of(slot),
            [_placement(code) for code in description["placements"]],
            run_check=False,
            shape=torch.Size(description["shape"]),
            stride=tuple(description["stride"]),
        )
    slot.set(value)


def _mesh_of(slot: Slot) -> Any:
    if slot.place == "unsharded":
        return unsharded_mesh(slot.owner)
    distributed = as_dtensor(slot.owner)
    return None if distributed is None else distributed.device_mesh


def _mesh_code(slot: Slot) -> list[Any] | None:
    """[shape, ranks] of the mesh that a sum in ``slot`` is laid out on, or None."""
    if slot.place == "partial":
        mesh = as_dtensor(fsdp_parameters(slot.owner)[0][2].sharded_param).device_mesh  # type: ignore[union-attr]
    else:
        mesh = _mesh_of(slot)
    if mesh is None:
        return None
    shape, _, ranks = mesh_ranks(mesh)
    return [list(shape), ranks]


def _code_of(placement: Any) -> list[Any]:
    """["R"], ["S", dim] or ["P", reduction]."""
    if placement.is_partial():
        return ["P", placement.reduce_op]
    if placement.is_replicate():
        return ["R"]
    if type(placement).__name__ != "Shard":
        raise InvalidInputError("gradient has a placement that cannot be stored", placement=placement)
    return ["S", placement.dim]


def _placement(code: list[Any]) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate, "S": Shard, "P": Partial}[code[0]](*code[1:])


def _full_names(root: torch.nn.Module, places: list[tuple[str, str]]) -> list[str]:
    raw = [f"{path}.{name}" if path else name for path, name in places]
    names = canonical_names(root, raw)
    return [names[name] for name in raw]
