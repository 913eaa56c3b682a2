"""The difference of the plain values of two checkpoints, by path. Bits count: NaN equals the same NaN.

Compared as stored, so no type need be registered here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt.format.values import decode_value
from ckpt.ops.arrays import read_indexes
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.compare import Tolerance
from ckpt_proto.v1 import common_pb2

__all__ = ["ValueDiff", "ValueDiffs", "diff_values"]

_SHOWN = 60  # characters of a value
_PLAIN_KINDS = ("nothing", "boolean", "integer", "big_integer", "real_bits", "text", "data")


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A value that differs, or is on one side only (None: not there).

    Attributes:
        path: such as "lr_scheduler.state.last_epoch".
        a, b: for people; cut where long.
        is_tolerated: two numbers within the tolerance.
    """

    path: str
    a: str | None
    b: str | None
    is_tolerated: bool = False


@dataclass(frozen=True, slots=True)
class ValueDiffs:
    """Values that differ, and how many were compared."""

    found: list[ValueDiff]
    compared: int


@dataclass(frozen=True, slots=True)
class _Leaf:
    message: common_pb2.Value
    key: bytes  # equal for equal values
    text: str


def diff_values(
    a: Checkpoint,
    b: Checkpoint,
    *,
    match: Callable[[str], bool] = lambda _: True,
    tolerance: Tolerance | None = None,
) -> ValueDiffs:
    """Compare the plain state of all ranks, and of each rank alone where both have as many ranks.

    Args:
        a, b: the checkpoints.
        match: by path.
        tolerance: for floating-point numbers, but not for arrays of them.

    Raises:
        CorruptError: metadata is damaged.
    """
    left, right = _leaves(a), _leaves(b)
    if a.manifest.world_size == b.manifest.world_size:
        for side in (a, b):
            read_indexes(side, range(side.manifest.world_size))
        for rank in range(a.manifest.world_size):
            left |= _flat(a.segment_index(rank).rank_state, f"rank {rank}: ")
            right |= _flat(b.segment_index(rank).rank_state, f"rank {rank}: ")
    found = []
    paths = [path for path in dict.fromkeys([*left, *right]) if match(path)]
    for path in paths:
        mine, theirs = left.get(path), right.get(path)
        if mine is not None and theirs is not None and mine.key == theirs.key:
            continue
        tolerated = mine is not None and theirs is not None and _is_near(mine, theirs, tolerance)
        found.append(ValueDiff(path, _text_of(mine), _text_of(theirs), tolerated))
    return ValueDiffs(found, len(paths))


def _text_of(leaf: _Leaf | None) -> str | None:
    return None if leaf is None else leaf.text


def _leaves(checkpoint: Checkpoint) -> dict[str, _Leaf]:
    """The values of all ranks that have a part; what later ones say differently keeps their rank."""
    result: dict[str, _Leaf] = {}
    for rank in checkpoint.manifest.state_ranks or [0]:
        for path, leaf in _flat(checkpoint.segment_index(rank).state, "").items():
            known = result.setdefault(path, leaf)
            if known.key != leaf.key:
                result[f"{path} (rank {rank})"] = leaf
    return result


def _flat(value: common_pb2.Value, prefix: str) -> dict[str, _Leaf]:
    return {prefix + path.removeprefix("items."): leaf for path, leaf in _walk(value, "")}


def _walk(value: common_pb2.Value, path: str) -> Iterator[tuple[str, _Leaf]]:
    kind = value.WhichOneof("kind") or "unknown"
    if kind in ("list", "tuple"):
        sequence = value.list if kind == "list" else value.tuple
        if sequence.integers:
            yield path, _Leaf(value, value.SerializeToString(deterministic=True), _short(sequence.integers))
            return
        yield path, _container(value, kind)
        for number, item in enumerate(sequence.items):
            yield from _walk(item, f"{path}.{number}" if path else str(number))
    elif kind == "mapping":
        yield path, _container(value, f"mapping {value.mapping.type}")
        for key, item in zip(value.mapping.keys, value.mapping.values, strict=False):
            name = _key_text(key)
            yield from _walk(item, f"{path}.{name}" if path else name)
    elif kind == "registered":
        yield path, _container(value, value.registered.name)
        yield from _walk(value.registered.value, f"{path}.value" if path else "value")
    else:
        yield path, _Leaf(value, value.SerializeToString(deterministic=True), _text(value, kind))


def _container(value: common_pb2.Value, kind: str) -> _Leaf:
    return _Leaf(value, f"container {kind}".encode(), kind.removesuffix(" 0"))


def _key_text(key: common_pb2.Value) -> str:
    if key.WhichOneof("kind") == "text" and "." not in key.text and key.text:
        return key.text
    kind = key.WhichOneof("kind") or "unknown"
    return f"[{_text(key, kind)}]" if kind in _PLAIN_KINDS else f"[{key.SerializeToString().hex()}]"


def _text(value: common_pb2.Value, kind: str) -> str:
    if kind in _PLAIN_KINDS:
        return _short(decode_value(value))
    if kind == "tensor":
        return f"tensor {value.tensor}"
    if kind == "array":
        shape = list(value.array.shape)
        return f"array {value.array.dtype}{shape}"
    return kind


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _is_near(a: _Leaf, b: _Leaf, tolerance: Tolerance | None) -> bool:
    kinds = {leaf.message.WhichOneof("kind") for leaf in (a, b)}
    if tolerance is None or kinds != {"real_bits"}:
        return False
    left, right = (struct.unpack("<d", struct.pack("<Q", leaf.message.real_bits))[0] for leaf in (a, b))
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return math.isfinite(left) and math.isfinite(right) and tolerance.holds(abs(left - right), right)
