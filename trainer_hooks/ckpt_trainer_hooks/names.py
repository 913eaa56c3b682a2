"""Fully qualified names that do not depend on what wraps the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.chunks import ModelChunks
from ckpt_trainer_hooks.compat import is_wrapper_step

__all__ = ["MODEL_ITEM", "canonical_names", "owned_tensors", "parameter_names"]

MODEL_ITEM = "model"  # parameters of the item of this name need no prefix in optimizer names


def canonical_names(root: torch.nn.Module, raw_names: Iterator[str] | list[str]) -> dict[str, str]:
    """Map raw state-dict keys of ``root`` to FQNs without wrapper components.

    A tensor that several chunks of a model share is under the first of its keys only.

    Raises:
        InvalidInputError: two keys become one and are not one tensor (never with torch's own wrappers; with
            chunks of a model that do not have global names).
    """
    raw = list(raw_names)
    if not any(_is_step(module, child) for module in root.modules() for child in module._modules):
        return {name: name for name in raw}
    names = {name: _strip(root, name) for name in raw}
    return names if len(set(names.values())) == len(names) else _distinct(root, names)


def _distinct(root: torch.nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    tensors: dict[str, set[int]] = {}
    for found in (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)):
        for name, tensor in found:
            tensors.setdefault(_strip(root, name), set()).add(id(tensor))
    first: dict[str, str] = {}
    for name, clean in names.items():
        if first.setdefault(clean, name) != name and len(tensors.get(clean, ())) != 1:
            raise InvalidInputError(
                "two parameters have one name; chunks of one model must name their parameters as the whole "
                "model does",
                first=first[clean],
                second=name,
                fqn=clean,
            )
    return {name: clean for clean, name in first.items()}


def _is_step(module: torch.nn.Module, child: str) -> bool:
    return isinstance(module, ModelChunks) or is_wrapper_step(module, child)


def _strip(root: torch.nn.Module, name: str) -> str:
    module: torch.nn.Module | None = root
    kept = []
    for part in name.split("."):
        # The checkpoint wrapper's state-dict hook has taken its own component out of the name already.
        while module is not None and part not in module._modules and (inner := _wrapped(module)) is not None:
            module = inner
        if module is None or not _is_step(module, part):
            kept.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(kept)


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    return next((child for name, child in module._modules.items() if is_wrapper_step(module, name)), None)


def owned_tensors(module: torch.nn.Module, *, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Map FQNs to the parameters (and buffers) themselves.

    By canonical name, because ``state_dict()`` strips the checkpoint wrapper's component from its keys
    and ``named_parameters()`` does not.

    Raises:
        InvalidInputError: one of them is lazy and has not got its shape yet.
    """
    raw: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if buffers:
        raw |= dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in raw.items():
        if is_lazy(tensor):
            raise InvalidInputError(
                "lazy parameter has no shape yet; run the model once before a save or restore", tensor=name
            )
    return {fqn: raw[name] for name, fqn in canonical_names(module, list(raw)).items()}


def parameter_names(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """Map ``id(parameter)`` to its name for optimizer state, over all registered modules.

    A parameter that two names share has the first. Parameters of modules other than ``model`` are
    named ``<item>:<fqn>``.
    """
    found: dict[int, str] = {}
    for item, module in modules.items():
        raw = dict(module.named_parameters(remove_duplicate=False))
        for name, fqn in canonical_names(module, list(raw)).items():
            found.setdefault(id(raw[name]), fqn if item == MODEL_ITEM else f"{item}:{fqn}")
    return found
