"""Where restored bytes go: live tensors of modules and optimizers, new tensors inside plain state."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt.format.layout import LayoutSet
from ckpt.format.states import merge_values
from ckpt.format.values import decode_value
from ckpt.geometry import Region
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.compat import as_dtensor, local_tensor
from ckpt_trainer_hooks.data import settle_loader
from ckpt_trainer_hooks.elements import zeros
from ckpt_trainer_hooks.filling import Filling, RestoreTargets
from ckpt_trainer_hooks.generators import generator_type, restore_generator
from ckpt_trainer_hooks.gradients import GradientState, clear_gradients, gradient_slots, misfit, put_record
from ckpt_trainer_hooks.layout import dtype_name, torch_dtype
from ckpt_trainer_hooks.local_state import declared
from ckpt_trainer_hooks.mismatch import Mismatch
from ckpt_trainer_hooks.names import MODEL_ITEM, owned_tensors, parameter_names
from ckpt_trainer_hooks.optimizer_restore import Destination, StateForms
from ckpt_trainer_hooks.optimizer_state import (
    changed_order,
    keeping_step_on_device,
    matching_group,
    optimizer_entries,
    set_optimizer,
)
from ckpt_trainer_hooks.parts import describe_parts, difference, inner_tensors, is_made_of_parts
from ckpt_trainer_hooks.redistribute import Spread, load_later
from ckpt_trainer_hooks.renaming import renamed
from ckpt_trainer_hooks.selection import RestoreOptions
from ckpt_trainer_hooks.shards import ExplicitShards, SavedShards, plan_fills
from ckpt_trainer_hooks.state import ItemKind, TrainState, is_tensor_entry

__all__ = ["Mismatch", "RestoreTargets", "collect_targets"]

_log = get_logger("restore")


def collect_targets(
    state: TrainState,
    saved: LayoutSet,
    values: Sequence[common_pb2.Value],
    rank_values: common_pb2.Value | None,
    options: RestoreOptions | None = None,
    spread: Spread | None = None,
    every_rank: Sequence[common_pb2.Value] = (),
) -> RestoreTargets:
    """Match the live state with a checkpoint. Changes nothing yet.

    Args:
        state: the registered objects.
        saved: layouts of the checkpoint.
        values: SegmentIndex.state of the ranks that the manifest's state_ranks name.
        rank_values: SegmentIndex.rank_state of this rank; None where this rank has none.
        options: what to take of it; all by default.
        spread: instead of ``rank_values``, where the number of ranks changed.
        every_rank: the own values of all saved ranks, where explicit shards are registered.

    Raises:
        InvalidInputError: the options fit nothing; what does not fit the live state is in the result.
    """
    state.fsdp1.pull()
    collector = _Collector(state, saved, values, rank_values, options or RestoreOptions(), spread)
    collector.every_rank = every_rank
    targets = collector.run()
    if state.fsdp1:
        targets.apply.append(state.fsdp1.push)
    return targets


class _Collector(Filling):
    def __init__(
        self,
        state: TrainState,
        saved: LayoutSet,
        values: Sequence[common_pb2.Value],
        rank_values: common_pb2.Value | None,
        options: RestoreOptions,
        spread: Spread | None = None,
    ) -> None:
        super().__init__(state, options)
        self.every_rank: Sequence[common_pb2.Value] = ()
        self._stored = saved
        self._leaves: dict[str, torch.Tensor] = {}
        merged = merge_values([decode_value(value, leaf=self._read_leaf) for value in values])
        names = renamed(saved, merged, options.rename)
        self._saved = names.layouts  # by live name
        self._used |= names.displaced
        self._values = names.values
        self._aliases = self._values["aliases"]
        self._rank_items: dict[str, Any] = {}
        if rank_values is not None:
            self._rank_items = decode_value(rank_values, leaf=self._read_leaf)["items"]
        elif spread is not None:
            self._rank_items, problems = spread.items(state, self._read_leaf, self._wants_some)
            self._result.mismatch.shapes += problems

    def run(self) -> RestoreTargets:
        collectors: dict[ItemKind, Callable[[str, Any, Mapping[str, Any]], None]] = {
            ItemKind.MODULE: self._module,
            ItemKind.OPTIMIZER: self._optimizer,
            ItemKind.STATEFUL: self._stateful,
            ItemKind.PLAIN: self._plain,
            ItemKind.GENERATOR: self._generator,
            ItemKind.GRADIENTS: self._gradients,
            ItemKind.SHARDS: lambda *_: None,  # see below
        }
        shared = self._values["items"]
        order = sorted(self._state.items, key=lambda name: list(collectors).index(self._state.kinds[name]))
        for name in order:  # modules, then optimizers, then schedulers and the rest: the documented order
            if not self._wants_some(name):
                continue
            if self._state.kinds[name] is ItemKind.SHARDS:
                self._shards(name, self._state.items[name])
                continue
            saved = (self._rank_items if self._state.is_own(name) else shared).get(name)
            kind = self._state.kinds[name]
            if self._state.is_own(name):
                self._result.own[name] = saved is not None
            if kind is ItemKind.GRADIENTS and saved is None:  # saved between accumulations
                self._gradients(name, self._state.items[name], {"done": 0, "of": 0, "own": False})
            elif saved is None:
                self._result.mismatch.missing.append(f"{name} (whole item)")
            elif saved["kind"] != str(kind):
                self._result.mismatch.shapes.append(f"{name}: saved as {saved['kind']}, live {kind}")
            else:
                later = load_later(self._state.items[name], saved)
                if later is None:
                    collectors[kind](name, self._state.items[name], saved)
                else:
                    self._result.apply.append(later)
                if kind is ItemKind.STATEFUL:
                    self._result.apply.append(functools.partial(settle_loader, self._state.items[name]))
        self._find_unexpected(shared)
        named = [*self._saved, *self._result.mismatch.missing]
        self._options.check_used([*named, *(f"{name}." for name in [*self._state.items, *shared])])
        return self._result

    def _wants_some(self, item: str) -> bool:
        """Whether the options may take something of an item that is registered here."""
        kind = self._state.kinds.get(item)
        if kind in (ItemKind.MODULE, ItemKind.OPTIMIZER):
            return self._options.touches(item, is_module=kind is ItemKind.MODULE)
        return kind is not None and self._options.takes_item(item)

    def _find_unexpected(self, shared: Mapping[str, Any]) -> None:
        unexpected = self._result.mismatch.unexpected
        saved_items = {**shared, **self._rank_items}
        unexpected += [
            f"{name} (whole item)"
            for name, item in saved_items.items()
            if name not in self._state.items
            and self._options.takes_item(name, is_module=item["kind"] == ItemKind.MODULE)
        ]
        unexpected += [
            name
            for name, layout in self._saved.items()
            if layout.name not in self._used
            and self._wants_some(name.partition(".")[0])
            and self._options.takes(name)
            and "@rank" not in name
        ]

    def _module(self, item: str, module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
        walked = owned_tensors(module)
        owners = walked.parameters | walked.buffers
        live = module.state_dict()
        emitted: OrderedDict[str, Any] = OrderedDict()
        extra = dict(saved["extra"])
        for raw, fqn in walked.canonical(list(live)).items():
            value = live[raw]
            if not self._options.takes(f"{item}.{fqn}"):
                continue
            if not is_tensor_entry(fqn, value):
                if fqn in extra:
                    emitted[raw] = extra.pop(fqn)
                else:
                    self._result.mismatch.missing.append(f"{item}.{fqn}")
                continue
            owner = owners.get(fqn)
            if not self._has_fitting_parts(f"{item}.{fqn}", owner):
                continue
            if owner is not None and is_made_of_parts(owner):
                for inner, tensor in inner_tensors(f"{item}.{fqn}", owner):
                    self._into(inner, tensor)
            elif owner is not None and local_of(owner).data_ptr() == local_of(value).data_ptr():
                self._into(f"{item}.{fqn}", value)
            else:  # a state-dict hook made it; what is written into it would be lost
                emitted[raw] = value.clone()
                self._into(f"{item}.{fqn}", emitted[raw])
        left = [f"{item}.{fqn}" for fqn in extra]
        self._result.mismatch.unexpected += [name for name in left if self._options.takes(name)]
        if emitted:
            # Modules look up in it which version of themselves wrote the entries.
            emitted._metadata = getattr(live, "_metadata", {})  # type: ignore[attr-defined]
            self._result.apply.append(lambda: _load_emitted(module, emitted))

    def _has_fitting_parts(self, name: str, live: torch.Tensor | None) -> bool:
        """Whether the tensor was saved in the parts that the live one has; a plain one has none."""
        saved = self._values.get("parts", {}).get(name)
        has_parts = live is not None and is_made_of_parts(live)
        if saved is None and not has_parts:
            return True
        problem = difference(saved, describe_parts(name, live) if live is not None and has_parts else None)
        if problem:
            self._result.mismatch.shapes.append(f"{name}: {problem}")
            self._used |= {layout.name for key, layout in self._saved.items() if key.startswith(f"{name}.")}
        return not problem

    def _optimizer(self, item: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        names = parameter_names({name: owned_tensors(module) for name, module in self._state.modules.items()})
        parameters = {
            names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names
        }
        is_whole = self._options.takes_item(item)
        groups = self._groups(item, optimizer, names, saved["groups"]) if is_whole else []
        self._result.mismatch.shapes += changed_order(item, optimizer, names, saved)
        on_device = keeping_step_on_device(optimizer, groups)
        loaded = self._optimizer_state(item, optimizer, parameters, saved, on_device)
        kind = type(optimizer).__name__
        if saved["type"] != kind:
            event(
                _log, logging.WARNING, "restore.optimizer_differs", item=item, saved=saved["type"], live=kind
            )
        listed = {
            fqn
            for group in saved["groups"]
            for fqn in group["params"]
            if fqn in loaded or self._options.takes(f"{item}.{fqn}.")
        }
        self._result.mismatch.unexpected += [
            f"{item}.{fqn} (in a group)" for fqn in sorted(listed - parameters.keys())
        ]
        self._result.mismatch.missing += [
            f"{item}.{fqn} (in no group)"
            for fqn in sorted(
                parameters.keys() - {fqn for group in saved["groups"] for fqn in group["params"]}
            )
            if self._options.takes(f"{item}.{fqn}.")
        ]
        known = {fqn: parameter for fqn, parameter in parameters.items() if fqn in listed}
        common = saved["common"] if is_whole else None
        self._result.apply.append(lambda: set_optimizer(optimizer, known, loaded, groups, common))

    def _optimizer_state(
        self,
        item: str,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        saved: Mapping[str, Any],
        on_device: Collection[int],
    ) -> dict[str, dict[str, Any]]:
        """The new state of each parameter of which something is taken, tensors still to be filled."""
        forms = StateForms.of(saved, self._saved, self._state.builder, self._state.rank, declared(optimizer))
        loaded: dict[str, dict[str, Any]] = {}
        left_out: list[tuple[str, str, str]] = []
        for fqn, found in saved["scalars"].items():
            for key, value in found.items():
                if self._options.takes(f"{item}.{fqn}.{key}"):
                    loaded.setdefault(fqn, {})[key] = value
                else:
                    left_out.append((f"{item}.{fqn}.{key}", fqn, key))
        # A tensor inside the item's values may be named like a parameter's state.
        tensors = {name: layout for name, layout in self._saved.items() if layout.name not in self._leaves}
        for name, fqn, key in optimizer_entries(item, tensors, parameters):
            if not self._options.takes(name):
                left_out.append((name, fqn, key))
                continue
            parameter = parameters[fqn]
            self._check_parameter(name, fqn, parameter)
            base = key.partition("@rank")[0]  # each rank may have stored its own
            if base not in loaded.setdefault(fqn, {}):
                live = optimizer.state.get(parameter, {}).get(base)
                on_its_device = id(parameter) in on_device
                found = forms.destination(name, fqn, key, parameter, live, on_device=on_its_device)
                loaded[fqn][base] = found.tensor
                self._into_state(found)
        for name, fqn, key in left_out:  # stays as it is; half of a parameter's state would be none at all
            if fqn in loaded and fqn in parameters:
                live_state = optimizer.state.get(parameters[fqn], {})
                if key in live_state:
                    loaded[fqn][key] = live_state[key]
                else:
                    self._result.mismatch.missing.append(f"{name} (left out, and there is none here to keep)")
        return loaded

    def _check_parameter(self, name: str, fqn: str, parameter: torch.Tensor) -> None:
        """State of a left-out parameter that has another shape here would be used without any error."""
        module, _, rest = fqn.rpartition(":")
        full = f"{module or MODEL_ITEM}.{rest}"
        layout = self._saved.get(self._aliases.get(full, full))
        if self._options.takes(full) or layout is None:
            return
        if layout.global_shape != tuple(parameter.shape):
            self._result.mismatch.shapes.append(
                f"{name}: of a parameter saved as {list(layout.global_shape)}, live {list(parameter.shape)}"
            )

    def _groups(
        self,
        item: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        saved: list[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """The saved options of each live group, by the names in it."""
        found: list[dict[str, Any]] = []
        for number, group in enumerate(optimizer.param_groups):
            fqns = [names.get(id(p), "") for p in group["params"]]
            match = matching_group(fqns, number, saved)
            if match is None:
                self._result.mismatch.missing.append(
                    f"{item} group {number} (its parameters, {', '.join(fqns[:3])} ..., were in no group, or "
                    "in groups with different options)"
                )
            found.append({} if match is None else match["options"])
        return found

    def _into_state(self, found: Destination) -> None:
        if found.problem:
            self._result.mismatch.shapes.append(found.problem)
            self._used.add(self._saved[found.source].name)
        elif found.region is None or found.written is None:
            self._into(found.source, found.tensor)
        else:
            self._want(self._saved[found.source], found.written, found.region)

    def _stateful(self, item: str, stateful: Any, saved: Mapping[str, Any]) -> None:
        state = saved["state"]
        if isinstance(stateful, torch.amp.GradScaler) and (not state or not stateful.is_enabled()):
            if bool(state) is not stateful.is_enabled():  # one that is disabled has no state, and takes none
                event(_log, logging.WARNING, "restore.state_not_used", item=item, saved_enabled=bool(state))
            return
        self._result.apply.append(lambda: stateful.load_state_dict(state))

    def _generator(self, item: str, generator: Any, saved: Mapping[str, Any]) -> None:
        live = generator_type(generator)
        if saved["type"] != live:
            self._result.mismatch.shapes.append(f"{item}: saved as {saved['type']}, live {live}")
        elif "reseed" in saved:
            self._result.apply.append(lambda: saved["reseed"](generator))
        else:
            self._result.apply.append(lambda: restore_generator(generator, saved["state"]))

    def _gradients(self, item: str, gradients: GradientState, saved: Mapping[str, Any]) -> None:
        """Sums of an accumulation: what FSDP2 has reduced onto any layout, all else where it was."""
        modules = self._state.modules
        self._result.apply.append(lambda: clear_gradients(modules))
        own: dict[str, Any] = dict(self._rank_items.get(item, {"own": {}})["own"])
        for slot in gradient_slots(modules):
            stored = f"{item}.{slot.name}"
            if slot.name in own:
                record = own.pop(slot.name)
                problem = misfit(slot, record)
                if problem is not None:
                    self._result.mismatch.shapes.append(f"{stored}: {problem}")
                self._result.apply.append(functools.partial(put_record, slot, record))
            elif slot.place == "grad" and stored in self._saved:
                dtype = torch_dtype(self._saved[stored].dtype)
                sum_here = torch.zeros_like(slot.owner.detach(), dtype=dtype)
                self._into(stored, sum_here)
                self._result.apply.append(functools.partial(slot.set, sum_here))
        self._result.mismatch.shapes += [f"{item}.{name}: {misfit(None, own[name])}" for name in own]
        if saved["own"] and item not in self._rank_items:
            self._result.mismatch.shapes.append(
                f"{item}: saved within an accumulation, with sums that are each rank's own; they go on only "
                "on the layout that saved them"
            )
        self._result.apply.append(lambda: gradients.go_on(saved["done"], saved["of"]))

    def _shards(self, item: str, live: ExplicitShards) -> None:
        saved = SavedShards.read(item, self.every_rank, self._stored)
        if saved is None:
            self._result.mismatch.missing.append(f"{item} (whole item)")
            return
        if saved.global_shape != live.global_shape:
            self._result.mismatch.shapes.append(
                f"{item}: saved {list(saved.global_shape)}, live {list(live.global_shape)}"
            )
            return
        if saved.dtype != dtype_name(live.dtype):
            self._result.mismatch.dtypes.append(f"{item}: saved {saved.dtype}, live {dtype_name(live.dtype)}")
            return
        fills, uncovered = plan_fills(live, saved)
        self._result.mismatch.shapes += [
            f"{item}: no saved piece has the {list(box.sizes)} elements at {list(box.offsets)}"
            for box in uncovered
        ]
        for fill in fills:
            self._want(self._stored[fill.stored], fill.target, Region.of_box(fill.source))

    def _plain(self, item: str, mapping: Any, saved: Mapping[str, Any]) -> None:
        def fill() -> None:
            mapping.clear()
            mapping.update(saved["value"])

        self._result.apply.append(fill)

    def _read_leaf(self, name: str) -> object:
        """A tensor inside plain state: read whole, on the CPU."""
        if name in self._leaves:  # several ranks' values name it
            return self._leaves[name]
        if self._state.kinds.get(name.partition(".")[0]) is ItemKind.SHARDS:
            return None  # read into the live pieces instead
        if not self._wants_some(name.partition(".")[0].partition("@rank")[0]):
            return None  # of an item that is not taken
        layout = self._stored.get(name)
        if layout is None:
            raise InvalidInputError("the checkpoint's values name a tensor that it lacks", tensor=name)
        tensor = zeros(layout.global_shape, torch_dtype(layout.dtype))
        self._want(layout, tensor, Region.whole(layout.global_shape))
        self._leaves[name] = tensor
        return tensor


def _load_emitted(module: torch.nn.Module, emitted: dict[str, Any]) -> None:
    module.load_state_dict(emitted, strict=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a plain tensor or DTensor."""
    distributed = as_dtensor(tensor)
    return tensor.detach() if distributed is None else local_tensor(distributed).detach()
