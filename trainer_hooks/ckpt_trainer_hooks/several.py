"""Arguments of the manager that take one object or several: what each of them is called as an item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.errors import InvalidInputError

__all__ = ["named_items"]


def named_items(name: str, value: Any) -> dict[str, Any]:
    """Return the items that an argument stands for.

    One object is the item ``name``. A list or tuple gives ``name_0``, ``name_1``, ... by position, also where
    it holds one object; a mapping gives ``name_<key>``. An object with a ``state_dict`` is one object,
    whatever else it is. None gives no item, and neither does a None among several.

    Raises:
        InvalidInputError: a key is not text, or would not make a valid item name.
    """
    if value is None:
        return {}
    if hasattr(value, "state_dict") or not isinstance(value, list | tuple | Mapping):
        return {name: value}
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    items: dict[str, Any] = {}
    for key, item in pairs:
        if isinstance(value, Mapping) and (not isinstance(key, str) or not key or "." in key):
            raise InvalidInputError(
                "keys of several objects become part of item names: use text without dots, not empty",
                argument=name,
                key=key,
            )
        items[f"{name}_{key}"] = item
    return {name: item for name, item in items.items() if item is not None}
