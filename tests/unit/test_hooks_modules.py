"""Modules: every dtype, shape and stride by its bits; hooks and setters; what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import dtypes
from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.layout import torch_dtype
from tests.support.bits import assert_same_bits, bits_of
from tests.support.models import OddNet, train
from tests.support.snapshot_trip import Taken, put_back, take, train_state


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _holding(**buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


def _random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
    )


# --- values ---


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", dtypes.known_dtypes())
def test_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    dtype = torch_dtype(name)
    raw = _random_bytes(24 * dtype.itemsize)
    if dtype == torch.bool:
        raw &= 1
    full = raw.view(dtype).view(4, 6)
    tensors = {"whole": full, "scalar": raw[: dtype.itemsize].view(dtype).view(()), "empty": full[:0]}
    tensors |= {"turned": full.t(), "stepped": full[::2, 1::2]}
    taken = take(train_state(model=_holding(**tensors)))
    live = {key: torch.zeros(t.shape, dtype=torch.uint8).to(torch.bool) if dtype == torch.bool else
            torch.zeros(t.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(t.shape)
            for key, t in tensors.items()}  # fmt: skip
    model = _holding(**live)

    put_back(taken, train_state(model=model))

    for key, tensor in tensors.items():
        assert live[key].dtype == dtype
        assert _raw(live[key]) == _raw(tensor), key


def _raw(tensor: torch.Tensor) -> bytes:
    """Bits without asking torch for arithmetic on the dtype."""
    if tensor.is_contiguous():
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return bits_of(tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_payloads_of_nans_and_signs_of_zeros_survive(dtype: torch.dtype) -> None:
    patterns = _random_bytes(4096 * dtype.itemsize).view(dtype)
    special = torch.cat(
        [torch.tensor([-0.0, float("inf"), -float("inf"), float("nan")], dtype=dtype), patterns]
    )
    live = torch.zeros_like(special)
    put_back(take(train_state(model=_holding(x=special))), train_state(model=_holding(x=live)))
    assert bits_of(live) == bits_of(special)


@pytest.mark.parametrize(
    "turn", [lambda t: t, lambda t: t.t(), lambda t: t[:, ::3], lambda t: t.as_strided((2, 3), (1, 4))]
)
def test_strides_of_source_and_target_do_not_matter(turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = turn(torch.arange(36.0).view(6, 6))
    taken = take(train_state(model=_holding(x=source)))
    for live in (torch.zeros(source.shape), turn(torch.zeros(6, 6)), torch.zeros(source.shape[::-1]).t()):
        put_back(taken, train_state(model=_holding(x=live)))
        assert torch.equal(live, source)


def test_target_that_is_a_part_of_a_larger_tensor_leaves_the_rest_alone() -> None:
    taken = take(train_state(model=_holding(x=torch.ones(2, 2))))
    large = torch.zeros(4, 4)
    put_back(taken, train_state(model=_holding(x=large[1:3, 1:3])))
    assert large.sum() == 4
    assert large[1:3, 1:3].sum() == 4


def test_tensors_across_chunk_borders_come_back() -> None:
    tensors = {f"t{n}": torch.randn(3, 7 + n, 50_000) for n in range(3)}  # 4 to 6 MiB each
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    put_back(take(train_state(model=_holding(**tensors))), train_state(model=_holding(**live)))
    assert_same_bits(live, tensors)


def test_conjugated_view_is_not_taken_for_its_base() -> None:
    base = torch.randn(5, dtype=torch.complex64)
    taken = take(train_state(model=_holding(a=base, b=base.conj())))
    live = {"a": torch.zeros_like(base), "b": torch.zeros_like(base)}
    put_back(taken, train_state(model=_holding(**live)))
    assert torch.equal(live["a"], base)
    assert torch.equal(live["b"], base.conj().resolve_conj())


def test_buffers_that_are_not_persistent_are_left_out_and_left_alone() -> None:
    def built(value: float) -> nn.Module:
        model = nn.BatchNorm1d(3)
        model.register_buffer("cache", torch.full((2,), value), persistent=False)
        return model

    taken = take(train_state(model=built(1.0)))
    model = built(2.0)
    put_back(taken, train_state(model=model))
    assert "model.cache" not in taken.layouts
    assert model.cache.tolist() == [2.0, 2.0]


def test_only_parameters_are_copied_later_buffers_at_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = take(train_state(model=model, optimizer=optimizer, more={"t": torch.ones(1)}))
    assert taken.deferred == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}


@pytest.mark.parametrize(
    "name", ["weird/name", "größe", "a b", "@rank0", "'quoted\"", "..x".replace(".", "-")]
)
def test_odd_names_are_kept(name: str) -> None:
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.ones(3)))
    model.child = nn.ModuleDict({name: nn.Linear(1, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    taken = take(train_state(model=model, optimizer=optimizer, extra={name: {name: torch.ones(2)}}))
    assert f"model.{name}" in taken.layouts
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    extra: dict[str, Any] = {}
    put_back(taken, train_state(model=model, optimizer=optimizer, extra=extra))
    assert_same_bits(model.state_dict(), expected)
    assert extra[name][name].tolist() == [1, 1]


def test_name_that_has_no_utf8_form_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("bad\udc80", torch.ones(1))
    with pytest.raises(InvalidInputError):
        take(train_state(model=model))


class _Subclass(torch.Tensor):
    """Wraps codes and a scale, as quantized tensors do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> _Subclass:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(2, 3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        lambda: torch.ones(3, device="meta"),
        lambda: nn.UninitializedParameter(),
        lambda: _Subclass(torch.ones(3, dtype=torch.int8), torch.ones(1)),
    ],
    ids=["coo", "csr", "quantized", "nested", "jagged", "meta", "lazy", "subclass"],
)
@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_tensors_that_are_more_than_their_elements_are_refused_by_name(make: Callable[[], Any]) -> None:
    module = nn.Module()
    value = make()
    if isinstance(value, nn.Parameter):
        module.register_parameter("odd", value)
    else:
        module.register_buffer("odd", value)
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(model=module))
    assert str(caught.value.context["tensor"]).endswith("odd")


# --- what state-dict hooks and setters do ---


class _Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"scale": 1.5, "amax": [torch.arange(3.0)]}, {}),
        (torch.arange(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)),  # serialized, of any size
        (None, {"x": 1}),
        (b"raw", None),
    ],
)
def test_extra_state_goes_through_the_modules_setter(saved: Any, live: Any) -> None:
    taken = take(train_state(model=nn.Sequential(_Extra(saved))))
    model = nn.Sequential(_Extra(live))
    put_back(taken, train_state(model=model))
    found = model[0].extra
    if isinstance(saved, torch.Tensor):
        assert torch.equal(found, saved)
    elif isinstance(saved, dict):
        assert found["scale"] == 1.5
        assert found["amax"][0].tolist() == [0, 1, 2]
    else:
        assert found == saved


def test_entries_that_a_hook_makes_go_back_through_load_state_dict_with_the_modules_version() -> None:
    class Halved(nn.Module):
        _version = 3

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4.0))
            self.versions: list[int | None] = []

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "low"] = self.weight.detach()[:2] * 2
            destination[prefix + "high"] = self.weight.detach()[2:] * 2

        def _load_from_state_dict(
            self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
        ) -> None:
            self.versions.append(local_metadata.get("version"))
            halves = [state_dict[prefix + "low"], state_dict[prefix + "high"]]
            self.weight.data.copy_(torch.cat(halves) / 2)

    model = nn.Sequential(nn.Linear(1, 1), Halved())
    taken = take(train_state(model=model))
    assert {"model.1.low", "model.1.high"} <= set(taken.layouts)
    other = nn.Sequential(nn.Linear(1, 1), Halved())
    other[1].weight.data.zero_()
    put_back(taken, train_state(model=other))
    assert torch.equal(other[1].weight, model[1].weight)
    assert other[1].versions == [3]


# --- what does not fit ---


def _taken_odd_net() -> Taken:
    torch.manual_seed(0)
    model = OddNet()
    optimizer = torch.optim.AdamW(model.parameters())
    list(train(model, optimizer, range(1)))
    return take(train_state(model=model, optimizer=optimizer, counters={"n": 1}))


def _misfit() -> tuple[OddNet, torch.optim.Optimizer, dict[str, int]]:
    torch.manual_seed(1)
    model = OddNet()
    del model.seen  # unexpected
    model.register_buffer("extra", torch.full((2,), 7.0))  # missing
    model.up = nn.Linear(10, 21)  # shapes
    model.norm = model.norm.double()  # dtypes
    return model, torch.optim.AdamW(model.parameters()), {"n": 5}


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed() -> None:
    taken = _taken_odd_net()
    model, optimizer, counters = _misfit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(model=model, optimizer=optimizer, counters=counters, loader={}))
    error = caught.value
    assert error.code == "mismatch"
    assert str(error.context["missing"]).split("; ") == ["model.extra", "loader (whole item)"]
    assert str(error.context["unexpected"]).split("; ") == ["model.seen"]
    assert "model.up.weight: saved [22, 10], live [21, 10]" in str(error.context["shapes"])
    assert "model.up.bias" in str(error.context["shapes"])
    assert "model.norm.weight: saved float32, live float64" in str(error.context["dtypes"])
    assert_same_bits(model.state_dict(), before)
    assert optimizer.state == {}
    assert counters == {"n": 5}


def test_not_strict_still_refuses_shapes_and_dtypes() -> None:
    model, optimizer, counters = _misfit()
    with pytest.raises(InvalidInputError) as caught:
        put_back(
            _taken_odd_net(), train_state(model=model, optimizer=optimizer, counters=counters), strict=False
        )
    assert caught.value.context.keys() == {"shapes", "dtypes"}


def test_not_strict_leaves_missing_alone_and_skips_unexpected() -> None:
    taken = _taken_odd_net()
    torch.manual_seed(1)
    model = OddNet()
    del model.seen
    model.register_buffer("extra", torch.full((2,), 7.0))
    model.more = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.more.weight] = {"step": torch.tensor(9.0)}
    counters = {"n": 5}
    put_back(taken, train_state(model=model, optimizer=optimizer, counters=counters), strict=False)
    assert model.extra.tolist() == [7.0, 7.0]
    assert counters == {"n": 1}
    assert optimizer.state[model.more.weight]["step"] == 9
    assert optimizer.state[model.up.weight]["step"] == 1


@pytest.mark.parametrize(
    ("saved", "live"), [([4], [2]), ([4], [8]), ([4, 3], [3, 4]), ([12], [3, 4]), ([1], [])]
)
def test_sizes_are_compared(saved: list[int], live: list[int]) -> None:
    taken = take(train_state(model=_holding(x=torch.ones(saved))))
    target = torch.zeros(live)
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(model=_holding(x=target)))
    assert caught.value.code == "mismatch"
    assert target.sum() == 0


def test_item_that_changed_its_kind_is_named() -> None:
    taken = take(train_state(thing={"a": 1}))
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(thing=nn.Linear(1, 1)))
    assert "thing: saved as plain, live module" in str(caught.value)


def test_state_of_a_stepped_optimizer_that_the_live_one_lacks_a_parameter_for_is_listed() -> None:
    taken = _taken_odd_net()
    torch.manual_seed(1)
    model = OddNet()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "up.bias"])
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(model=model, optimizer=optimizer, counters={}))
    unexpected = str(caught.value.context["unexpected"])
    assert "optimizer.up.bias.exp_avg" in unexpected
    assert "optimizer.up.bias (in a group)" in unexpected
