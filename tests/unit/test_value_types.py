"""Plain values of every type and of registered types; hostile messages; refusals with their path."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import random
import struct
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError, CorruptError, InvalidInputError
from ckpt.format import value_types
from ckpt.format.values import MAX_DEPTH, decode_value, encode_value, register_value_type
from ckpt_proto.v1 import common_pb2, disk_pb2
from tests.support.snapshot_trip import put_back, take, train_state


def _plain_trip(value: Any) -> Any:
    live: dict[str, Any] = {}
    put_back(take(train_state(extra={"value": value})), train_state(extra=live))
    return live["value"]


def _is_same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if type(left) is float:
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict):
        return _is_same(list(left), list(right)) and _is_same(list(left.values()), list(right.values()))
    return bool(left == right)


UTC_2 = datetime.timezone(datetime.timedelta(hours=2))
PLAIN: list[Any] = [
    None,
    b"\x00\xff",
    "",
    "\0 \u2028 \U0001f600",
    2**4000,
    -(2**4000),
    -0.0,
    struct.unpack("<d", struct.pack("<Q", 0x7FF4DEADBEEF0001))[0],
    float("inf"),
    (1, [2, (3,)], []),
    {1: "int", "1": "str", False: 0, (1, "a"): 2, None: 3, b"k": 4, 2.5: 5},
    {1, "a", (2, None)},
    frozenset({1, 2, 2**70}),
    {frozenset({1}): {2}},
    deque([1, "x"], maxlen=5),
    deque(),
    pathlib.Path("/data") / "x",
    pathlib.PureWindowsPath("C:/x"),
    datetime.timedelta(days=-3, microseconds=1),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 23, 59, 59, 999999, fold=1),  # noqa: DTZ001
    datetime.datetime(2024, 2, 29, tzinfo=UTC_2),
    datetime.time(1, 2, 3, tzinfo=datetime.UTC),
    complex(-0.0, float("inf")),
    range(3, -7, -2),
    slice(None, 3),
    decimal.Decimal("-0.10"),
    fractions.Fraction(-1, 3),
    uuid.UUID(int=7),
    types.SimpleNamespace(a=1, b=[2]),
    argparse.Namespace(lr=0.1, tags=("a",)),
    np.float32(1.5),
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.bool_(True),
    np.zeros((0, 3)),
    Counter({3: 4}),
    torch.bfloat16,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}")
def test_I86_plain_value_comes_back_with_type_and_bits(value: Any) -> None:
    assert _is_same(_plain_trip([value, {"k": value}])[1]["k"], value)


def test_deque_keeps_its_bound_and_time_its_fold() -> None:
    assert _plain_trip(deque([1], maxlen=7)).maxlen == 7
    assert _plain_trip(datetime.datetime(2024, 1, 1, fold=1)).fold == 1  # noqa: DTZ001


def test_equal_sets_have_equal_bytes_whatever_their_history() -> None:
    names = [f"name-{n}" for n in range(50)]
    forward, backward = set(names), set()
    backward.update(reversed(names))
    assert encode_value(forward) == encode_value(backward)
    assert encode_value({3, 1, 2**40}) == encode_value({2**40, 3, 1})


def test_tensor_inside_a_registered_container_is_a_tensor_again() -> None:
    back = _plain_trip(deque([torch.ones(2), types.SimpleNamespace(t=torch.zeros(3))]))
    assert back[0].tolist() == [1, 1]
    assert back[1].t.tolist() == [0, 0, 0]


class _Phase(enum.Enum):
    WARMUP = 1
    MAIN = "m"


class _Flags(enum.Flag):
    A = 1
    B = 2


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class _Progress:
    tokens: int
    phase: _Phase
    seen: set[int] = dataclasses.field(default_factory=set)
    derived: int = dataclasses.field(init=False, default=0)


@pytest.fixture
def _registered() -> Iterator[None]:
    kept = dict(value_types._by_type), dict(value_types._by_name)
    for cls in (_Phase, _Flags, Pair, _Progress):
        register_value_type(cls)
    yield
    for table, before in zip((value_types._by_type, value_types._by_name), kept, strict=True):
        table.clear()  # type: ignore[attr-defined]
        table.update(before)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_registered")
def test_registered_enums_dataclasses_and_namedtuples_come_back_as_they_were() -> None:
    """Case I79."""
    made = _Progress(10, _Phase.MAIN, {1, 2})
    object.__setattr__(made, "derived", 5)
    for value in (made, _Phase.WARMUP, _Flags.A | _Flags.B, Pair(1, [2]), {_Phase.MAIN: Pair(None, ())}):
        assert _is_same(_plain_trip(value), value)
    assert _plain_trip(made).derived == 5


def test_type_that_the_reader_has_not_registered_is_named() -> None:
    stored = encode_value({1, 2})
    stored.registered.name = "their_module.Config"
    with pytest.raises(InvalidInputError) as caught:
        decode_value(stored)
    assert caught.value.code == "value-unregistered"
    assert caught.value.context["name"] == "their_module.Config"


@pytest.mark.usefixtures("_registered")
def test_member_or_field_that_is_gone_is_said_with_the_type() -> None:
    gone = encode_value(_Phase.MAIN)
    gone.registered.value.text = "COOLDOWN"
    with pytest.raises(CorruptError) as caught:
        decode_value(gone)
    assert "_Phase" in str(caught.value)


def test_registration_is_checked() -> None:
    for arguments in ((int, "number", str, int), (set, "mine", list, set), (object,), (_Phase, "set")):
        with pytest.raises(InvalidInputError) as caught:
            register_value_type(*arguments)
        assert caught.value.code == "value-register"
    with pytest.raises(InvalidInputError):
        register_value_type(_Phase, "x", encode=str)


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise AssertionError("was asked to pickle itself")


@pytest.mark.parametrize(
    "value",
    [
        _Unpicklable(),
        _Unpicklable,
        functools.partial(int, "1"),
        lambda: 0,
        defaultdict(list),
        _Phase.MAIN,
        Pair(1, 2),
        memoryview(b"x"),
        np.array([{}], dtype=object),
        np.datetime64(0, "s"),
        random.Random(0),
        torch.Generator(),
        datetime.datetime(2024, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {})()),
        iter([]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_I79_leaf_that_is_not_known_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(extra={"a": [0, {"b": value}]}))
    assert "['a'][1]['b']" in caught.value.context["path"]  # type: ignore[operator]


def test_ordered_dict_is_widened_to_a_dict() -> None:
    assert _plain_trip(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


def test_deep_nesting_of_registered_types_still_parses() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH // 3):
        value = deque([value])
    index = disk_pb2.SegmentIndex(state=encode_value(value))
    assert decode_value(disk_pb2.SegmentIndex.FromString(index.SerializeToString()).state) == value
    with pytest.raises(InvalidInputError) as caught:
        encode_value(deque([value]))
    assert caught.value.code == "value-depth"


# --- hostile input ---

_NAMES = st.sampled_from([*value_types.BUILT_IN_NAMES, "os.system", "builtins.eval", ""])


def _messages(inner: st.SearchStrategy[common_pb2.Value]) -> st.SearchStrategy[common_pb2.Value]:
    def sequence(kind: str) -> Callable[..., common_pb2.Value]:
        def build(items: list[common_pb2.Value], integers: list[int]) -> common_pb2.Value:
            return common_pb2.Value(**{kind: common_pb2.Value.Sequence(items=items, integers=integers)})

        return build

    many = st.lists(inner, max_size=3)
    integers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)
    return (
        st.builds(sequence("list"), many, integers)
        | st.builds(sequence("tuple"), many, integers)
        | st.builds(
            lambda keys, values, kind: common_pb2.Value(
                mapping=common_pb2.Value.Mapping(keys=keys, values=values, type=kind)
            ),
            many,
            many,
            st.integers(0, 3),
        )
        | st.builds(
            lambda name, value: common_pb2.Value(
                registered=common_pb2.Value.Registered(name=name, value=value)
            ),
            _NAMES,
            inner,
        )
    )


_LEAVES = st.one_of(
    st.just(common_pb2.Value()),
    st.builds(lambda v: common_pb2.Value(integer=v), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: common_pb2.Value(big_integer=v), st.binary(max_size=40)),
    st.builds(lambda v: common_pb2.Value(real_bits=v), st.integers(0, 2**64 - 1)),
    st.builds(lambda v: common_pb2.Value(text=v), st.text(max_size=20)),
    st.builds(lambda v: common_pb2.Value(data=v), st.binary(max_size=20)),
    st.builds(lambda v: common_pb2.Value(tensor=v), st.text(max_size=5)),
    st.builds(
        lambda dtype, shape, data, scalar: common_pb2.Value(
            array=common_pb2.Value.Array(dtype=dtype, shape=shape, data=data, is_scalar=scalar)
        ),
        st.sampled_from(["<f8", "|b1", "|O", "<U4", "V8", "<i4", "|i4", "<M8[s]", "f4,f4", ""]),
        st.lists(st.sampled_from([0, 1, 2, 8, 2**63, 2**64 - 1]), max_size=70),
        st.binary(max_size=16),
        st.booleans(),
    ),
)


@given(st.recursive(_LEAVES, _messages, max_leaves=12))
def test_I86_hostile_messages_decode_or_are_ckpt_errors(message: common_pb2.Value) -> None:
    with contextlib.suppress(CkptError):
        decode_value(message, leaf=lambda name: name)


@given(st.binary(max_size=200))
def test_I86_random_bytes_decode_or_are_ckpt_errors(data: bytes) -> None:
    message = common_pb2.Value()
    try:
        message.ParseFromString(data)
    except Exception:
        return  # not even a message; the envelope's reader says so
    with contextlib.suppress(CkptError):
        decode_value(message, leaf=lambda name: name)
