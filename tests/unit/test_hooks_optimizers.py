"""Optimizer state: by name, in its own dtype, complete; the next step is that of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError
from tests.support.bits import assert_same_bits, bits_of
from tests.support.models import OddNet, full_state, train
from tests.support.snapshot_trip import put_back, put_back_rng, take, train_state

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny, and other tests may run beside these
    yield
    torch.set_num_threads(before)


def _built(kind: str, *, seed: int = 0, dropout: float = 0.2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = OddNet(dropout=dropout)
    return model, OPTIMIZERS[kind](model.parameters())


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("save_at", [0, 1, 4])
def test_taking_a_snapshot_changes_nothing_and_restoring_it_continues_the_run(
    kind: str, save_at: int
) -> None:
    model, optimizer = _built(kind)
    expected = list(train(model, optimizer, range(8)))
    final = full_state(model, optimizer)

    model, optimizer = _built(kind)
    losses = list(train(model, optimizer, range(save_at)))
    state = train_state(model=model, optimizer=optimizer)
    taken = take(state)
    losses += train(model, optimizer, range(save_at, 8))
    assert losses == expected
    assert_same_bits(full_state(model, optimizer), final)

    other, fresh = _built(kind, seed=5)
    restored = train_state(model=other, optimizer=fresh)
    put_back(taken, restored)
    put_back_rng(taken)
    assert list(train(other, fresh, range(save_at, 8))) == expected[save_at:]
    assert_same_bits(full_state(other, fresh), final)


@pytest.mark.parametrize("kind", ["adamw", "sgd-momentum", "adafactor"])
def test_state_of_an_optimizer_that_trained_on_is_replaced_not_mixed(kind: str) -> None:
    model, optimizer = _built(kind)
    list(train(model, optimizer, range(2)))
    taken = take(train_state(model=model, optimizer=optimizer))
    expected = full_state(model, optimizer)
    list(train(model, optimizer, range(2, 5)))

    put_back(taken, train_state(model=model, optimizer=optimizer))

    assert_same_bits(full_state(model, optimizer), expected)


def test_lbfgs_history_of_lists_comes_back() -> None:
    def run(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        data = torch.linspace(-1, 1, 12).view(4, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(data) - data.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]  # type: ignore[arg-type, attr-defined]

    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    model, optimizer = built(0)
    run(3, model, optimizer)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built(1)
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert run(3, other, fresh) == run(3, model, optimizer)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.use_b = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if self.use_b else self.a(x)


def _two(seed: int, **options: Any) -> tuple[_Two, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Two()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for n in range(count):
        optimizer.zero_grad()
        model(torch.full((2, 3), 0.5 + n)).square().sum().backward()
        optimizer.step()


def test_I18_parameter_that_never_had_a_gradient_starts_later_like_in_the_uninterrupted_run() -> None:
    model, optimizer = _two(0)
    model.use_b = False
    _steps(model, optimizer, 2)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = _two(1)
    _steps(other, fresh, 1)  # has state for b, which must go
    put_back(taken, train_state(model=other, optimizer=fresh))
    assert other.b.weight not in fresh.state

    model.use_b = other.use_b = True
    _steps(model, optimizer, 2)
    _steps(other, fresh, 2)

    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


def test_I17_state_of_a_parameter_that_was_frozen_later_is_kept() -> None:
    model, optimizer = _two(0)
    _steps(model, optimizer, 2)
    model.b.requires_grad_(False)
    _steps(model, optimizer, 1)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = _two(1)
    other.b.requires_grad_(False)
    put_back(taken, train_state(model=other, optimizer=fresh))
    assert len(fresh.state) == 4

    for each in (model, other):
        each.b.requires_grad_(True)
    _steps(model, optimizer, 2)
    _steps(other, fresh, 2)

    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


def test_I19_every_key_of_every_group_comes_back_also_into_an_optimizer_without_scheduler() -> None:
    model, optimizer = _two(0)
    optimizer.param_groups[0].update(tag="body", lr_scale=0.25, betas=(0.8, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    _steps(model, optimizer, 1)
    scheduler.step()
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = _two(1)
    put_back(taken, train_state(model=other, optimizer=fresh))

    group, expected = fresh.param_groups[0], optimizer.param_groups[0]
    assert {k: v for k, v in group.items() if k != "params"} == {
        k: v for k, v in expected.items() if k != "params"
    }
    assert type(group["betas"]) is tuple
    assert group["initial_lr"] == 0.1
    rebuilt = torch.optim.lr_scheduler.LambdaLR(fresh, lambda n: 1 / (n + 1), last_epoch=1)
    assert rebuilt.get_last_lr() == [0.1 / 3]


def test_I20_empty_group_keeps_its_place_and_its_options() -> None:
    def built(seed: int, lrs: tuple[float, float, float]) -> tuple[_Two, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _Two()
        groups: list[dict[str, Any]] = [
            {"params": list(params), "lr": lr}
            for params, lr in zip((model.a.parameters(), (), model.b.parameters()), lrs, strict=True)
        ]
        return model, torch.optim.AdamW(groups)

    model, optimizer = built(0, (0.1, 0.2, 0.3))
    _steps(model, optimizer, 1)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built(1, (0.7, 0.8, 0.9))
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2, 0.3]
    _steps(other, fresh, 1)


def test_I22_I23_groups_and_parameters_in_another_order_are_matched_by_name() -> None:
    def built(seed: int, *, swapped: bool) -> tuple[_Two, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _Two()
        groups = [
            {"params": list(model.a.parameters()), "lr": 0.1},
            {"params": list(model.b.parameters()), "lr": 0.3},
        ]
        if swapped:
            groups = [{"params": group["params"][::-1], "lr": 0.5} for group in reversed(groups)]
        return model, torch.optim.AdamW(groups)

    model, optimizer = built(0, swapped=False)
    _steps(model, optimizer, 2)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built(1, swapped=True)
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert [group["lr"] for group in fresh.param_groups] == [0.3, 0.1]
    _steps(model, optimizer, 2)
    _steps(other, fresh, 2)
    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


@pytest.mark.parametrize("strict", [True, False])
def test_groups_that_were_cut_differently_are_named_before_anything_changes(strict: bool) -> None:
    model, optimizer = _two(0)
    groups = [
        {"params": list(model.a.parameters()), "lr": 0.1},
        {"params": list(model.b.parameters()), "lr": 0.3},
    ]
    optimizer = torch.optim.AdamW(groups)
    _steps(model, optimizer, 1)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = _two(1)
    before = full_state(other, fresh)

    if strict:
        with pytest.raises(InvalidInputError) as caught:
            put_back(taken, train_state(model=other, optimizer=fresh))
        assert caught.value.code == "mismatch"
        assert "group 0" in str(caught.value)
        assert_same_bits(full_state(other, fresh), before)
        return
    put_back(taken, train_state(model=other, optimizer=fresh), strict=False)
    assert fresh.param_groups[0]["lr"] == 0.1  # what the constructor was given: no saved group fits
    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


def test_I28_moments_keep_their_dtype_where_it_is_not_the_parameters() -> None:
    """Case I22."""

    def built(seed: int) -> tuple[_Two, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _Two().bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = built(0)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
            "master": torch.randn(parameter.shape, dtype=torch.float64),
        }
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built(1)
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert fresh.state[other.a.weight]["exp_avg"].dtype == torch.float32
    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


def test_step_of_a_scalar_parameter_is_not_laid_out_like_the_parameter() -> None:
    """A 0-dim parameter has the shape of Adam's ``step``, which belongs on the CPU all the same."""

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    model = Scalar()
    optimizer = torch.optim.AdamW(model.parameters())
    model.scale.square().backward()
    optimizer.step()
    taken = take(train_state(model=model, optimizer=optimizer))
    other = Scalar()
    fresh = torch.optim.AdamW(other.parameters())
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert fresh.state[other.scale]["step"].dtype == torch.float32
    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


def test_transposed_parameter_gets_moments_of_its_own_strides() -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        model.weight = nn.Parameter(torch.arange(12.0).view(4, 3).t())
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = built()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built()
    put_back(taken, train_state(model=other, optimizer=fresh))

    state = fresh.state[other.weight]
    assert state["exp_avg"].stride() == optimizer.state[model.weight]["exp_avg"].stride() == (1, 3)
    assert_same_bits(full_state(other, fresh), full_state(model, optimizer))


def test_state_that_belongs_to_no_parameter_is_kept() -> None:
    model, optimizer = _two(0)
    _steps(model, optimizer, 1)
    optimizer.state["global"] = {"count": 7, "average": torch.tensor([1.5, 2.5])}  # type: ignore[index]
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = _two(1)
    put_back(taken, train_state(model=other, optimizer=fresh))

    found = fresh.state["global"]  # type: ignore[index]
    assert found["count"] == 7
    assert bits_of(found["average"]) == bits_of(torch.tensor([1.5, 2.5]))


def test_plain_numbers_in_the_state_of_a_parameter_come_back_with_their_types() -> None:
    model, optimizer = _two(0)
    optimizer.state[model.a.weight] = {"step": 5, "name": "x", "none": None, "nested": {"k": (1, 2.5)}}
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = _two(1)
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert fresh.state[other.a.weight] == optimizer.state[model.a.weight]


def test_two_optimizers_over_one_model_keep_apart() -> None:
    def built(seed: int) -> tuple[_Two, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _Two()
        first = torch.optim.AdamW(model.a.parameters(), lr=0.1)
        return model, first, torch.optim.SGD(model.b.parameters(), lr=0.2, momentum=0.9)

    def run(model: _Two, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> bytes:
        for _ in range(2):
            first.zero_grad()
            second.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            first.step()
            second.step()
        return b"".join(bits_of(p) for p in model.parameters())

    saved = built(0)
    run(*saved)
    taken = take(train_state(model=saved[0], optimizer=saved[1], other=saved[2]))
    live = built(1)
    put_back(taken, train_state(model=live[0], optimizer=live[1], other=live[2]))

    assert run(*live) == run(*saved)


def test_parameter_of_no_registered_module_is_refused_with_its_group_and_shape() -> None:
    """Case I23."""
    model, _ = _two(0)
    stray = nn.Parameter(torch.zeros(2, 5))
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [stray]}])
    with pytest.raises(InvalidInputError) as caught:
        train_state(model=model, optimizer=optimizer).flatten()
    assert caught.value.context["group"] == 1
    assert caught.value.context["shape"] == (2, 5)


def test_restore_into_another_kind_of_optimizer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _two(0)
    _steps(model, optimizer, 1)
    taken = take(train_state(model=model, optimizer=optimizer))
    other = _Two()
    fresh = torch.optim.Adam(other.parameters(), lr=0.1)
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert "restore.optimizer_differs" in caplog.text
    assert "AdamW" in caplog.text
