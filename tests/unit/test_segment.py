"""Segments, read back by the safetensors package and by our own header reader."""

from __future__ import annotations

import json
import math
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt import dtypes
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.segment import (
    CHUNK_NBYTES,
    DATA_ALIGN,
    ArrayHead,
    Change,
    chunk_count,
    chunk_range,
    lay_out_segment,
    read_safetensors_header,
)
from tests.support.properties import examples

ODD_NAMES = [
    "model.layers.0.weight",
    "",
    " ",
    "a b\tc\n",
    '"quoted"',
    "back\\slash",
    "gewicht.\u00e4\u00f6\u00fc.\u6743\u91cd.\U0001f600",
    "optim.state.model._orig_mod.w.exp_avg",
    "../../etc/passwd",
    "x" * 5000,
    "nul\x00byte",
]


def fill(arrays: list[ArrayHead], seed: int = 0) -> tuple[bytes, dict[str, bytes]]:
    header, placed, nbytes = lay_out_segment(arrays)
    data = bytearray(nbytes)
    data[: len(header)] = header
    content = {}
    rng = np.random.default_rng(seed)
    for item in placed:
        content[item.head.name] = rng.bytes(item.nbytes)
        data[item.start : item.start + item.nbytes] = content[item.head.name]
    return bytes(data), content


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "segment-00000.safetensors"
    path.write_bytes(data)
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_dtype_opens_with_the_safetensors_package(tmp_path: Path) -> None:
    arrays = [ArrayHead(f"t.{name}", name, (3, 5)) for name in dtypes.known_dtypes() if name != "bool"]
    data, content = fill(arrays)
    loaded = load_file(write(tmp_path, data))
    assert loaded.keys() == content.keys()
    for item in arrays:
        tensor = loaded[item.name]
        if item.dtype in dtypes.SAFETENSORS_NAMES:
            assert tensor.dtype == getattr(torch, item.dtype)
            assert tensor.shape == item.shape
        else:
            assert tensor.dtype == torch.uint8
            assert tensor.shape == (*item.shape, dtypes.itemsize(item.dtype))
        assert bits(tensor) == content[item.name]


def test_complex_values_can_be_had_from_their_bytes(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, -0.5j, float("nan")], dtype=torch.complex64)
    header, placed, nbytes = lay_out_segment([ArrayHead("rope.freqs", "complex64", (3,))])
    data = header + values.numpy().tobytes()
    assert len(data) == nbytes
    assert placed[0].start == len(header)
    loaded = load_file(write(tmp_path, data))["rope.freqs"]
    assert bits(loaded.view(torch.complex64).squeeze(-1)) == bits(values)


def test_odd_names_open_with_the_safetensors_package(tmp_path: Path) -> None:
    data, content = fill([ArrayHead(name, "bfloat16", (7,)) for name in ODD_NAMES])
    with safe_open(write(tmp_path, data), framework="pt") as file:
        assert sorted(file.keys()) == sorted(ODD_NAMES)
        assert all(bits(file.get_tensor(name)) == content[name] for name in ODD_NAMES)


def test_a_segment_without_tensors_opens_with_the_safetensors_package(tmp_path: Path) -> None:
    data, _ = fill([])
    assert len(data) == DATA_ALIGN
    assert load_file(write(tmp_path, data)) == {}
    assert read_safetensors_header(data, nbytes=len(data), where="here") == []


def test_scalars_are_stored(tmp_path: Path) -> None:
    data, content = fill([ArrayHead("step", "int64", ()), ArrayHead("scale", "float32", ())])
    loaded = load_file(write(tmp_path, data))
    assert loaded["step"].shape == ()
    assert {name: bits(tensor) for name, tensor in loaded.items()} == content


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
            st.sampled_from(dtypes.known_dtypes()),
            st.lists(st.integers(1, 5), max_size=3).map(tuple),
            st.sampled_from(Change),
        ),
        max_size=12,
        unique_by=lambda item: item[0],
    )
)
@examples(60)
def test_the_file_is_packed_and_no_element_straddles_a_chunk(
    tmp_path: Path, items: list[tuple[str, str, tuple[int, ...], Change]]
) -> None:
    arrays = [ArrayHead(*item) for item in items]
    header, placed, nbytes = lay_out_segment(arrays)
    assert len(header) % DATA_ALIGN == 0
    position = len(header)
    for item in placed:
        assert item.start == position
        assert item.start % dtypes.itemsize(item.head.dtype) == 0
        position += item.nbytes
    assert position == nbytes
    sizes = [(-dtypes.itemsize(item.head.dtype), item.head.change, item.head.name) for item in placed]
    kinds = [(change, size, name) for size, change, name in sizes]
    assert kinds == sorted(kinds) or sizes == sorted(sizes)
    read = read_safetensors_header(header, nbytes=nbytes, where="here")
    assert [(r.head.name, r.start, r.nbytes) for r in read] == [
        (p.head.name, p.start, p.nbytes) for p in placed
    ]
    data, _ = fill(arrays)
    with safe_open(write(tmp_path, data), framework="np") as file:
        assert set(file.keys()) == {name for name, *_ in items}


MIB = 1 << 20


def _adapted(frozen: int, trained: int, dtype: str = "bfloat16") -> list[ArrayHead]:
    """A frozen array of that many bytes in every layer, and a trained one of float32 between each two."""
    size = dtypes.itemsize(dtype)
    return [
        array
        for layer in range(10)
        for array in (
            ArrayHead(f"{layer}.adapter", "float32", (trained // 4,)),
            ArrayHead(f"{layer}.base", dtype, (frozen // size,), Change.SELDOM),
        )
    ]


def test_what_training_changes_lies_apart_and_begins_with_a_chunk() -> None:
    buffer = ArrayHead("5.running", "float32", (3,), Change.UNKNOWN)
    header, placed, nbytes = lay_out_segment([*_adapted(15 * MIB, MIB // 8), buffer])
    assert [item.head.change for item in placed] == [
        *[Change.SELDOM] * 10,
        Change.UNKNOWN,
        *[Change.ALWAYS] * 10,
    ]
    assert placed[0].start == len(header)
    assert len(header) % DATA_ALIGN == 0
    first = placed[11].start
    assert first % CHUNK_NBYTES == buffer.nbytes  # the rest below DATA_ALIGN cannot be padded away
    assert nbytes - first == 10 * MIB // 8
    read = read_safetensors_header(header, nbytes=nbytes, where="here")
    assert [(r.head.name, r.start) for r in read] == [(p.head.name, p.start) for p in placed]


def test_a_border_that_would_cost_too_much_is_left_where_it_falls() -> None:
    header, placed, _ = lay_out_segment(_adapted(MIB, MIB // 8))
    assert len(header) == DATA_ALIGN
    assert [item.head.name for item in placed[:10]] == [f"{layer}.base" for layer in range(10)]


def test_an_odd_number_of_frozen_bytes_does_not_misplace_what_follows() -> None:
    header, placed, _ = lay_out_segment(_adapted(15 * MIB + 1, MIB // 8, "int8"))
    assert len(header) == DATA_ALIGN
    assert [item.head.change for item in placed] == [*[Change.ALWAYS] * 10, *[Change.SELDOM] * 10]
    assert all(item.start % dtypes.itemsize(item.head.dtype) == 0 for item in placed)


@pytest.mark.parametrize("change", Change)
def test_a_state_of_one_kind_gets_no_padding(change: Change) -> None:
    header, _, _ = lay_out_segment([ArrayHead("w", "float32", (20 * MIB,), change)])
    assert len(header) == DATA_ALIGN


def test_the_bytes_do_not_depend_on_the_order_of_the_arrays() -> None:
    arrays = [ArrayHead(f"t{i}", dtype, (i + 1,)) for i, dtype in enumerate(dtypes.known_dtypes())]
    assert lay_out_segment(arrays) == lay_out_segment(arrays[::-1])


@pytest.mark.parametrize(
    "arrays",
    [
        [ArrayHead("__metadata__", "int8", (1,))],
        [ArrayHead("w", "int8", (1,)), ArrayHead("w", "int16", (1,))],
        [ArrayHead("w", "int8", (3, 0))],
        [ArrayHead("w", "int9", (3,))],
        [ArrayHead("\ud800", "int8", (3,))],
    ],
    ids=["reserved", "twice", "empty", "dtype", "surrogate"],
)
def test_what_safetensors_cannot_hold_is_refused(arrays: list[ArrayHead]) -> None:
    with pytest.raises(InvalidInputError):
        lay_out_segment(arrays)


@given(st.integers(0, 10**5), st.integers(1, 1000))
@examples()
def test_chunks_cover_the_file(nbytes: int, chunk_nbytes: int) -> None:
    ranges = [chunk_range(i, nbytes, chunk_nbytes) for i in range(chunk_count(nbytes, chunk_nbytes))]
    assert sum(stop - start for start, stop in ranges) == nbytes
    assert all(0 < stop - start <= chunk_nbytes for start, stop in ranges)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    with pytest.raises(InvalidInputError):
        chunk_range(len(ranges), nbytes, chunk_nbytes)


def test_the_chunk_grid_fits_every_item_size() -> None:
    assert all(CHUNK_NBYTES % dtypes.itemsize(name) == 0 for name in dtypes.known_dtypes())


def with_header(text: bytes, data_nbytes: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(data_nbytes)


GOOD = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 50) + b"{}",
        with_header(b"{"),
        with_header(b"[]"),
        with_header(b"\xff\xfe"),
        with_header(b"[" * 100_000),
        with_header(b'{"w": 3}'),
        with_header(json.dumps({"w": {"dtype": "F32"}}).encode()),
        with_header(json.dumps({"w": {**GOOD["w"], "dtype": "Q7"}}).encode(), 8),
        with_header(json.dumps({"w": {**GOOD["w"], "shape": [-2]}}).encode(), 8),
        with_header(json.dumps({"w": {**GOOD["w"], "shape": [3]}}).encode(), 8),
        with_header(json.dumps({"w": {**GOOD["w"], "data_offsets": [4, 12]}}).encode(), 12),
        with_header(json.dumps(GOOD).encode(), 7),
        with_header(json.dumps(GOOD).encode(), 9),
    ],
)
def test_a_damaged_header_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError) as caught:
        read_safetensors_header(data, nbytes=len(data), where="here")
    assert caught.value.code == "segment-header"


def test_a_header_written_by_safetensors_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.int64)}, path)
    data = path.read_bytes()
    placed = read_safetensors_header(data, nbytes=len(data), where=str(path))
    assert {item.head for item in placed} == {ArrayHead("a", "float32", (2, 3)), ArrayHead("b", "int64", ())}
    assert sum(math.prod(item.head.shape) for item in placed) == 7
