"""FSDP1 through its state-dict API: what it holds in flat shards, seen as DTensors under the model's names.

FSDP1 (``FullyShardedDataParallel``) keeps a rank's part of several parameters in one flat tensor, cut
anywhere. Its state-dict API turns that into DTensors, with collectives: here, and nowhere else, all ranks
have to enter a save together. Copies in this form stand in for the module and its optimizer wherever state
is captured or restored; they never train.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.compat import as_dtensor, is_fsdp1
from ckpt_trainer_hooks.names import MODEL_ITEM, owned_tensors, parameter_names

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["Fsdp1Views"]


class Fsdp1Views:
    """The views of all FSDP1 modules among the items, and of the optimizers over them.

    Args:
        items: by name.

    Raises:
        InvalidInputError: an FSDP1 module whose parameters cannot be had by name.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._modules: dict[str, _ModuleView] = {}
        self._optimizers: dict[str, _OptimizerView] = {}
        for name, item in items.items():
            if isinstance(item, torch.nn.Module) and any(map(is_fsdp1, item.modules())):
                self._modules[name] = _ModuleView(_checked(name, item))
        for name, item in items.items():
            for view in self._modules.values():
                if isinstance(item, torch.optim.Optimizer) and view.has_some_of(item):
                    self._optimizers[name] = _view_of_optimizer(name, item, view)
        self.pull()

    def __bool__(self) -> bool:
        return bool(self._modules)

    def replacing(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items with the views in place of what they stand for."""
        return {**items, **self._modules, **self._optimizers}

    def stepping(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that really step, in the order of ``optimizers``, some of which are views."""
        return [
            self._optimizers[name].live if name in self._optimizers else optimizer
            for name, optimizer in optimizers.items()
        ]

    def _views(self) -> list[_ModuleView | _OptimizerView]:
        return [*self._modules.values(), *self._optimizers.values()]  # modules first: optimizers name theirs

    def pull(self) -> None:
        """Bring the views up to date. Collective. Makes no optimizer step."""
        with _quiet():
            for view in self._views():
                view.pull()

    def push(self) -> None:
        """Write what is in the views into the modules and optimizers. Collective."""
        with _quiet():
            for view in self._views():
                view.push()


def _checked(name: str, module: torch.nn.Module) -> FullyShardedDataParallel:
    if not is_fsdp1(module):
        raise InvalidInputError(
            "FSDP1 inside another module has no state under the model's names; wrap the whole model, or use "
            "fully_shard (FSDP2)",
            item=name,
        )
    root: Any = module
    if not all(part._use_orig_params for part in root.modules() if is_fsdp1(part)):
        raise InvalidInputError("FSDP1 needs use_orig_params=True to be checkpointed by name", item=name)
    if getattr(root, "_device_mesh", None) is None:
        raise InvalidInputError("FSDP1 needs a device_mesh to say where its shards lie", item=name)
    return root  # type: ignore[no-any-return]


class _ModuleView(torch.nn.Module):
    """The module's parameters as DTensors and its buffers, under names without FSDP1's own."""

    def __init__(self, live: FullyShardedDataParallel) -> None:
        super().__init__()
        self._live = (live,)  # in a tuple: not a child

    @property
    def live(self) -> FullyShardedDataParallel:
        return self._live[0]

    def has_some_of(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(parameter) for parameter in self.live.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def pull(self) -> None:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        names = parameter_names({MODEL_ITEM: owned_tensors(self.live)})
        parameters = set(names.values())
        trained = {names[id(p)] for p in self.live.parameters() if p.requires_grad}
        self._modules.clear()
        self._parameters.clear()
        self._buffers.clear()
        for fqn, value in get_model_state_dict(self.live).items():
            if not isinstance(value, torch.Tensor):
                raise InvalidInputError("extra state inside FSDP1 cannot be checkpointed", entry=fqn)
            if fqn in parameters and as_dtensor(value) is None:
                raise InvalidInputError("FSDP1 gives no DTensor for a parameter", tensor=fqn)
            found = value.detach().clone()
            if fqn in parameters:
                found = torch.nn.Parameter(found, requires_grad=fqn in trained)
            self._put(fqn, found)

    def _put(self, fqn: str, value: torch.Tensor) -> None:
        *path, name = fqn.split(".")
        module: torch.nn.Module = self
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = torch.nn.Module()
                module._modules[part] = child
            module = child
        if isinstance(value, torch.nn.Parameter):
            module._parameters[name] = value
        else:
            module._buffers[name] = value

    def push(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self.live, self.state_dict())


class _OptimizerView(torch.optim.Optimizer):
    """The optimizer's groups and state over the parameters of a module's view."""

    def __init__(self, live: torch.optim.Optimizer, view: _ModuleView) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {})
        self.live, self._view = live, view

    def pull(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        parameters = dict(self._view.named_parameters())
        with _sharded(self._view.live):
            found = FullyShardedDataParallel.optim_state_dict(self._view.live, self.live)["state"]
        self.state = defaultdict(dict)
        for fqn, entries in found.items():
            self.state[parameters[fqn]] = {key: _copy(value) for key, value in entries.items()}
        self.param_groups = [
            {**group, "params": [parameters[fqn] for fqn in fqns]} for group, fqns in self._groups()
        ]

    def push(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        names = {id(parameter): name for name, parameter in self._view.named_parameters()}
        wanted = {
            "state": {names[id(parameter)]: dict(entries) for parameter, entries in self.state.items()},
            "param_groups": [
                {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }
        with _sharded(self._view.live):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(self._view.live, self.live, wanted)
        live = [parameter for group in self.live.param_groups for parameter in group["params"]]
        self.live.state.clear()
        for number, entries in flat["state"].items():  # not by load_state_dict, which casts
            self.live.state[live[number]] = entries
        for mine, group in zip(self.param_groups, self.live.param_groups, strict=True):
            group.update({key: value for key, value in mine.items() if key != "params"})

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        names = parameter_names({MODEL_ITEM: owned_tensors(self._view.live)})
        for group in self.live.param_groups:
            yield group, [names[id(parameter)] for parameter in group["params"]]


def _view_of_optimizer(name: str, live: torch.optim.Optimizer, view: _ModuleView) -> _OptimizerView:
    own = {id(parameter) for parameter in view.live.parameters()}
    if not all(id(p) in own for group in live.param_groups for p in group["params"]):
        raise InvalidInputError("an optimizer over FSDP1 and other parameters is not supported", item=name)
    # The class carries the name of the optimizer, which is recorded and compared.
    kind = type(type(live).__name__, (_OptimizerView,), {})
    made: _OptimizerView = kind(live, view)
    return made


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that all of this will go away, at every save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _sharded(live: FullyShardedDataParallel) -> Any:
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    kind = StateDictType.SHARDED_STATE_DICT
    return FullyShardedDataParallel.state_dict_type(
        live, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )
