"""Optimizer state and group options by parameter name, without the optimizer's own loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from ckpt_trainer_hooks.compat import as_dtensor

__all__ = [
    "changed_order",
    "keeping_step_on_device",
    "matching_group",
    "optimizer_entries",
    "set_optimizer",
]


def optimizer_entries(
    item: str, saved: Mapping[str, object], parameters: Mapping[str, torch.Tensor]
) -> Iterable[tuple[str, str, str]]:
    """Yield (stored name, parameter name, state key) of the item's tensors; the longest name wins."""
    prefix = f"{item}."
    for name in saved:
        if not name.startswith(prefix):
            continue
        fqn, _, key = name.removeprefix(prefix).rpartition(".")
        rest = [key]
        while fqn and fqn not in parameters:
            fqn, _, part = fqn.rpartition(".")
            rest.insert(0, part)
        if fqn:
            yield name, fqn, ".".join(rest)


def keeping_step_on_device(
    optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]] = ()
) -> set[int]:
    """Ids of the parameters whose ``step`` is on their device: their group is capturable or fused.

    ``options`` are those that the groups will have after the restore, if they change.
    """
    found: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        after = {**group, **options[number]} if number < len(options) else group
        if after.get("capturable") or after.get("fused"):
            found.update(id(parameter) for parameter in group["params"])
    return found


def changed_order(
    item: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
) -> list[str]:
    """What is wrong, if the optimizer keeps flat vectors over all parameters and they cannot be used here."""
    if not isinstance(optimizer, torch.optim.LBFGS) or not saved["scalars"]:
        return []
    if any(as_dtensor(p) is not None for group in optimizer.param_groups for p in group["params"]):
        return [f"{item}: its history is one vector over all parameters, and they are sharded here"]
    live = [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
    if live == [fqn for group in saved["groups"] for fqn in group["params"]]:
        return []
    return [f"{item}: its history is one vector over all parameters, whose order or number is another here"]


def _on(device: torch.device, value: object) -> Any:
    """``value`` with the tensors in it on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_on(device, part) for part in value)
    if isinstance(value, dict):
        return {key: _on(device, part) for key, part in value.items()}
    return value


def set_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    loaded: Mapping[str, Mapping[str, Any]],
    groups: list[dict[str, Any]],
    common: Mapping[str, Any] | None,
) -> None:
    """Put state and group options in place by name, without the optimizer's own loader, which casts.

    Source of the pitfalls: cases I17-I23, I28 (dropped, shifted or cast state).
    """
    for fqn, parameter in parameters.items():
        if fqn in loaded:
            # Tensors inside lists (LBFGS's history) were read on the CPU.
            optimizer.state[parameter] = {
                key: value if isinstance(value, torch.Tensor) else _on(parameter.device, value)
                for key, value in loaded[fqn].items()
            }
        else:
            optimizer.state.pop(parameter, None)  # it never had a gradient
    if common is not None:  # keys of the optimizer's own
        state: MutableMapping[Any, Any] = optimizer.state
        for key in [key for key in state if not isinstance(key, torch.Tensor)]:
            del state[key]
        state.update(common)
    written: dict[int, torch.Tensor] = {}  # a tensor lr that groups share can have one value only
    for group, options in zip(optimizer.param_groups, groups, strict=False):  # none: groups stay
        for key, value in options.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                if not torch.equal(written.setdefault(id(live), value), value):
                    group[key] = value.to(live)
                    continue
                live.copy_(value)  # a tensor lr may be captured in a graph
            else:
                group[key] = value


def matching_group(fqns: list[str], number: int, groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    wanted = set(fqns)
    for saved in groups:
        if wanted and set(saved["params"]) == wanted:
            return saved
    overlap = [saved for saved in groups if wanted & set(saved["params"])]
    if overlap and all(_same_options(saved["options"], overlap[0]["options"]) for saved in overlap):
        return overlap[0]  # several: pipeline stages with one rule for their groups
    if number < len(groups) and not wanted and not groups[number]["params"]:
        return groups[number]
    return None


def _same_options(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
