"""Tensor subclasses that are made of other tensors: codes and scales of a quantized weight, for example.

Their own elements exist only as the result of a computation, and a copy of those would silently be something
else. What is stored are the inner tensors, as ``<name>.<inner>``, and beside them what says how they belong
together:

    {"class": "module.Class", "shape": (..), "dtype": "..", "inner": {<inner>: None or the same again},
     "context": <what __tensor_flatten__ gave>}

They come back into the inner tensors of a live one that says the same of itself; nothing is constructed, so
the class need not be known to the checkpoint, and another layout of it is refused rather than guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt.errors import InvalidInputError
from ckpt.format.values import encode_value
from ckpt_trainer_hooks.compat import as_dtensor, flatten_wrapper
from ckpt_trainer_hooks.layout import dtype_name

__all__ = ["describe_parts", "difference", "inner_tensors", "is_made_of_parts"]


def is_made_of_parts(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a traceable wrapper subclass. DTensors and nested tensors are not meant."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested:
        return False
    return flatten_wrapper(tensor) is not None and as_dtensor(tensor) is None


def inner_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the innermost tensors with their stored names; these are the live ones, not copies."""
    for attribute in _flattened(tensor)[0]:
        inner = getattr(tensor, attribute)
        if is_made_of_parts(inner):
            yield from inner_tensors(f"{name}.{attribute}", inner)
        else:
            yield f"{name}.{attribute}", inner


def describe_parts(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return what is stored beside the inner tensors.

    Raises:
        InvalidInputError: the context has a value of a type that is not registered.
    """
    attributes, context = _flattened(tensor)
    inner = {}
    for attribute in attributes:
        part = getattr(tensor, attribute)
        inner[attribute] = describe_parts(f"{name}.{attribute}", part) if is_made_of_parts(part) else None
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    try:
        encode_value(context)
    except InvalidInputError as error:
        raise InvalidInputError(
            "tensor subclass says with a value of unknown type how its parts belong together; see "
            "register_value_type",
            tensor=name,
            type=kind,
            cause=str(error),
        ) from error
    return {
        "class": kind,
        "shape": tuple(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "inner": inner,
        "context": context,
    }


def difference(saved: Mapping[str, Any] | None, live: Mapping[str, Any] | None) -> str:
    """Say what keeps a live tensor from taking the parts that were saved; empty: nothing."""
    if saved is None or live is None:
        forms = ["a plain tensor" if side is None else f"parts of {side['class']}" for side in (saved, live)]
        return "" if saved is live else f"saved as {forms[0]}, live {forms[1]}"
    for key in ("class", "shape", "dtype", "context"):
        if encode_value(saved[key]) != encode_value(live[key]):
            return f"saved with {key} {saved[key]}, live {live[key]}"
    if list(saved["inner"]) != list(live["inner"]):
        return f"saved in the parts {list(saved['inner'])}, live {list(live['inner'])}"
    inner = (difference(saved["inner"][key], live["inner"][key]) for key in saved["inner"])
    return next((found for found in inner if found), "")


def _flattened(tensor: torch.Tensor) -> tuple[list[str], Any]:
    found = flatten_wrapper(tensor)
    assert found is not None
    return found
