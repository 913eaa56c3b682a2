"""Every kind of optimizer: a save changes nothing, and a restored run is bitwise the uninterrupted one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.optimizer_state import keeping_step_on_device
from tests.support.bits import assert_same_bits
from tests.support.models import OddNet
from tests.support.snapshot_trip import put_back, take, train_state

MORE = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD: parameters are at y while training and at the average x while evaluating."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _move(self, weight: Callable[[float], float], *, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight(group["beta"]))
                group["train_mode"] = train_mode

    def eval(self) -> None:
        self._move(lambda beta: 1 - 1 / beta, train_mode=False)

    def train(self) -> None:
        self._move(lambda beta: 1 - beta, train_mode=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "step() in eval mode"
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


Optimizers = dict[str, torch.optim.Optimizer]
ZOO: dict[str, Callable[[nn.Module], Optimizers]] = {
    "adam-foreach": lambda m: {"optimizer": torch.optim.Adam(m.parameters(), lr=0.01, foreach=True)},
    "adam-tensor-betas": lambda m: {
        "optimizer": torch.optim.Adam(
            m.parameters(),
            lr=torch.tensor(0.01),
            betas=(torch.tensor(0.8), torch.tensor(0.95)),
            foreach=False,
        )
    },
    "adamw-foreach": lambda m: {"optimizer": torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)},
    "adamw-fused-tensor-lr": lambda m: {
        "optimizer": torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), fused=True)
    },
    "sgd-fused": lambda m: {"optimizer": torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True)},
    "sgd-dampened": lambda m: {
        "optimizer": torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, dampening=0.1, foreach=True)
    },
    "adagrad-fused": lambda m: {"optimizer": torch.optim.Adagrad(m.parameters(), lr=0.01, fused=True)},
    "adafactor-foreach": lambda m: {
        "optimizer": torch.optim.Adafactor(m.parameters(), lr=0.01, foreach=True)
    },
    "nadam-decoupled": lambda m: {
        "optimizer": torch.optim.NAdam(m.parameters(), lr=0.01, decoupled_weight_decay=True, weight_decay=0.1)
    },
    "asgd-foreach": lambda m: {"optimizer": torch.optim.ASGD(m.parameters(), lr=0.01, t0=2, foreach=True)},
    "rprop-foreach": lambda m: {"optimizer": torch.optim.Rprop(m.parameters(), lr=0.01, foreach=True)},
    "lbfgs": lambda m: {"optimizer": torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3, history_size=4)},
    "lbfgs-wolfe": lambda m: {
        "optimizer": torch.optim.LBFGS(
            m.parameters(), lr=0.3, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
        )
    },
    "muon+adamw": lambda m: {
        "optimizer_0": torch.optim.Muon(_matrices(m), lr=0.01),
        "optimizer_1": torch.optim.AdamW(_others(m), lr=0.01),
    },
    "schedule-free": lambda m: {"optimizer": ScheduleFreeSGD(m.parameters())},
    "sparse-adam+adam": lambda m: {
        "optimizer_sparse": torch.optim.SparseAdam(list(m.embed.parameters()), lr=0.01),  # type: ignore[union-attr,operator]
        "optimizer_dense": torch.optim.Adam(
            [p for name, p in m.named_parameters() if not name.startswith("embed")], lr=0.01
        ),
    },
}


def _built(kind: str, seed: int = 0) -> tuple[nn.Module, Optimizers]:
    torch.manual_seed(seed)
    model = OddNet()
    model.embed.sparse = kind.startswith("sparse")
    return model, ZOO[kind](model)


def _train(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], steps: range) -> list[float]:
    """Losses; every optimizer steps on the gradients of the same batch, LBFGS with a closure."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, 13, (4, 6), generator=generator)

        def closure(tokens: torch.Tensor = tokens) -> torch.Tensor:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
            return loss

        first, *rest = optimizers.values()
        if isinstance(first, torch.optim.LBFGS):
            losses.append(first.step(closure).item())  # type: ignore[arg-type,attr-defined]
            continue
        losses.append(closure().item())
        for optimizer in (first, *rest):
            optimizer.step()
    return losses


def _state(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Every tensor, also those inside lists."""
    found = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for item, optimizer in optimizers.items():
        state = optimizer.state_dict()
        _tensors(item, copy.deepcopy({"state": state["state"], "groups": state["param_groups"]}), found)
    return found


def _tensors(path: str, value: Any, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, float | int):
        found[path] = torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, dict):
        for key, part in value.items():
            _tensors(f"{path}.{key}", part, found)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            _tensors(f"{path}.{number}", part, found)


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("save_at", [0, 1, 3])
def test_I16_run_is_the_same_after_a_save_and_after_a_restore_into_a_fresh_or_stepped_optimizer(
    kind: str, save_at: int
) -> None:
    model, optimizers = _built(kind)
    expected = _train(model, optimizers, range(save_at + MORE))
    final = _state(model, optimizers)

    model, optimizers = _built(kind)
    losses = _train(model, optimizers, range(save_at))
    taken = take(train_state(model=model, **optimizers))
    losses += _train(model, optimizers, range(save_at, save_at + MORE))
    assert losses == expected
    assert_same_bits(_state(model, optimizers), final)

    for stepped in (0, 2):
        other, fresh = _built(kind, seed=5)
        _train(other, fresh, range(50, 50 + stepped))
        put_back(taken, train_state(model=other, **fresh))
        assert _train(other, fresh, range(save_at, save_at + MORE)) == expected[save_at:], stepped
        assert_same_bits(_state(other, fresh), final)


def test_schedule_free_optimizer_saved_in_eval_mode_comes_back_in_eval_mode() -> None:
    model, optimizers = _built("schedule-free")
    _train(model, optimizers, range(3))
    optimizer = optimizers["optimizer"]
    optimizer.eval()  # type: ignore[attr-defined]
    taken = take(train_state(model=model, **optimizers))
    other, fresh = _built("schedule-free", seed=5)
    put_back(taken, train_state(model=other, **fresh))

    assert fresh["optimizer"].param_groups[0]["train_mode"] is False
    for live in (optimizers, fresh):
        live["optimizer"].train()  # type: ignore[attr-defined]
    assert _train(other, fresh, range(3, 6)) == _train(model, optimizers, range(3, 6))
    assert_same_bits(_state(other, fresh), _state(model, optimizers))


def test_flat_history_over_parameters_in_another_order_is_refused() -> None:
    """LBFGS keeps one vector over all parameters in their order, under the first one."""
    model, optimizers = _built("lbfgs")
    _train(model, optimizers, range(2))
    taken = take(train_state(model=model, **optimizers))
    other = OddNet()
    swapped = torch.optim.LBFGS(list(other.parameters())[::-1], lr=0.3, max_iter=3, history_size=4)

    for strict in (True, False):
        with pytest.raises(InvalidInputError, match="order") as caught:
            put_back(taken, train_state(model=other, optimizer=swapped), strict=strict)
        assert caught.value.code == "mismatch"
    assert not swapped.state


def test_optimizer_that_keeps_another_one_is_refused_until_that_one_is_registered() -> None:
    class Around(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params, lr=0.1)
            self.base_optimizer = torch.optim.AdamW(params)

    model = OddNet()
    around = Around(model.parameters())
    with pytest.raises(InvalidInputError) as caught:
        train_state(model=model, optimizer=around)
    assert caught.value.context["attribute"] == "base_optimizer"

    train_state(model=model, optimizer=around, optimizer_base=around.base_optimizer)


def test_optimizer_that_keeps_several_others_is_refused() -> None:
    class Many(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            params = list(params)
            super().__init__(params, lr=0.1)
            self.inner = {"body": torch.optim.AdamW(params)}

    model = OddNet()
    with pytest.raises(InvalidInputError, match="inner"):
        train_state(model=model, optimizer=Many(model.parameters()))


def test_state_of_the_optimizers_own_is_replaced_not_mixed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["seen"] = 1  # type: ignore[index,assignment]
    taken = take(train_state(model=model, optimizer=optimizer))
    fresh = torch.optim.AdamW(model.parameters())
    fresh.state["stale"] = 2  # type: ignore[index,assignment]
    put_back(taken, train_state(model=model, optimizer=fresh))

    assert dict(fresh.state) == {"seen": 1}


@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_counters_are_where_the_restored_options_want_them(option: str) -> None:
    """The live optimizer's options are replaced by the saved ones, so those decide where ``step`` is."""
    live = torch.optim.AdamW([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(2)]}])
    first, second = (id(group["params"][0]) for group in live.param_groups)

    assert keeping_step_on_device(live, [{option: True}, {}]) == {first}
    live.param_groups[1][option] = True
    assert keeping_step_on_device(live) == {second}
    assert keeping_step_on_device(live, [{option: False}, {option: False}]) == set()


class _Named(nn.Module):
    """Names that a checkpoint uses for other things as well."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ParameterList([torch.ones(3), torch.ones(2)])
        self.scalars = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})
        self.common = nn.Parameter(torch.ones(2))


def test_parameters_named_like_parts_of_an_optimizers_values_are_told_from_them() -> None:
    def built() -> tuple[_Named, torch.optim.Optimizer]:
        model = _Named()
        return model, torch.optim.LBFGS(model.parameters(), lr=torch.tensor(0.1), max_iter=2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([p.cos().square().sum() for p in model.parameters()]).sum()
            loss.backward()
            return loss

        for _ in range(count):
            optimizer.step(closure)  # type: ignore[arg-type]

    model, optimizer = built()
    step(model, optimizer, 2)
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built()
    put_back(taken, train_state(model=other, optimizer=fresh))

    step(model, optimizer, 3)
    step(other, fresh, 3)
    assert_same_bits(_state(other, {"optimizer": fresh}), _state(model, {"optimizer": optimizer}))


def test_tensor_lr_that_groups_share_here_and_did_not_when_saved_is_parted() -> None:
    def built(*rates: torch.Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        groups = [{"params": list(m.parameters()), "lr": lr} for m, lr in zip(model, rates, strict=True)]
        return model, torch.optim.AdamW(groups, foreach=False)

    model, optimizer = built(torch.tensor(0.1), torch.tensor(0.2))
    taken = take(train_state(model=model, optimizer=optimizer))
    shared = torch.tensor(0.5)
    other, fresh = built(shared, shared)
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert [group["lr"] for group in fresh.param_groups] == [torch.tensor(0.1), torch.tensor(0.2)]


def test_groups_with_equal_parameters_options_and_extra_keys_are_kept_apart() -> None:
    def built(*tags: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in tags))
        return model, torch.optim.AdamW(
            [{"params": list(m.parameters()), "tag": tag} for m, tag in zip(model, tags, strict=True)]
        )

    model, optimizer = built("x", "y", "x")
    taken = take(train_state(model=model, optimizer=optimizer))
    other, fresh = built("", "", "")
    put_back(taken, train_state(model=other, optimizer=fresh))

    assert [group["tag"] for group in fresh.param_groups] == ["x", "y", "x"]


def test_membership_that_changed_is_named_and_what_joined_starts_without_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.3)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    taken = take(train_state(model=model, optimizer=optimizer))

    def live() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return other, torch.optim.AdamW(other.parameters(), lr=0.1)

    other, grown = live()
    with pytest.raises(InvalidInputError, match=r"optimizer\.1\.weight \(in no group\)"):
        put_back(taken, train_state(model=other, optimizer=grown))
    put_back(taken, train_state(model=other, optimizer=grown), strict=False)
    assert grown.param_groups[0]["lr"] == 0.3
    assert set(grown.state) == set(other[0].parameters())

    whole, other_grown = live()
    taken = take(train_state(model=whole, optimizer=other_grown))
    with pytest.raises(InvalidInputError, match=r"optimizer\.1\.weight \(in a group\)"):
        put_back(taken, train_state(model=model, optimizer=optimizer))
