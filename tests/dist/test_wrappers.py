"""Names do not depend on what wraps the model: every wrapping restores onto every other one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import barrier
from tests.support.ranks import run_ranks

State = dict[str, torch.Tensor]


class Inner(nn.Module):
    """A child called ``module`` and a parameter that looks like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 5)
        self._orig_mod_x = nn.Parameter(torch.ones(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.inner = Inner()


def _each(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model.first = wrap(model.first)  # type: ignore[assignment]
    model.inner = wrap(model.inner)  # type: ignore[assignment]
    return model


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "compile": _compiled,
    "ac": lambda model: _each(model, checkpoint_wrapper),
    "ac(compile)": lambda model: _each(model, lambda part: checkpoint_wrapper(_compiled(part))),
    "compile(ac)": lambda model: _each(model, lambda part: _compiled(checkpoint_wrapper(part))),
    "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
    "fsdp2": _fsdp2,
    # Combinations as they are really used.
    "compile(ddp)": lambda model: _compiled(nn.parallel.DistributedDataParallel(model)),
    "ddp(compile(ac))": lambda model: nn.parallel.DistributedDataParallel(
        _each(model, lambda part: _compiled(checkpoint_wrapper(part)))
    ),
    "fsdp2(compile(ac))": lambda model: _fsdp2(
        _each(model, lambda part: _compiled(checkpoint_wrapper(part)))
    ),
}


def _build(wrapping: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
    """Model, optimizer, and the parameters in the order of the unwrapped model's."""
    torch.manual_seed(seed)
    model = WRAPPINGS[wrapping](Block())
    parameters = list(model.parameters())
    return model, torch.optim.AdamW(parameters, lr=0.01), parameters


def _full(tensor: torch.Tensor) -> torch.Tensor:
    inner = tensor.detach()
    return inner.full_tensor().clone() if isinstance(inner, DTensor) else inner.clone()


def _state(names: list[str], optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> State:
    found = {}
    for name, parameter in zip(names, parameters, strict=True):
        found[name] = _full(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = _full(value)
    return found


def _all_pairs(rank: int, world: int, root: Path) -> int:
    names = [name for name, _ in Block().named_parameters()]
    assert "inner.module.weight" in names
    assert "inner._orig_mod_x" in names
    expected: dict[int, State] = {}

    def manager_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointManager:
        return CheckpointManager(
            f"file://{root}/store/run",
            model=model,
            optimizer=optimizer,
            staging_dir=root / "staging",
            timeout_s=60,
        )

    for number, wrapping in enumerate(WRAPPINGS, 1):
        model, optimizer, parameters = _build(wrapping, seed=number)
        with manager_of(model, optimizer) as manager:
            manager.restore(start_over=True)
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.5 + 1.0
            optimizer.step()
            manager.save(number)
            expected[number] = _state(names, optimizer, parameters)
        barrier()
    pairs = 0
    for wrapping in WRAPPINGS:
        model, optimizer, parameters = _build(wrapping, seed=99)
        with manager_of(model, optimizer) as manager:
            for number, state in expected.items():
                assert manager.restore(number) == number
                assert_same_bits(_state(names, optimizer, parameters), state)
                pairs += 1
    barrier()  # rank 0 has the store that the others may still read
    return pairs


def test_I25_every_wrapping_restores_onto_every_other_one_with_its_optimizer_state(tmp_path: Path) -> None:
    assert run_ranks(2, _all_pairs, tmp_path) == [len(WRAPPINGS) ** 2] * 2
