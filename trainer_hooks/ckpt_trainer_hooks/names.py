"""Fully qualified names that do not depend on what wraps the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.chunks import ModelChunks
from ckpt_trainer_hooks.compat import (
    PLAIN_TENSORS,
    WRAPPER_CHILDREN,
    is_wrapper_step,
    plain_paths,
    stores_plainly,
)

__all__ = ["MODEL_ITEM", "ModuleTensors", "canonical_names", "owned_tensors", "parameter_names"]

MODEL_ITEM = "model"  # parameters of the item of this name need no prefix in optimizer names


def canonical_names(root: torch.nn.Module, raw_names: Iterator[str] | list[str]) -> dict[str, str]:
    """Map raw state-dict keys of ``root`` to FQNs without wrapper components.

    A tensor that several chunks of a model share is under the first of its keys only.

    Raises:
        InvalidInputError: two keys become one and are not one tensor (never with torch's own wrappers; with
            chunks of a model that do not have global names).
    """
    if not _is_wrapped(root, root.modules()):
        return {name: name for name in raw_names}
    return _stripped(root, raw_names)


def _stripped(root: torch.nn.Module, raw_names: Iterator[str] | list[str]) -> dict[str, str]:
    names = {name: _strip(root, name) for name in raw_names}
    return names if len(set(names.values())) == len(names) else _distinct(root, names)


def _is_wrapped(root: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> bool:
    """Whether a name under ``root`` may have a part to be taken out; ``modules`` are all there are."""
    return isinstance(root, ModelChunks) or any(
        not WRAPPER_CHILDREN.isdisjoint(module._modules)
        and any(_is_step(module, child) for child in module._modules)
        for module in modules
    )


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


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of a module by canonical name, found in one walk over it.

    By canonical name, because ``state_dict()`` strips the checkpoint wrapper's component from its keys
    and ``named_parameters()`` does not.

    Attributes:
        module: the module.
        is_wrapped: whether names have parts to be taken out.
        parameters: the parameters themselves.
        buffers: the buffers themselves, those that are not saved too.
        entries: what ``module.state_dict()`` would return, where that can be told without calling it (half of
            the time of a walk); else None. By raw name.
    """

    module: torch.nn.Module
    is_wrapped: bool
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    entries: dict[str, torch.Tensor] | None = None

    def canonical(self, raw_names: Iterator[str] | list[str]) -> dict[str, str]:
        """:func:`canonical_names` of this module, without a walk where nothing wraps it."""
        if self.is_wrapped:
            return _stripped(self.module, raw_names)
        return {name: name for name in raw_names}


def owned_tensors(module: torch.nn.Module) -> ModuleTensors:
    """Walk ``module`` once.

    Raises:
        InvalidInputError: a parameter or buffer is lazy and has not got its shape yet.
    """
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    entries: dict[str, torch.Tensor] | None = None
    paths = plain_paths(module)
    if paths is None:  # a class with a view of its own of what its names are
        parameters.update(module.named_parameters(remove_duplicate=False))
        buffers.update(module.named_buffers(remove_duplicate=False))
        is_wrapped = _is_wrapped(module, module.modules())
    else:
        entries = _collect_tensors(paths, parameters, buffers)
        is_wrapped = _is_wrapped(module, (part for _, part in paths))
    _refuse_lazy(parameters)
    _refuse_lazy(buffers)
    if is_wrapped:
        parameters = {fqn: parameters[raw] for raw, fqn in _stripped(module, list(parameters)).items()}
        buffers = {fqn: buffers[raw] for raw, fqn in _stripped(module, list(buffers)).items()}
    return ModuleTensors(module, is_wrapped, parameters, buffers, entries)


def _collect_tensors(
    paths: Iterable[tuple[str, torch.nn.Module]],
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor] | None:
    """Fill ``parameters`` and ``buffers``; return what the state dict has, in its order, or None: ask it."""
    entries: dict[str, torch.Tensor] = {}
    is_plain = True
    for prefix, part in paths:
        is_plain = is_plain and stores_plainly(part)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                parameters[prefix + name] = entries[prefix + name] = parameter
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffers[prefix + name] = buffer
                if name not in part._non_persistent_buffers_set:
                    entries[prefix + name] = buffer
    # Other classes of tensors may have a detach() of their own, by which state_dict() shows them.
    return entries if is_plain and all(type(tensor) in PLAIN_TENSORS for tensor in entries.values()) else None


def _refuse_lazy(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if type(tensor) is not torch.nn.Parameter and is_lazy(tensor):
            raise InvalidInputError(
                "lazy parameter has no shape yet; run the model once before a save or restore", tensor=name
            )


def parameter_names(modules: Mapping[str, ModuleTensors]) -> dict[int, str]:
    """Map ``id(parameter)`` to its name for optimizer state, over all registered modules.

    A parameter that two names share has the first. Parameters of modules other than ``model`` are
    named ``<item>:<fqn>``.
    """
    found: dict[int, str] = {}
    for item, tensors in modules.items():
        prefix = "" if item == MODEL_ITEM else f"{item}:"
        for fqn, parameter in tensors.parameters.items():
            found.setdefault(id(parameter), prefix + fqn)
    return found
