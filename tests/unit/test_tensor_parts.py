"""Tensor subclasses made of parts (I88): inner tensors by bits into a live one that fits, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError
from tests.support.bits import assert_same_bits, bits_of
from tests.support.snapshot_trip import put_back, take, train_state


class Packed(torch.Tensor):
    """Codes and one scale per block of 4; ``detach`` computes the values, as some such classes do."""

    codes: torch.Tensor
    scales: torch.Tensor
    meta: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, meta: Any) -> Packed:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, meta: Any) -> None:
        self.codes, self.scales, self.meta = codes, scales, meta

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.meta

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, *_: Any) -> Packed:
        return cls(inner["codes"], inner["scales"], meta)

    def values(self) -> torch.Tensor:
        scales = self.scales.values() if isinstance(self.scales, Packed) else self.scales
        return (self.codes.view(-1, 4).float() * scales.view(-1, 1)).view(self.shape).bfloat16()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].values()
        raise NotImplementedError(func)


class Other(Packed):
    """The same parts, another meaning."""


def _packed(seed: int, *, cls: type[Packed] = Packed, meta: Any = (4, torch.bfloat16)) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (3, 8), dtype=torch.int8, generator=generator)
    return cls(codes, torch.rand(6, generator=generator), meta)


class _Layer(nn.Module):
    """Holds a wrapper as people do who cannot make a parameter of it, and a plain buffer beside it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.full((3,), float(weight.shape[0])))


def _parts(packed: Packed) -> dict[str, torch.Tensor]:
    return {"codes": packed.codes, "scales": packed.scales}


def test_I88_inner_tensors_come_back_by_bits_and_nothing_is_computed() -> None:
    saved, live = _packed(0), _packed(1)
    expected = {name: tensor.clone() for name, tensor in _parts(saved).items()}
    held = _parts(live)
    taken = take(train_state(model=nn.Sequential(_Layer(saved))))
    assert sorted(taken.entries) == ["model.0.bias", "model.0.weight.codes", "model.0.weight.scales"]
    model = nn.Sequential(_Layer(live))
    put_back(taken, train_state(model=model))
    assert_same_bits(_parts(live), expected)
    assert model[0].weight is live
    assert all(held[name] is tensor for name, tensor in _parts(live).items())
    assert bits_of(live.values()) == bits_of(saved.values())


def _nested(seed: int) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (4, 8), dtype=torch.int8, generator=generator)
    scales = Packed(codes[1:2].view(2, 4).clone(), torch.rand(2, generator=generator), ("inner",))
    return Packed(codes, scales, ("outer",))


def test_parts_within_parts_and_shared_ones() -> None:
    outer, live = _nested(0), _nested(1)
    taken = take(train_state(model=nn.ModuleList([_Layer(outer), _Layer(outer)])))
    assert [name for name in taken.entries if name.startswith("model.1.weight")] == []
    put_back(taken, train_state(model=nn.ModuleList([_Layer(live), _Layer(live)])))
    assert bits_of(live.codes) == bits_of(outer.codes)
    assert_same_bits(_parts(live.scales), _parts(outer.scales))


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (lambda: _packed(1, cls=Other), "class"),
        (lambda: _packed(1, meta=(8, torch.bfloat16)), "context"),
        (lambda: Packed(torch.zeros(6, 4, dtype=torch.int8), torch.zeros(6), (4, torch.bfloat16)), "shape"),
        (lambda: torch.zeros(3, 8, dtype=torch.bfloat16), "live a plain tensor"),
    ],
    ids=["class", "context", "shape", "plain"],
)
def test_I88_live_tensor_that_means_something_else_is_refused_and_left_alone(live: Any, words: str) -> None:
    tensor = live()
    before = [t.clone() for t in _parts(tensor).values()] if isinstance(tensor, Packed) else [tensor.clone()]
    with pytest.raises(InvalidInputError) as caught:
        put_back(take(train_state(model=_Layer(_packed(0)))), train_state(model=_Layer(tensor)), strict=False)
    assert "model.weight" in str(caught.value)
    assert words in str(caught.value)
    after = list(_parts(tensor).values()) if isinstance(tensor, Packed) else [tensor]
    assert [bits_of(t) for t in after] == [bits_of(t) for t in before]


def test_I88_plain_saved_tensor_does_not_go_into_parts() -> None:
    taken = take(train_state(model=_Layer(torch.ones(3, 8, dtype=torch.bfloat16))))
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(model=_Layer(_packed(0))))
    assert "saved as a plain tensor" in str(caught.value)
    assert "Packed" in str(caught.value)


def test_I88_context_of_unknown_type_is_refused_with_the_class() -> None:
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(model=_Layer(_packed(0, meta={"how": object()}))))
    assert caught.value.context["tensor"] == "model.weight"
    assert "Packed" in str(caught.value.context["type"])
    assert "object" in str(caught.value.context["cause"])


def _optimizer_with(value: torch.Tensor) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["codes"] = value
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("where", ["optimizer", "plain"])
def test_I88_elsewhere_they_are_refused_at_save_with_the_class(where: str) -> None:
    items = {"optimizer": _optimizer_with(_packed(0)), "plain": {"extra": {"codes": _packed(0)}}}[where]
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(**items))
    assert "Packed" in str(caught.value.context["type"])
    assert str(caught.value.context["tensor"]).endswith("codes")
