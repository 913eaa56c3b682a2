"""Names of tensors: tied weights are stored once, and no wrapper changes a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from ckpt_trainer_hooks.names import owned_tensors
from tests.support.bits import assert_same_bits, bits_of
from tests.support.snapshot_trip import put_back, take, train_state


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- tied ---


class _Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def _tied(*, tied: bool, seed: int) -> tuple[_Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Tied(tied=tied)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _tied_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for n in range(3):
        optimizer.zero_grad()
        tokens = torch.arange(4) + n
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_tied_weight_is_stored_once_and_comes_back_tied() -> None:
    model, optimizer = _tied(tied=True, seed=0)
    _tied_steps(model, optimizer)
    taken = take(train_state(model=model, optimizer=optimizer))
    assert [name for name in taken.entries if name.startswith("model.")] == ["model.embed.weight"]
    assert len([name for name in taken.entries if name.endswith(".exp_avg")]) == 1
    assert len(taken.image) < 4096 + 3 * 11 * 6 * 4 + 4096

    other, fresh = _tied(tied=True, seed=1)
    put_back(taken, train_state(model=other, optimizer=fresh))
    assert other.head.weight is other.embed.weight
    assert _tied_steps(other, fresh) == _tied_steps(model, optimizer)


def test_tied_weight_comes_back_into_both_of_a_model_that_does_not_tie() -> None:
    model, _ = _tied(tied=True, seed=0)
    other, _ = _tied(tied=False, seed=1)
    put_back(take(train_state(model=model)), train_state(model=other))
    assert other.head.weight.data_ptr() != other.embed.weight.data_ptr()
    assert bits_of(other.head.weight) == bits_of(other.embed.weight) == bits_of(model.embed.weight)


def test_two_weights_into_one_that_is_tied_here_is_said_and_the_first_wins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _ = _tied(tied=False, seed=0)
    other, _ = _tied(tied=True, seed=1)
    put_back(take(train_state(model=model)), train_state(model=other))
    assert bits_of(other.embed.weight) == bits_of(model.embed.weight)
    assert "restore.tied_here" in caplog.text
    assert "model.head.weight" in caplog.text


def test_weights_shared_between_two_items_are_stored_once() -> None:
    model = nn.Linear(2, 2)
    wrapper = nn.ModuleDict({"inner": model})
    taken = take(train_state(model=model, other=wrapper))
    assert sorted(taken.entries) == ["model.bias", "model.weight"]
    live = nn.ModuleDict({"inner": nn.Linear(2, 2)})
    put_back(taken, train_state(other=live), strict=False)
    assert_same_bits(live.state_dict(), wrapper.state_dict())


# --- wrappers ---


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x))


def _wrap_model(kind: str) -> nn.Module:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "plain": lambda m: m,
        "compile": _compiled,
        "ac": checkpoint_wrapper,
        "ac-of-compile": lambda m: checkpoint_wrapper(_compiled(m)),
        "compile-of-ac": lambda m: _compiled(checkpoint_wrapper(m)),
        "fsdp2-of-ac": lambda m: fully_shard(checkpoint_wrapper(m)),
        "fsdp2-of-compile": lambda m: fully_shard(_compiled(m)),
    }
    wrap = wrappers[kind]
    model = nn.Sequential(_Block(), wrap(_Block()))
    return wrap(model)


def _compiled(module: nn.Module) -> nn.Module:
    compiled = torch.compile(module, backend="eager")  # no forward, so nothing is compiled
    assert isinstance(compiled, nn.Module)
    return compiled


WRAPPERS = ("plain", "compile", "ac", "ac-of-compile", "compile-of-ac", "fsdp2-of-ac", "fsdp2-of-compile")


@pytest.fixture(scope="module")
def _alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _wrapped(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _wrap_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    found = []
    for tensor in [*model.parameters(), *model.buffers()]:
        moment = optimizer.state.get(tensor, {}).get("momentum_buffer")
        for each in (tensor, moment):
            if each is not None:
                local = each.to_local() if hasattr(each, "to_local") else each
                found.append(bits_of(local))
    return found


@pytest.mark.usefixtures("_alone_in_a_group")
@pytest.mark.parametrize("saved", WRAPPERS)
def test_wrappers_change_no_name_and_any_pair_restores(saved: str) -> None:
    """Case I25."""
    model, optimizer = _wrapped(saved, 0)
    taken = take(train_state(model=model, optimizer=optimizer))
    assert "model.1.lin.weight" in taken.layouts
    assert "optimizer.1.lin.weight.momentum_buffer" in taken.layouts
    assert not any("_orig_mod" in name or "_checkpoint_wrapped" in name for name in taken.layouts)
    # Under every wrapper the same can be copied while the next forward runs.
    assert {name for name in taken.layouts if "running" in name or "tracked" in name}.isdisjoint(
        taken.deferred
    )
    assert "model.1.lin.weight" in taken.deferred
    for kind in WRAPPERS:
        other, fresh = _wrapped(kind, 1)
        targets = put_back(taken, train_state(model=other, optimizer=fresh))
        assert _numbers(other, fresh) == _numbers(model, optimizer), kind
        assert len(targets.apply) == 1, kind  # the optimizer's: no tensor takes the way over a clone


def test_attribute_of_the_user_that_is_called_like_a_wrappers_keeps_its_name() -> None:
    """Case I25."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)
            self._checkpoint_wrapped_module = nn.Linear(2, 2)

    def built(seed: int) -> tuple[Mine, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Mine()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return model, optimizer

    model, optimizer = built(0)
    taken = take(train_state(model=_compiled(model), optimizer=optimizer))
    assert {"model.module.weight", "model._orig_mod.weight"} <= set(taken.layouts)
    other, fresh = built(1)
    put_back(taken, train_state(model=other, optimizer=fresh))
    assert _numbers(other, fresh) == _numbers(model, optimizer)


def test_averaged_model_and_parametrization_come_back() -> None:
    def built(seed: int) -> tuple[nn.Module, torch.optim.swa_utils.AveragedModel]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
        return model, torch.optim.swa_utils.AveragedModel(model)

    model, average = built(0)
    average.update_parameters(model)
    for parameter in model.parameters():
        parameter.data += 1
    average.update_parameters(model)
    other, fresh = built(1)
    put_back(take(train_state(model=model, ema=average)), train_state(model=other, ema=fresh))
    assert_same_bits(other.state_dict(), model.state_dict())
    assert_same_bits(fresh.state_dict(), average.state_dict())
    assert fresh.n_averaged == 2


# --- one walk finds what torch's own methods find ---


class _Renaming(nn.Module):
    """A class with names of its own, as FSDP1 has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"mine.{name}", p) for name, p in super().named_parameters())


class _Shortened(nn.Module):
    """A child that leaves a part of itself out."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = nn.Linear(2, 2)
        self.hidden = nn.Linear(2, 2)

    def named_modules(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Module]]:
        return (found for found in super().named_modules(*args, **kwargs) if "hidden" not in found[0])  # type: ignore[arg-type]


def _shared() -> nn.Module:
    shared = nn.BatchNorm1d(4)
    shared.register_buffer("scratch", torch.zeros(2), persistent=False)
    shared.register_parameter("absent", None)
    return nn.Sequential(shared, nn.Sequential(nn.Linear(4, 4), shared), nn.Linear(4, 4))


@pytest.mark.parametrize("make", [_shared, _Renaming, lambda: nn.Sequential(_Shortened(), nn.Linear(2, 2))])
def test_one_walk_finds_the_tensors_that_torch_names(make: Callable[[], nn.Module]) -> None:
    module = make()
    found = owned_tensors(module)
    for ours, torchs in (
        (found.parameters, module.named_parameters(remove_duplicate=False)),
        (found.buffers, module.named_buffers(remove_duplicate=False)),
    ):
        assert [(name, id(tensor)) for name, tensor in ours.items()] == [
            (name, id(tensor)) for name, tensor in torchs
        ]


class _Scaled(nn.Linear):
    def get_extra_state(self) -> object:
        return {"scale": 2.0}


class _Computed(nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() * 2


def _with_a_hook() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.register_state_dict_post_hook(lambda *_: None)
    return linear


def _with_a_hook_before() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.register_state_dict_pre_hook(lambda *_: None)
    return linear


def _with_a_method_of_its_own() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.get_extra_state = lambda: {"scale": 2.0}  # type: ignore[method-assign]
    return linear


def _with_all_kinds_of_entries() -> nn.Module:
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.BatchNorm1d(3), nn.Sequential(linear))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("table", torch.zeros(2))
    model.register_parameter("absent", None)
    return model


def test_the_walk_tells_what_a_plain_state_dict_has_in_its_order() -> None:
    model = _with_all_kinds_of_entries()
    entries = owned_tensors(model).entries
    expected = model.state_dict()
    assert entries is not None
    assert list(entries) == list(expected)
    assert all(entries[name].data_ptr() == expected[name].data_ptr() for name in expected)
    assert "cache" not in entries


@pytest.mark.parametrize(
    "make",
    [
        lambda: _Scaled(2, 2),
        lambda: _Computed(2, 2),
        _with_a_hook,
        _with_a_hook_before,
        _with_a_method_of_its_own,
    ],
)
def test_the_state_dict_is_asked_where_code_has_a_say_in_it(make: Callable[[], nn.Module]) -> None:
    assert owned_tensors(nn.Sequential(nn.Linear(2, 2), make())).entries is None
