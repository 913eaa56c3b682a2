"""The registered training state, flattened anew at every save: tensor leaves and plain values.

What is in the values (docs/format.md, "State values"):

    {"items": {<item>: {"kind": "module",    "extra": {...}}
                       {"kind": "optimizer", "type": .., "groups": [..], "scalars": {<fqn>: {..}},
                        "common": {..}, ..}      see ckpt_trainer_hooks.optimizer_capture
                       {"kind": "stateful",  "state": <tree>}
                       {"kind": "plain",     "value": <tree>}
                       {"kind": "generator", "type": .., "state": <tree>}
                       {"kind": "gradients", "done": .., "of": .., "own": ..}},
     "aliases": {<tensor name>: <the name it is stored under>},
     "parts":   {<tensor name>: <see ckpt_trainer_hooks.parts>}}     where there are any

Items declared per rank, generators, and the random-number streams are in the rank's own values:

    {"items": {...}, "rng": {...}, "rng_stream": <number of the stream, else that of the rank>}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from enum import StrEnum
from typing import Any

import torch

import ckpt_trainer_hooks.value_types  # noqa: F401 - registers torch's types
from ckpt.collector import collector_paused
from ckpt.digest import digest_hex
from ckpt.errors import InvalidInputError
from ckpt.format.segment import Change
from ckpt.format.values import encode_value
from ckpt_trainer_hooks.chunks import as_one_module
from ckpt_trainer_hooks.compat import PLAIN_TENSORS
from ckpt_trainer_hooks.data import settle_loader, warn_of_generators
from ckpt_trainer_hooks.fsdp1 import Fsdp1Views
from ckpt_trainer_hooks.generators import capture_generator, generator_type, is_same_state
from ckpt_trainer_hooks.gradients import GradientState, gradient_slots, own_record
from ckpt_trainer_hooks.layout import LayoutBuilder, Placed, check_plain_class
from ckpt_trainer_hooks.leaves import FlatState, Leaf, LeafKind, leaf_kind
from ckpt_trainer_hooks.names import ModuleTensors, canonical_names, owned_tensors, parameter_names
from ckpt_trainer_hooks.optimizer_capture import capture_optimizer, check_optimizers
from ckpt_trainer_hooks.parts import describe_parts, inner_tensors, is_made_of_parts
from ckpt_trainer_hooks.rng import capture_rng, restore_rng
from ckpt_trainer_hooks.shards import ExplicitShards

__all__ = ["ItemKind", "TrainState", "is_tensor_entry"]


_PATH_PART = re.compile(r"""\[['"](.*?)['"]\]|\[([^\]]*)\]""")


_EXTRA_STATE = "_extra_state"  # torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class ItemKind(StrEnum):
    """How an item is captured and restored."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    STATEFUL = "stateful"
    PLAIN = "plain"
    GENERATOR = "generator"
    GRADIENTS = "gradients"
    SHARDS = "shards"


class TrainState:
    """The objects of a run by item name.

    Args:
        items: modules (or lists of modules: chunks of one model), optimizers, objects with
            state_dict/load_state_dict, mutable mappings of plain values, or random-number generators. None
            values are left out.
        builder: of this rank.
        rank: global rank of this process.
        per_rank: names of items whose state differs from rank to rank (data loaders). Generators always do;
            an object with ``same_on_every_rank = True`` never does.
        rng_stream: number of this rank's random-number streams; ranks with one number draw alike after a
            change of the number of ranks. Default: the rank.

    Raises:
        InvalidInputError: an object that could not be restored.
    """

    def __init__(
        self,
        items: Mapping[str, object],
        builder: LayoutBuilder,
        *,
        rank: int,
        per_rank: Collection[str] = (),
        rng_stream: int | None = None,
    ) -> None:
        self.items: dict[str, Any] = {
            name: as_one_module(name, item) for name, item in items.items() if item is not None
        }
        if not self.items:
            raise InvalidInputError("nothing to checkpoint: pass at least a model")
        self.kinds = {name: _kind(name, item) for name, item in self.items.items()}
        if unknown := set(per_rank) - items.keys():
            raise InvalidInputError("per_rank names items that are not there", items=sorted(unknown))
        self.per_rank = frozenset(
            name
            for name, item in self.items.items()
            if name in per_rank and not getattr(item, "same_on_every_rank", False)
        )
        for name in self.per_rank:
            if self.kinds[name] in (ItemKind.MODULE, ItemKind.OPTIMIZER):
                raise InvalidInputError("modules and optimizers cannot be declared per rank", item=name)
        check_optimizers(self.optimizers)
        self.fsdp1 = Fsdp1Views(self.items)
        self.items = self.fsdp1.replacing(self.items)
        if self.fsdp1 and any(isinstance(item, GradientState) for item in self.items.values()):
            raise InvalidInputError("accumulated gradients of FSDP1 cannot be captured; use another policy")
        warn_of_generators(self.items)
        self.builder = builder
        self.rank = rank
        self.rng_stream = rank if rng_stream is None else rng_stream
        if self.rng_stream < 0:
            raise InvalidInputError("rng_stream must not be negative", value=rng_stream)
        self._at_once: set[str] = set()  # modules that were seen to change outside optimizer steps

    def is_own(self, name: str) -> bool:
        """Whether each rank has a state of its own of the item."""
        return name in self.per_rank or self.kinds.get(name) in (ItemKind.GENERATOR, ItemKind.SHARDS)

    def copy_at_once(self, names: Iterable[str]) -> None:
        """Learn from a torn snapshot: modules without a parameter of any optimizer (an average that the loop
        updates after the save) are copied at once from now on. ``names`` are of the torn tensors.
        """
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        for item in {name.partition(".")[0] for name in names} & self.modules.keys():
            if not any(id(parameter) in stepped for parameter in self.modules[item].parameters()):
                self._at_once.add(item)

    def may_defer(self, item: str) -> bool:
        """Whether the parameters of a module may be copied until the next optimizer step."""
        return item not in self._at_once

    def of_kind(self, kind: ItemKind) -> dict[str, Any]:
        """The items of one kind, in registration order."""
        return {name: item for name, item in self.items.items() if self.kinds[name] is kind}

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return self.of_kind(ItemKind.MODULE)

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return self.of_kind(ItemKind.OPTIMIZER)

    @property
    def stepping_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the training loop steps; those of FSDP1 are seen through views elsewhere."""
        return self.fsdp1.stepping(self.optimizers)

    def names_digest(self) -> str:
        """Digest of the names of all module tensors: equal on ranks that hold the same part of the model."""
        names = [
            f"{item}.{fqn}"
            for item, module in self.modules.items()
            for fqn in canonical_names(module, list(module.state_dict())).values()
        ]
        return digest_hex("\0".join(sorted(names)).encode())

    @collector_paused()
    def flatten(self) -> FlatState:
        """Walk the items. Copies nothing of a tensor, changes nothing, makes no optimizer step.

        Raises:
            InvalidInputError: something that cannot be stored exactly, named by its path.
        """
        self.fsdp1.pull()
        return _Flattening(self).run()


class _Flattening:
    """One walk; its fields are the result under construction."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._builder = state.builder
        self._flat = FlatState()
        self._names: set[str] = set()
        self._own_gradients: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}
        self._parts: dict[str, dict[str, Any]] = {}
        self._storages: dict[int, list[Placed]] = {}  # by address; leaves of modules
        self._walked: dict[str, ModuleTensors] = {}  # modules, by item
        self._has_called_out = False  # to code that is not torch's or ours, which may draw random numbers

    def run(self) -> FlatState:
        encoders: dict[ItemKind, Callable[[str, Any], dict[str, Any]]] = {
            ItemKind.MODULE: self._module,
            ItemKind.OPTIMIZER: self._optimizer,
            ItemKind.STATEFUL: self._stateful,
            ItemKind.PLAIN: self._plain,
            ItemKind.GENERATOR: self._generator,
            ItemKind.GRADIENTS: self._gradients,
            ItemKind.SHARDS: lambda _, shards: shards.tree(),
        }
        for stateful in self._state.of_kind(ItemKind.STATEFUL).values():
            settle_loader(stateful)
        rng = capture_rng()  # first: a state_dict() may draw random numbers
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, item in self._state.items.items():
            target = own if self._state.is_own(name) else shared
            if not (isinstance(item, GradientState) and item.is_empty):
                target[name] = encoders[self._state.kinds[name]](name, item)
        own |= self._own_gradients
        if self._has_called_out and not is_same_state(rng, capture_rng()):
            restore_rng(rng)  # a save must not change what training draws next
        tree: dict[str, Any] = {"items": shared, "aliases": self._aliases}
        if self._parts:
            tree["parts"] = self._parts
        self._flat.values = encode_value(tree, leaf=self._shared_leaf)
        self._flat.rank_values = encode_value(
            {"items": own, "rng": rng, "rng_stream": self._state.rng_stream}, leaf=self._rank_leaf
        )
        return self._flat

    def _module(self, item: str, module: torch.nn.Module) -> dict[str, Any]:
        walked = self._tensors_of(item)
        parameters = walked.parameters
        deferrable = self._state.may_defer(item)
        wrappers = {
            fqn: tensor
            for found in (parameters, walked.buffers)
            for fqn, tensor in found.items()
            if type(tensor) not in PLAIN_TENSORS and is_made_of_parts(tensor)
        }
        state = walked.entries
        if state is None or wrappers:  # hooks, or classes that have a say in what their state is
            self._has_called_out = True
            state = module.state_dict()
        extra = {}
        for raw, fqn in walked.canonical(list(state)).items():
            value = state[raw]
            kind = leaf_kind(parameters.get(fqn), deferrable=deferrable)
            if fqn in wrappers:  # itself: what state_dict() returns was detached, and may be computed
                name = f"{item}.{fqn}"
                self._parts[name] = describe_parts(name, wrappers[fqn])
                for inner, tensor in inner_tensors(name, wrappers[fqn]):
                    self._add_unless_alias(inner, tensor, kind)
            elif is_tensor_entry(fqn, value):
                name = f"{item}.{fqn}"
                self._add_unless_alias(name, value, kind)
            else:
                extra[fqn] = value
        return {"kind": str(ItemKind.MODULE), "extra": extra}

    def _optimizer(self, item: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = parameter_names({name: self._tensors_of(name) for name in self._state.modules})

        def add(placed: Placed) -> None:
            self._append(placed.layout.name, placed, deferred=True)

        return capture_optimizer(item, optimizer, names, self._builder, self._state.rank, add)

    def _tensors_of(self, item: str) -> ModuleTensors:
        """Each module is walked once; nothing of it is kept for the next save, which may find it changed."""
        walked = self._walked.get(item)
        if walked is None:
            walked = self._walked[item] = owned_tensors(self._state.items[item])
        return walked

    def _stateful(self, item: str, stateful: Any) -> dict[str, Any]:
        self._has_called_out = True
        return {"kind": str(ItemKind.STATEFUL), "state": stateful.state_dict()}

    def _plain(self, item: str, value: Any) -> dict[str, Any]:
        self._has_called_out |= type(value) is not dict
        return {"kind": str(ItemKind.PLAIN), "value": dict(value)}  # restored in place, so of any type

    def _generator(self, item: str, generator: Any) -> dict[str, Any]:
        return {
            "kind": str(ItemKind.GENERATOR),
            "type": generator_type(generator),
            "state": capture_generator(generator),
        }

    def _gradients(self, item: str, gradients: GradientState) -> dict[str, Any]:
        own = {}
        for slot in gradient_slots(self._state.modules):
            value = slot.get()
            if value is None:
                continue
            if slot.is_shared(value):
                name = f"{item}.{slot.name}"
                self._append(name, self._builder.place(name, value), deferred=False)
            else:
                own[slot.name] = own_record(slot, value)
        self._own_gradients[item] = {"kind": str(ItemKind.GRADIENTS), "own": own}
        return {
            "kind": str(ItemKind.GRADIENTS),
            "done": gradients.done,
            "of": gradients.of,
            "own": bool(own),
        }

    def _shared_leaf(self, path: str, value: object) -> str | None:
        """Store a tensor that was met inside plain values; it is copied at once, never deferred."""
        return self._tree_leaf(path, value, suffix="", alone=False)

    def _rank_leaf(self, path: str, value: object) -> str | None:
        """The same for a tensor of this rank alone; its name must not meet another rank's."""
        return self._tree_leaf(path, value, suffix=f"@rank{self._state.rank}", alone=True)

    def _tree_leaf(self, path: str, value: object, *, suffix: str, alone: bool) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        check_plain_class(_dotted(path), value)
        base = _dotted(path)
        name = base + suffix
        serial = 2
        while name in self._names:  # {"a.b": t} beside {"a": {"b": t}}
            name = f"{base}#{serial}{suffix}"
            serial += 1
        self._append(name, self._builder.place(name, value, alone=alone), deferred=False)
        return name

    def _add_unless_alias(self, name: str, tensor: torch.Tensor, kind: LeafKind) -> None:
        placed = self._builder.place(name, tensor)
        others = self._storages.setdefault(placed.local.data_ptr(), [])
        for other in others:
            if _is_one_tensor(placed, other):
                self._aliases[name] = other.layout.name
                return
        others.append(placed)
        self._append(name, placed, *kind)

    def _append(
        self,
        name: str,
        placed: Placed,
        deferred: bool,
        agreed: bool = True,
        change: Change = Change.ALWAYS,
    ) -> None:
        names = self._names
        if name in names:
            raise InvalidInputError("two tensors have one name", tensor=name)
        names.add(name)
        self._flat.leaves.append(Leaf(placed, deferred, agreed, change))


def is_tensor_entry(fqn: str, value: object) -> bool:
    """Whether an entry of a module's state dict goes into the tensor of that name, and not to a setter.

    A module's extra state may be a tensor too (serialized bytes), of another size at each save.
    """
    return isinstance(value, torch.Tensor) and not (
        fqn.endswith(_EXTRA_STATE) and fqn.rpartition(".")[2] == _EXTRA_STATE
    )


def _is_one_tensor(one: Placed, other: Placed) -> bool:
    """Whether two tensors that begin at one address are the same elements, read in the same way."""
    return one.local.numel() > 0 and _reading(one) == _reading(other)


def _reading(placed: Placed) -> tuple[object, ...]:
    local = placed.local
    return (
        local.shape,
        local.stride(),
        local.dtype,
        local.device,
        local.is_conj(),
        local.is_neg(),
        placed.layout.global_shape,
    )


def _dotted(path: str) -> str:
    """``state['items']['ema']['state']['a'][0]`` -> ``ema.a.0``."""
    parts = [text or number for text, number in _PATH_PART.findall(path)]
    del parts[0]  # "items"
    if len(parts) > 1 and parts[1] in ("state", "value"):
        del parts[1]
    return ".".join(parts)


def _kind(name: str, item: object) -> ItemKind:
    if "." in name or not name:
        raise InvalidInputError("item names must not be empty or contain dots", item=name)
    if isinstance(item, torch.nn.Module):
        return ItemKind.MODULE
    if isinstance(item, torch.optim.Optimizer):
        return ItemKind.OPTIMIZER
    if isinstance(item, GradientState):
        return ItemKind.GRADIENTS
    if generator_type(item) is not None:
        return ItemKind.GENERATOR
    if isinstance(item, ExplicitShards):
        return ItemKind.SHARDS
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        return ItemKind.STATEFUL
    if isinstance(item, MutableMapping):
        return ItemKind.PLAIN
    raise InvalidInputError(
        "item cannot be restored in place: pass a module, an optimizer, an object with state_dict and "
        "load_state_dict, a mutable mapping of plain values, or a random-number generator",
        item=name,
        type=type(item).__name__,
    )
