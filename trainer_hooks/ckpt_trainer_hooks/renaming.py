"""A checkpoint under other names: tensors of modules renamed, optimizer state along with its parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt.format.layout import TensorLayout
from ckpt_trainer_hooks.names import MODEL_ITEM
from ckpt_trainer_hooks.selection import Rename, rename_function
from ckpt_trainer_hooks.state import ItemKind

__all__ = ["Renamed", "rename_layouts", "renamed"]

_log = get_logger("restore")


@dataclass(frozen=True, slots=True)
class Renamed:
    """What a checkpoint holds, by live names.

    Attributes:
        layouts: by live name; ``layout.name`` is still the stored one.
        values: of SegmentIndex.state, with live names.
        displaced: stored names whose live name a renamed tensor has taken.
    """

    layouts: Mapping[str, TensorLayout]
    values: dict[str, Any]
    displaced: frozenset[str]


def renamed(stored: Mapping[str, TensorLayout], values: dict[str, Any], rename: Rename | None) -> Renamed:
    """Return the checkpoint under the names that ``rename`` gives.

    Args:
        stored: layouts by stored name.
        values: the merged state values (see ckpt_trainer_hooks.state); not changed.
        rename: from stored to live names.

    Raises:
        InvalidInputError: two tensors get one name, or nothing is renamed.
    """
    if rename is None:
        return Renamed(stored, values, frozenset())
    names = _Names(values["items"], rename_function(rename))
    layouts, displaced = _collect(stored, names)
    aliases = {names.live(alias): names.live(name) for alias, name in values["aliases"].items()}
    if not names.changed:
        raise InvalidInputError("rename fits no tensor of the checkpoint", code="rename")
    parts = {names.live(name): found for name, found in values.get("parts", {}).items()}
    items = _renamed_items(values["items"], names, {*layouts, *aliases})
    return Renamed(layouts, {**values, "items": items, "aliases": aliases, "parts": parts}, displaced)


def rename_layouts(stored: Mapping[str, TensorLayout], rename: Rename | None) -> Mapping[str, TensorLayout]:
    """Return ``stored`` by new names, each tensor on its own. Raises InvalidInputError as :func:`renamed`."""
    if rename is None:
        return stored
    change = rename_function(rename)
    names = _Names({}, change, everything=True)
    layouts, _ = _collect(stored, names)
    if not names.changed:
        raise InvalidInputError("rename fits no tensor of the checkpoint", code="rename")
    return layouts


class _Names:
    """Live names of stored ones; remembers whether any differs."""

    def __init__(
        self, items: Mapping[str, Any], change: Callable[[str], str], *, everything: bool = False
    ) -> None:
        self._change = change
        self._everything = everything
        self.modules = {name for name, item in items.items() if item["kind"] == ItemKind.MODULE}
        self._parameters = {
            name: {fqn for group in item["groups"] for fqn in group["params"]}
            for name, item in items.items()
            if item["kind"] == ItemKind.OPTIMIZER
        }
        self.changed = False
        self.moved: set[str] = set()  # modules of which something is renamed

    def live(self, name: str) -> str:
        item = name.partition(".")[0]
        if self._everything or item in self.modules:
            new = self._change(name)
            if not new:
                raise InvalidInputError("rename did not return a name", code="rename", tensor=name)
            if new != name:
                self.changed = True
                self.moved.add(item)
            return new
        if item in self._parameters:
            return self._optimizer_entry(item, name, self._parameters[item])
        return name

    def parameter(self, fqn: str) -> str:
        """The live name of a parameter as optimizers call it: ``<fqn>``, or ``<item>:<fqn>``."""
        item, colon, rest = fqn.partition(":")
        is_other = bool(colon) and item in self.modules
        new = self.live(f"{item}.{rest}" if is_other else f"{MODEL_ITEM}.{fqn}")
        new_item, _, new_fqn = new.partition(".")
        return new_fqn if new_item == MODEL_ITEM else f"{new_item}:{new_fqn}"

    def _optimizer_entry(self, item: str, name: str, parameters: Collection[str]) -> str:
        fqn, key = name.removeprefix(f"{item}."), ""
        while fqn and fqn not in parameters:
            fqn, _, part = fqn.rpartition(".")
            key = f".{part}{key}"
        return f"{item}.{self.parameter(fqn)}{key}" if fqn else name


def _collect(
    stored: Mapping[str, TensorLayout], names: _Names
) -> tuple[dict[str, TensorLayout], frozenset[str]]:
    moved: dict[str, TensorLayout] = {}
    kept: dict[str, TensorLayout] = {}
    for name, layout in stored.items():
        new = names.live(name)
        if new == name:
            kept[name] = layout
        elif new in moved:
            raise InvalidInputError(
                "two tensors are renamed to one name",
                code="rename",
                name=new,
                first=moved[new].name,
                second=name,
            )
        else:
            moved[new] = layout
    displaced = frozenset(kept.keys() & moved.keys())
    if displaced:
        event(_log, logging.WARNING, "restore.displaced", count=len(displaced), first=min(displaced))
    return kept | moved, displaced


def _renamed_items(items: Mapping[str, Any], names: _Names, tensors: Collection[str]) -> dict[str, Any]:
    extras = {
        names.live(f"{item}.{fqn}"): value
        for item in names.modules
        for fqn, value in items[item]["extra"].items()
    }
    others = items.keys() - names.modules
    homes = {name.partition(".")[0] for name in (*tensors, *extras)} - others
    homes |= {name for name in names.modules if name not in names.moved}  # also those without any tensor
    result: dict[str, Any] = {}
    for name, item in items.items():
        if item["kind"] == ItemKind.OPTIMIZER:
            result[name] = _renamed_optimizer(item, names)
        elif name not in names.modules:
            result[name] = item
    for home in sorted(homes):
        own = {
            name.partition(".")[2]: value for name, value in extras.items() if name.partition(".")[0] == home
        }
        result[home] = {"kind": str(ItemKind.MODULE), "extra": own}
    return result


def _renamed_optimizer(item: Mapping[str, Any], names: _Names) -> dict[str, Any]:
    groups = [
        {**group, "params": [names.parameter(fqn) for fqn in group["params"]]} for group in item["groups"]
    ]
    by_parameter = {
        field: {names.parameter(fqn): found for fqn, found in item.get(field, {}).items()}
        for field in ("scalars", "forms")
    }
    return {**item, "groups": groups, **by_parameter}
