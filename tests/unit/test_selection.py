"""Partial and careful restore: patterns, rename, strictness and casts, without any process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import dtypes
from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.elements import zeros
from ckpt_trainer_hooks.layout import torch_dtype
from ckpt_trainer_hooks.selection import RestoreOptions, can_cast, rename_function
from tests.support.bits import assert_same_bits, bits_of
from tests.support.models import OddNet, full_state, train
from tests.support.snapshot_trip import Taken, put_back, take, train_state

_FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
_CASE_DTYPES = [*_FLOATS, torch.int32, torch.int64, torch.bool, torch.complex64]


class Box(nn.Module):
    """Parameters and buffers by name, of any dtype."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Counter:
    """A stateful object."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def trained(seed: int, steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = OddNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + seed))
    list(train(model, optimizer, range(steps)))
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5 + seed),
        "extra": {"seed": seed},
    }


def state_of(items: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return full_state(items["model"], items["optimizer"])


def restore(taken: Taken, items: Mapping[str, Any], **options: Any) -> None:
    put_back(taken, train_state(**items), options=RestoreOptions.of(**options))


def mismatch_of(taken: Taken, items: Mapping[str, Any], **options: Any) -> dict[str, list[str]]:
    before = {
        name: (bits_of(tensor), tensor.dtype)
        for item in items.values()
        if isinstance(item, nn.Module)
        for name, tensor in item.state_dict().items()
    }
    with pytest.raises(InvalidInputError) as raised:
        restore(taken, items, **options)
    after = {
        name: (bits_of(tensor), tensor.dtype)
        for item in items.values()
        if isinstance(item, nn.Module)
        for name, tensor in item.state_dict().items()
    }
    assert after == before  # nothing was touched
    assert raised.value.code == "mismatch"
    return {kind: str(names).split("; ") for kind, names in raised.value.context.items()}


# --- which part ---


def test_R3_only_what_the_patterns_name_is_restored() -> None:
    saved, live = trained(0), trained(1)
    before, wanted = state_of(live), state_of(saved)
    taken = take(train_state(**saved))

    restore(taken, live, include=["model.up.*", "optimizer.up.*"], exclude="*.bias*")

    found = state_of(live)
    restored = {name for name in found if name.split(".", 1)[1].startswith("up.weight")}
    assert len(restored) == 4  # the weight and AdamW's three
    assert_same_bits(found, {**before, **{name: wanted[name] for name in restored}})
    assert live["optimizer"].param_groups[0]["lr"] == 0.02
    assert live["lr_scheduler"].step_size == 6
    assert live["extra"] == {"seed": 1}


def test_R3_weights_only_leaves_everything_else_alone() -> None:
    saved, live = trained(0), trained(1)
    before, wanted = state_of(live), state_of(saved)

    targets = put_back(
        take(train_state(**saved)), train_state(**live), options=RestoreOptions.of(weights_only=True)
    )

    assert_same_bits(
        state_of(live), {name: (wanted if name.startswith("model.") else before)[name] for name in before}
    )
    assert live["optimizer"].param_groups[0]["lr"] == 0.02
    assert live["extra"] == {"seed": 1}
    assert {want.name.partition(".")[0] for want in targets.wants} == {"model"}


def test_R3_weights_only_needs_no_optimizer_in_the_checkpoint_nor_here() -> None:
    saved, live = trained(0), trained(1)
    taken = take(train_state(model=saved["model"]))
    restore(taken, live, weights_only=True)
    assert_same_bits(live["model"].state_dict(), saved["model"].state_dict())
    other = OddNet()
    restore(take(train_state(**saved)), {"model": other}, weights_only=True)
    assert_same_bits(other.state_dict(), saved["model"].state_dict())


def test_tensors_in_plain_state_that_is_left_out_are_not_read() -> None:
    saved = {"model": OddNet(), "extra": {"big": torch.ones(1000)}, "other": Counter({"t": torch.ones(5)})}
    live = {"model": OddNet(), "extra": {}, "other": Counter(None)}
    targets = put_back(
        take(train_state(**saved)),
        train_state(**live),
        options=RestoreOptions.of(exclude=["extra", "other.*"]),
    )
    assert {want.name.partition(".")[0] for want in targets.wants} == {"model"}
    assert live["extra"] == {}
    assert live["other"].state is None


def test_a_whole_optimizer_can_be_left_out_or_taken_alone() -> None:
    saved, live = trained(0), trained(1)
    before, wanted = state_of(live), state_of(saved)
    taken = take(train_state(**saved))
    restore(taken, live, include="optimizer.*")
    assert_same_bits(
        state_of(live), {name: (before if name.startswith("model.") else wanted)[name] for name in before}
    )
    assert live["optimizer"].param_groups[0]["lr"] == 0.01
    assert live["lr_scheduler"].step_size == 6


def test_half_of_a_parameters_optimizer_state_is_refused_where_the_rest_is_not_there() -> None:
    taken = take(train_state(**trained(0)))
    live = trained(1, steps=0)
    found = mismatch_of(taken, live, exclude=["optimizer.*.exp_avg_sq"])
    assert all("exp_avg_sq (left out" in name for name in found["missing"])
    assert live["optimizer"].state == {}
    stepped = trained(1)
    kept = state_of(stepped)
    restore(taken, stepped, exclude=["optimizer.*.exp_avg_sq"])
    found_state = state_of(stepped)
    for name, tensor in kept.items():
        assert (bits_of(found_state[name]) == bits_of(tensor)) == name.endswith(
            ("exp_avg_sq", "step", "seen")
        )


def test_optimizer_state_of_a_left_out_parameter_of_another_shape_is_refused() -> None:
    saved, live = nn.Linear(3, 4), nn.Linear(3, 5)
    optimizers = []
    for model in (saved, live):
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizers.append(optimizer)
    taken = take(train_state(model=saved, optimizer=optimizers[0]))
    found = mismatch_of(taken, {"model": live, "optimizer": optimizers[1]}, include="optimizer.*")
    assert any(name.startswith("optimizer.weight.exp_avg:") for name in found["shapes"])


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    taken = take(train_state(**trained(0)))
    for options in (
        {"include": ["model.*", "modle.*"]},
        {"rename": {"modle.*": "model.*"}},
        {"rename": {"a.*": "b"}},
        {"rename": {"*a*": "*b*"}},
        {"include": []},
    ):
        with pytest.raises(InvalidInputError) as raised:
            restore(taken, trained(1), **options)  # type: ignore[arg-type]
        assert raised.value.code in ("pattern", "rename")


def test_restores_into_a_model_that_was_never_stepped() -> None:
    saved, live = trained(0), trained(1, steps=0)
    restore(take(train_state(**saved)), live, include=["model.*", "optimizer.*"])
    assert_same_bits(state_of(live), state_of(saved))
    expected = list(train(saved["model"], saved["optimizer"], range(2, 6)))
    assert list(train(live["model"], live["optimizer"], range(2, 6))) == expected


@pytest.mark.parametrize("compiled_at", ["save", "restore", "both"])
def test_restores_into_a_model_under_compile(compiled_at: str) -> None:
    saved, live = trained(0), trained(1)

    def compiled(model: nn.Module, when: str) -> nn.Module:
        return torch.compile(model, backend="eager") if compiled_at in (when, "both") else model  # type: ignore[return-value]

    save_model = compiled(saved["model"], "save")
    live_model = compiled(live["model"], "restore")
    tokens = torch.arange(12).view(2, 6)
    live_model(tokens)  # compiled before the restore: its graph must see the new values
    taken = take(train_state(model=save_model, optimizer=saved["optimizer"]))
    restore(taken, {"model": live_model, "optimizer": live["optimizer"]})
    assert_same_bits(state_of(live), state_of(saved))
    assert torch.equal(live_model(tokens), saved["model"](tokens))


# --- other names ---


class Outer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(3, 3))
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def outer(name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Outer(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(seed + 1):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "rename",
    [{"model.old.*": "model.new.*"}, lambda name: name.replace("model.old.", "model.new.")],
    ids=["patterns", "function"],
)
def test_R3_renamed_parameters_bring_their_optimizer_state(rename: Any) -> None:
    saved, live = outer("old", 1), outer("new", 0)
    taken = take(train_state(**saved))
    found = mismatch_of(taken, live)
    assert "model.new.weight" in found["missing"]
    assert "model.old.weight" in found["unexpected"]
    restore(taken, live, rename=rename)
    expected = {name.replace("old.", "new."): tensor for name, tensor in state_of(saved).items()}
    assert_same_bits(state_of(live), expected)


def test_rename_moves_weights_from_one_item_to_another() -> None:
    ema, live = OddNet(), OddNet()
    taken = take(train_state(model=OddNet(), ema=ema))
    restore(taken, {"model": live}, rename={"ema.*": "model.*"})
    assert_same_bits(live.state_dict(), ema.state_dict())
    source = OddNet()
    restore(take(train_state(source=source)), {"model": live}, rename={"source.*": "model.*"})
    assert_same_bits(live.state_dict(), source.state_dict())


def test_two_tensors_renamed_to_one_name_are_refused() -> None:
    taken = take(train_state(model=OddNet()))
    with pytest.raises(InvalidInputError, match="one name") as raised:
        restore(taken, {"model": OddNet()}, rename=lambda name: "model.same")
    assert raised.value.code == "rename"


def test_the_first_rename_pattern_that_fits_counts() -> None:
    apply = rename_function({"a.b.*": "x.*", "a.*.w": "y.*.v", "k": "l"})
    assert [apply(name) for name in ("a.b.w", "a.c.w", "a.c.b", "k", "kk")] == [
        "x.w",
        "y.c.v",
        "a.c.b",
        "l",
        "kk",
    ]


# --- strictness ---


def test_I87_each_direction_is_reported_and_allowed_alone(caplog: pytest.LogCaptureFixture) -> None:
    saved = Box(a=torch.ones(2), b=torch.ones(2), only_saved=torch.ones(2))
    taken = take(train_state(model=saved))

    def live() -> Box:
        return Box(a=torch.zeros(2), b=torch.zeros(2), only_live=torch.full((2,), 7.0))

    found = mismatch_of(taken, {"model": live()})
    assert found == {"missing": ["model.only_live"], "unexpected": ["model.only_saved"]}
    assert mismatch_of(taken, {"model": live()}, allow_missing=True) == {"unexpected": ["model.only_saved"]}
    assert mismatch_of(taken, {"model": live()}, allow_unexpected=True) == {"missing": ["model.only_live"]}
    assert mismatch_of(taken, {"model": live()}, strict=False, allow_missing=False) == {
        "missing": ["model.only_live"]
    }
    model = live()
    with caplog.at_level(logging.WARNING, "ckpt"):
        restore(taken, {"model": model}, strict=False)
    assert model.a.tolist() == [1, 1]
    assert model.only_live.tolist() == [7, 7]
    text = caplog.text
    assert "model.only_live" in text
    assert "model.only_saved" in text


def test_I82_every_wrong_shape_is_listed_and_nothing_touched() -> None:
    pairs = [((4,), (2,)), ((4,), (8,)), ((4, 3), (3, 4)), ((12,), (3, 4)), ((1,), ()), ((0,), (1,))]
    saved = Box(**{f"t{i}": torch.ones(shape) for i, (shape, _) in enumerate(pairs)})
    live = Box(**{f"t{i}": torch.zeros(shape) for i, (_, shape) in enumerate(pairs)})
    found = mismatch_of(take(train_state(model=saved)), {"model": live}, strict=False, cast_dtypes=True)
    assert found == {
        "shapes": [f"model.t{i}: saved {list(a)}, live {list(b)}" for i, (a, b) in enumerate(pairs)]
    }


# --- dtypes ---


@pytest.mark.parametrize(("saved", "live"), list(itertools.permutations(_CASE_DTYPES, 2)))
def test_I81_another_dtype_is_refused_unless_a_cast_is_asked_for(
    saved: torch.dtype, live: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    source = torch.tensor([1.9, -2.7, 0.0, 3.0]).to(saved)
    taken = take(train_state(model=Box(t=source)))
    names = (str(saved).removeprefix("torch."), str(live).removeprefix("torch."))
    model = Box(t=torch.zeros(4).to(live))
    for strict in (True, False):
        found = mismatch_of(taken, {"model": model}, strict=strict)
        assert found == {"dtypes": [f"model.t: saved {names[0]}, live {names[1]}"]}
    if can_cast(names[0], live):
        targets = put_back(taken, train_state(model=model), options=RestoreOptions.of(cast_dtypes=True))
        assert dict(targets.casts) == {names: 1}
        assert bits_of(model.t) == bits_of(source.to(live))
    else:
        found = mismatch_of(taken, {"model": model}, cast_dtypes=True)
        assert "cast_dtypes does not convert" in found["dtypes"][0]


def test_I81_what_a_cast_may_never_do() -> None:
    allowed = {
        (str(a)[6:], str(b)[6:]) for a in _CASE_DTYPES for b in _CASE_DTYPES if can_cast(str(a)[6:], b)
    }
    for saved, live in [
        ("float32", "int32"),
        ("float32", "bool"),
        ("int32", "bool"),
        ("complex64", "float32"),
        ("int64", "int32"),
    ]:
        assert (saved, live) not in allowed
    assert {
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("int32", "int64"),
        ("bool", "int32"),
    } <= allowed


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_I81_every_pair_of_dtypes_is_answered_and_what_is_allowed_torch_can_copy() -> None:
    for saved in dtypes.known_dtypes():
        for live in map(torch_dtype, dtypes.known_dtypes()):
            if can_cast(saved, live):
                zeros((2,), live).copy_(zeros((2,), torch_dtype(saved)))


# --- plain values and structure ---


@pytest.mark.parametrize(
    ("before", "saved"),
    [
        ([], [{"a": 1}, {"b": 2}]),
        ([1, 2, 3], [1]),
        ({}, {"x": {"y": 1}}),
        ({"x": 1, "z": 2}, {"y": 3}),
        (None, torch.arange(3)),
        (torch.arange(3), None),
        (5, torch.ones(())),
        ((1, 2), (1, 2, 3)),
        ((), ((),)),
    ],
)
def test_I83_plain_structure_comes_from_the_checkpoint(before: Any, saved: Any) -> None:
    plain, stateful = {"v": before, "gone": 1}, Counter(before)
    taken = take(train_state(model=OddNet(), plain={"v": saved}, stateful=Counter(saved)))
    inner = plain
    put_back(taken, train_state(model=OddNet(), plain=plain, stateful=stateful))
    assert inner is plain
    assert list(plain) == ["v"]
    for found in (plain["v"], stateful.state):
        assert type(found) is type(saved)
        if isinstance(saved, torch.Tensor):
            assert_same_bits({"v": found}, {"v": saved})
        else:
            assert found == saved


def test_I85_the_callers_objects_get_every_kind_of_leaf() -> None:
    value = {
        "int": 3,
        "float": 0.5,
        "str": "s",
        "none": None,
        "nested": {"list": [1, (2, "x")]},
        "tuple": (1, {"k": None}),
        "tensor": torch.tensor([1.5]),
    }
    plain: dict[str, Any] = {"int": 0, "other": 1}
    stateful = Counter({"int": 0})
    taken = take(train_state(model=OddNet(), plain=value, stateful=Counter(value)))
    put_back(taken, train_state(model=OddNet(), plain=plain, stateful=stateful))
    for found in (plain, stateful.state):
        assert found.keys() == value.keys()
        assert {k: v for k, v in found.items() if k != "tensor"} == {
            k: v for k, v in value.items() if k != "tensor"
        }
        assert_same_bits({"t": found["tensor"]}, {"t": value["tensor"]})  # type: ignore[dict-item]
