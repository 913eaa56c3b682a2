"""Values and tensors of every kind through a snapshot and back by their bits, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import dtypes
from ckpt.errors import InvalidInputError
from ckpt.format.values import decode_value
from ckpt_trainer_hooks.elements import copy_elements, movable
from ckpt_trainer_hooks.layout import dtype_name
from tests.support.bits import bits_of
from tests.support.snapshot_trip import put_back, take, train_state


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


def _trip(tensor: torch.Tensor, live: torch.Tensor) -> None:
    """Save ``tensor`` and restore it into ``live``."""
    put_back(take(train_state(model=_holding(x=tensor))), train_state(model=_holding(x=live)))


def _plain_trip(value: Any) -> Any:
    live: dict[str, Any] = {}
    put_back(take(train_state(extra={"value": value})), train_state(extra=live))
    return live["value"]


# --- dtypes ---


def _all_torch_dtypes() -> list[torch.dtype]:
    return sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def test_I89_every_dtype_of_this_torch_is_stored_or_is_a_quantized_one() -> None:
    unknown = [d for d in _all_torch_dtypes() if not dtypes.is_known(dtype_name(d))]
    assert all(dtype_name(d).startswith(("qint", "quint")) for d in unknown), unknown
    for dtype in _all_torch_dtypes():
        if dtype not in unknown:
            assert dtypes.itemsize(dtype_name(dtype)) == dtype.itemsize


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_I89_every_dtype_at_once_in_every_form_by_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    source: dict[str, torch.Tensor] = {}
    for dtype in _all_torch_dtypes():
        name = dtype_name(dtype)
        if not dtypes.is_known(name):
            continue
        raw = torch.randint(0, 256, (24 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        full = ((raw & 1) if dtype == torch.bool else raw).view(dtype).view(4, 6)
        source |= {
            f"{name}_full": full,
            f"{name}_scalar": full[1, 2],
            f"{name}_empty": full[:, :0],
            f"{name}_turned": full.t(),
            f"{name}_stepped": full[::2, 1::2],
            f"{name}_expanded": full[:, :1].expand(4, 3),
        }
    live = {key: _zeros(t) for key, t in source.items()}
    put_back(take(train_state(model=_holding(**source))), train_state(model=_holding(**live)))
    assert [key for key in source if bits_of(live[key]) != bits_of(source[key])] == []
    assert all(live[key].dtype == source[key].dtype for key in source)
    value = _plain_trip([source[key] for key in source])
    assert [k for k, t in zip(source, value, strict=True) if bits_of(t) != bits_of(source[k])] == []


def _zeros(like: torch.Tensor) -> torch.Tensor:
    nbytes = like.numel() * like.dtype.itemsize
    return torch.zeros(nbytes, dtype=torch.uint8).view(like.dtype).view(like.shape)


def test_elements_are_never_converted_on_the_way() -> None:
    with pytest.raises(TypeError):
        copy_elements(torch.zeros(2, dtype=torch.int32), torch.ones(2))
    odd = torch.zeros(2, dtype=torch.float8_e5m2)
    assert movable(odd).data_ptr() == odd.data_ptr()
    assert movable(odd).dtype == torch.uint8


# --- views ---

COMPLEX = torch.complex(torch.arange(6.0), -torch.arange(6.0)).view(2, 3)


@pytest.mark.parametrize(
    "view",
    [
        lambda: COMPLEX.conj(),
        lambda: COMPLEX.conj().imag,
        lambda: COMPLEX.mH,
        lambda: torch._neg_view(COMPLEX.real),
    ],
    ids=["conj", "neg", "adjoint", "neg-view"],
)
def test_lazily_conjugated_and_negated_views_are_materialised(view: Callable[[], torch.Tensor]) -> None:
    source = view()
    assert source.is_conj() or source.is_neg()
    live = torch.zeros(source.shape, dtype=source.dtype)
    _trip(source, live)
    assert bits_of(live) == bits_of(source.resolve_conj().resolve_neg())
    lazy = view().resolve_conj().resolve_neg().clone()
    target = lazy.conj() if lazy.is_complex() else torch._neg_view(lazy)
    _trip(source, target)
    assert torch.equal(target, source)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_conjugated_half_complex_is_materialised() -> None:
    source = COMPLEX.to(torch.complex32).conj()
    live = torch.zeros(source.shape, dtype=source.dtype)
    _trip(source, live)
    assert bits_of(live) == bits_of(source.resolve_conj())


def test_views_that_share_storage_are_stored_each_and_share_again() -> None:
    base = torch.arange(12.0)
    parts = {"a": base[:6], "b": base[4:10], "c": base.view(3, 4), "d": base}
    taken = take(train_state(model=_holding(**parts)))
    fresh = torch.zeros(12)
    live = {"a": fresh[:6], "b": fresh[4:10], "c": fresh.view(3, 4), "d": fresh}
    put_back(taken, train_state(model=_holding(**live)))
    assert torch.equal(fresh, base)
    fresh[4] = 99  # still views of one storage
    assert live["a"][4] == live["b"][0] == live["c"][1, 0] == 99


def test_overlapping_windows_come_back() -> None:
    source = torch.arange(6.0).as_strided((3, 3), (1, 1))
    live = torch.zeros(6).as_strided((3, 3), (1, 1))
    _trip(source, live)
    assert torch.equal(live, source)


def test_expanded_live_tensor_takes_what_is_equal_and_refuses_what_is_not() -> None:
    live = torch.zeros(3, 1).expand(3, 5)
    source = torch.tensor([[1.0], [float("nan")], [-0.0]]).expand(3, 5)
    _trip(source.contiguous(), live)
    assert bits_of(live) == bits_of(source)
    assert live.stride() == (1, 0)
    with pytest.raises(InvalidInputError) as caught:
        _trip(torch.arange(15.0).view(3, 5), live)
    assert caught.value.code == "expanded"
    assert caught.value.context["tensor"] == "model.x"


def test_inference_and_gradient_tensors_are_written_in_place() -> None:
    with torch.inference_mode():
        inference = torch.zeros(3)
    _trip(inference + 2, inference)
    assert inference.tolist() == [2, 2, 2]
    wanting = torch.zeros(3, requires_grad=True)
    _trip(wanting * 0 + 5, wanting)
    assert wanting.tolist() == [5, 5, 5]
    assert wanting.requires_grad
    assert wanting.grad_fn is None


# --- refused ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_channel(
            torch.ones(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8
        ),
        lambda: torch.ones(2, 3).to_sparse(),
        lambda: torch.ones(2, 3).to_sparse_csr(),
        lambda: torch.ones(2, 2).to_sparse_csc(),
        lambda: torch.ones(2, 2).to_sparse_bsr((1, 1)),
        lambda: torch.ones(3, 3).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["qtensor", "qchannel", "coo", "csr", "csc", "bsr", "mkldnn", "nested", "jagged", "meta"],
)
@pytest.mark.filterwarnings("ignore:.*[sS]parse.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quant.*")
def test_I90_what_a_copy_of_elements_would_change_is_refused_by_name_wherever_it_is(
    make: Callable[[], torch.Tensor],
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(model=_holding(odd=make())))
    assert caught.value.context["tensor"] == "model.odd"
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(extra={"deep": [{"odd": make()}]}))
    assert caught.value.context["tensor"] == "extra.deep.0.odd"


class _Tagged(torch.Tensor):
    """A subclass without parts of its own."""


def test_subclass_among_plain_values_is_refused_and_in_a_module_kept() -> None:
    tagged = torch.ones(3).as_subclass(_Tagged)
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(extra={"t": tagged}))
    assert "_Tagged" in str(caught.value)
    live = torch.zeros(3).as_subclass(_Tagged)
    _trip(tagged, live)
    assert type(live) is _Tagged
    assert live.tolist() == [1, 1, 1]
    assert _plain_trip(nn.Parameter(torch.ones(2))).tolist() == [1, 1]


# --- aliases of the caller's memory (I75) ---


def test_I75_plain_values_and_arrays_are_those_of_the_call() -> None:
    array, items, table = np.arange(4.0), [1, 2], {"a": [3]}
    flat = train_state(extra={"array": array, "items": items, "table": table}).flatten()
    array[:] = -1
    items.append(9)
    table["a"][0] = -1
    found = decode_value(flat.values)["items"]["extra"]["value"]
    assert found["array"].tolist() == [0, 1, 2, 3]
    assert found["items"] == [1, 2]
    assert found["table"] == {"a": [3]}


# --- names ---


@pytest.mark.parametrize(
    "name", ["a b", "größe/\u4e2d", "\0", "\n", '"', "\\", "__metadata__", "x" * 5000, "\U0001f600" * 300]
)
def test_name_of_any_character_and_length_is_kept(name: str) -> None:
    live: dict[str, Any] = {}
    model = _holding(**{name: torch.ones(3)})
    target = _holding(**{name: torch.zeros(3)})
    taken = take(train_state(model=model, extra={name: [torch.ones(2), 1]}))
    assert f"model.{name}" in taken.layouts
    put_back(taken, train_state(model=target, extra=live))
    assert getattr(target, name).tolist() == [1, 1, 1]
    assert live[name][0].tolist() == [1, 1]
    assert live[name][1] == 1


def test_names_that_exceed_a_safetensors_header_are_refused_with_its_size() -> None:
    model = _holding(**{f"{n}-" + "x" * 10_000_000: torch.ones(1) for n in range(11)})
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(model=model))
    assert caught.value.code == "segment"
    assert "header" in str(caught.value)
    assert caught.value.context["limit"] == 100_000_000
