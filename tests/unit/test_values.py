"""Plain values: same type, same bits, or a refusal that names the place."""

from __future__ import annotations

import enum
import random
import struct
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format.values import MAX_DEPTH, decode_value, encode_value
from ckpt_proto.v1 import common_pb2, disk_pb2


def round_trip(value: object) -> Any:
    stored = encode_value(value).SerializeToString(deterministic=True)
    return decode_value(common_pb2.Value.FromString(stored))


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and not isinstance(left, np.generic):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, (np.ndarray, np.generic)):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return bool(left == right)


floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
keys = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.text(), st.integers())
)
arrays = st.tuples(
    st.sampled_from(["?", "i1", "<u2", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8", "<c16"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.randoms(use_true_random=False),
).map(
    lambda t: (
        np.frombuffer(t[2].randbytes(int(np.prod(t[1], dtype=int)) * np.dtype(t[0]).itemsize), "u1")
        .view(t[0])
        .reshape(t[1])
        if t[0] != "?"
        else np.ones(t[1], "?")
    )
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | floats
    | st.text()
    | st.binary()
    | arrays
    | floats.map(np.float64)
    | st.integers(-(2**31), 2**31 - 1).map(np.int32)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_every_plain_value_comes_back_with_its_type_and_bits(value: object) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "n", [0, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 255, 256, -(2**127), 2**127]
)
def test_integers_around_the_borders_of_their_forms(n: int) -> None:
    assert round_trip(n) == n


@pytest.mark.parametrize(
    "ints", [[1, -2, 2**63 - 1, -(2**63)], [1, 2**63], [1, True], [0, 1.0], [True, False], []]
)
def test_lists_of_integers_keep_every_type_beside_their_short_form(ints: list[Any]) -> None:
    assert same(round_trip(ints), ints)
    assert same(round_trip(tuple(ints)), tuple(ints))
    assert same(round_trip([ints, ints]), [ints, ints])


def test_long_index_lists_are_stored_packed() -> None:
    stored = encode_value(list(range(100_000)))
    assert stored.ByteSize() < 300_000
    assert not stored.list.items


def test_generator_states_come_back_equal() -> None:
    state = random.Random(3).getstate()
    assert same(round_trip(state), state)
    numpy_state = np.random.default_rng(3).bit_generator.state
    assert same(round_trip(numpy_state), numpy_state)
    legacy = np.random.RandomState(3).get_state()
    assert same(round_trip(legacy), legacy)


def test_counter_stays_a_counter_and_ordered_dict_becomes_a_dict() -> None:
    assert same(round_trip(Counter({30: 1, 80: 2})), Counter({30: 1, 80: 2}))
    assert same(round_trip(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})
    assert same(round_trip(bytearray(b"xy")), b"xy")


def test_strided_and_big_endian_arrays_keep_their_elements_and_can_be_written() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    back = round_trip(array)
    assert same(back, array.copy(order="C"))
    back[0, 0] = 7
    assert same(round_trip(np.array(2.5)), np.array(2.5))


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "alien",
    [
        Colour.RED,
        Pair(1, 2),
        object(),
        object,
        print,
        np.array(["a"]),
        np.array([object()], dtype=object),
        np.longdouble(1),
        np.datetime64(0, "s"),
        np.ma.masked_array([1]),
        memoryview(b"x"),
    ],
    ids=lambda alien: type(alien).__name__,
)
def test_what_would_come_back_changed_is_refused_with_its_place(alien: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        encode_value({"x": [0, 1, 2, alien]}, path="state.extra")
    assert caught.value.code == "value-type"
    assert caught.value.context["path"] == "state.extra['x'][3]"
    assert type(alien).__name__ in str(caught.value.context["type"])


def test_a_key_that_cannot_be_stored_is_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        encode_value({(1, object()): 1})
    assert caught.value.code == "value-type"
    assert "object" in str(caught.value)


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        encode_value(["\ud800"])
    assert caught.value.code == "value-text"


def test_the_deepest_nesting_still_parses_inside_a_segment_index_and_deeper_is_refused() -> None:
    value: Any = "x"
    for i in range(MAX_DEPTH):
        value = {i: value} if i % 2 else [value]
    index = disk_pb2.SegmentIndex(state=encode_value(value))
    assert decode_value(disk_pb2.SegmentIndex.FromString(index.SerializeToString()).state) == value
    with pytest.raises(InvalidInputError) as caught:
        encode_value([value])
    assert caught.value.code == "value-depth"
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInputError):
        encode_value(loop)


def test_leaves_are_delegated_by_path_and_name() -> None:
    tensor = object()
    seen: list[str] = []

    def claim(path: str, value: object) -> str | None:
        seen.append(path)
        return "optimizer.exp_avg" if value is tensor else None

    stored = encode_value({"exp": [tensor], "n": np.float32(2)}, leaf=claim, path="opt")
    assert seen == ["opt['exp'][0]", "opt['n']"]
    assert decode_value(stored, leaf={"optimizer.exp_avg": tensor}.__getitem__)["exp"] == [tensor]
    with pytest.raises(InvalidInputError) as caught:
        decode_value(stored)
    assert caught.value.code == "value-leaf"


def test_damaged_messages_are_corrupt_not_a_crash() -> None:
    wrong_size = encode_value(np.arange(3))
    wrong_size.array.shape[0] = 4
    objects = encode_value(np.arange(3))
    objects.array.dtype = "|O8"
    unhashable = encode_value({"a": 1})
    unhashable.mapping.keys[0].CopyFrom(encode_value([1]))
    uneven = encode_value({"a": 1})
    del uneven.mapping.values[:]
    for message in (common_pb2.Value(), wrong_size, objects, unhashable, uneven):
        with pytest.raises(CorruptError) as caught:
            decode_value(message)
        assert caught.value.code == "value"
