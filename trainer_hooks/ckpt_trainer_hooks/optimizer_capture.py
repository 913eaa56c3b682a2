"""Optimizers at save: state tensors by parameter name, everything else as plain values.

The item's value (docs/format.md, "State values"):

    {"kind": "optimizer", "type": .., "groups": [..], "scalars": {<fqn>: {..}}, "common": {..},
     "forms": {<fqn>: {<key>: <form>}}, "block_size": ..}

``forms`` has the tensors whose form in the live state does not follow from the parameter's. Without an entry
a tensor of the parameter's shape is laid out like the parameter, and any other is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.compat import as_dtensor
from ckpt_trainer_hooks.layout import LayoutBuilder, Placed
from ckpt_trainer_hooks.local_state import (
    LocalState,
    declared,
    like_parameter,
    looks_like_a_shard,
    place_scales,
)

__all__ = ["capture_optimizer", "check_optimizers"]


def check_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse an optimizer around another one that is not registered too: its state would be left out.

    Raises:
        InvalidInputError: names the item and the attribute.
    """
    registered = {id(optimizer) for optimizer in optimizers.values()}
    for item, optimizer in optimizers.items():
        for attribute, value in vars(optimizer).items():
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(value, dict | list | tuple) else (value,):
                if not isinstance(part, torch.optim.Optimizer) or id(part) in registered:
                    continue
                raise InvalidInputError(
                    "the optimizer keeps another one, whose state is not its own: register that one (too)",
                    optimizer=item,
                    attribute=attribute,
                    type=type(part).__name__,
                )


def capture_optimizer(
    item: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    builder: LayoutBuilder,
    rank: int,
    add: Callable[[Placed], None],
) -> dict[str, Any]:
    """Return the item's value; hand each state tensor to ``add``, not copied.

    Args:
        item: name.
        optimizer: live.
        names: of parameters by id.
        builder: of this rank.
        rank: global.
        add: takes what is to be stored.

    Raises:
        InvalidInputError: a parameter without a name, or a tensor whose meaning is not known.
    """
    walk = _Walk(item, declared(optimizer), builder, rank, add)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        fqns = [_name_of(names, item, number, p) for p in group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": fqns, "options": options})
        for fqn, parameter in zip(fqns, group["params"], strict=True):
            state = optimizer.state.get(parameter)
            if state:
                walk.parameter(fqn, parameter, state)
    every: Mapping[Any, Any] = optimizer.state  # has keys of its own beside the parameters
    return {
        "kind": "optimizer",
        "type": type(optimizer).__name__,
        "groups": groups,
        "scalars": walk.scalars,
        "common": {key: value for key, value in every.items() if not isinstance(key, torch.Tensor)},
        "forms": walk.forms,
        "block_size": walk.declared.block_size,
    }


class _Walk:
    def __init__(
        self,
        item: str,
        declared: LocalState,
        builder: LayoutBuilder,
        rank: int,
        add: Callable[[Placed], None],
    ) -> None:
        self.scalars: dict[str, dict[str, Any]] = {}
        self.forms: dict[str, dict[str, str]] = {}
        self.declared = declared
        self._item = item
        self._builder = builder
        self._rank = rank
        self._add = add

    def parameter(self, fqn: str, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        is_sharded = as_dtensor(parameter) is not None
        for key, value in state.items():
            name = f"{self._item}.{fqn}.{key}"
            if type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):
                _refuse_nested_dtensors(name, value)
                self.scalars.setdefault(fqn, {})[key] = value
            elif key in self.declared.scales or key in self.declared.shards:
                self._declared(name, fqn, parameter, key, value)
            else:
                if is_sharded or as_dtensor(value) is not None:
                    self._note_form(name, fqn, parameter, key, value)
                self._add(self._builder.place(name, value))

    def _declared(self, name: str, fqn: str, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        if key in self.declared.scales:
            self._form(fqn, key, "scales")
            block = self.declared.block_size
            self._add(place_scales(self._builder, self._rank, name, parameter, value, block))
        else:
            self._form(fqn, key, "shard-flat" if value.ndim == 1 != parameter.ndim else "shard")
            self._add(self._builder.place(name, like_parameter(parameter, value, key)))

    def _note_form(self, name: str, fqn: str, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        if key not in self.declared.replicated and looks_like_a_shard(parameter, value):
            raise InvalidInputError(
                "a plain tensor in the state of a sharded parameter has the size of this rank's shard, and "
                "does not tell whether it is one or the same on every rank; see declare_local_state",
                code="local-state",
                tensor=name,
                shape=tuple(value.shape),
            )
        is_distributed = as_dtensor(value) is not None
        if is_distributed and value.shape != parameter.shape:
            self._form(fqn, key, "dtensor")
        elif not is_distributed and value.shape == parameter.shape:
            self._form(fqn, key, "plain")

    def _form(self, fqn: str, key: str, form: str) -> None:
        self.forms.setdefault(fqn, {})[key] = form


def _refuse_nested_dtensors(name: str, value: object) -> None:
    """Such a tensor would come back whole on every rank."""
    if isinstance(value, torch.Tensor):
        if as_dtensor(value) is not None:
            raise InvalidInputError(
                "optimizer state has a DTensor inside a list or mapping, which would come back unsharded",
                tensor=name,
            )
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _refuse_nested_dtensors(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            _refuse_nested_dtensors(f"{name}.{number}", part)


def _name_of(names: Mapping[int, str], item: str, group: int, parameter: torch.Tensor) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise InvalidInputError(
            "the optimizer has a parameter that no registered module owns, so it has no name that would "
            "survive a restart; register its module, or build the optimizer after wrapping the model",
            optimizer=item,
            group=group,
            shape=tuple(parameter.shape),
        )
    return name
