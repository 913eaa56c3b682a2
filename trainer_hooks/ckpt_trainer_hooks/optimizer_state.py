"""Optimizer state and group options by parameter name, without the optimizer's own loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["keeping_step_on_device", "matching_group", "optimizer_entries", "set_optimizer"]


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


def keeping_step_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of the parameters whose ``step`` is on their device: their group is capturable or fused."""
    groups = [g for g in optimizer.param_groups if g.get("capturable") or g.get("fused")]
    return {id(parameter) for group in groups for parameter in group["params"]}


def set_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    loaded: Mapping[str, Mapping[str, Any]],
    groups: list[dict[str, Any]],
    common: Mapping[str, Any],
) -> None:
    """Put state and group options in place by name, without the optimizer's own loader, which casts.

    Source of the pitfalls: cases I17-I23, I28 (dropped, shifted or cast state).
    """
    for fqn, parameter in parameters.items():
        if fqn in loaded:
            optimizer.state[parameter] = dict(loaded[fqn])
        else:
            optimizer.state.pop(parameter, None)  # it never had a gradient
    optimizer.state.update(common)  # type: ignore[arg-type]  # keys of the optimizer's own
    for group, options in zip(optimizer.param_groups, groups, strict=False):  # none: groups stay
        for key, value in options.items():
            live = group.get(key)
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
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
