"""Plain (non-tensor) values to and from protobuf: bit-exact, without pickle.

What goes in comes out with the same type and the same bits: None, bool, int of any size, float (NaN
payloads and -0.0 included), str, bytes, list, tuple, dict (insertion order), Counter, NumPy arrays and
NumPy scalars of kind b, i, u, f, c, and objects of registered types (:mod:`ckpt.format.value_types`: sets,
deques, paths, dates and others are, enums and dataclasses of a program can be). Two types are widened,
because nothing depends on the difference: bytearray comes back as bytes, OrderedDict as dict. Anything else
is refused by name rather than stored as something that only looks like it (an IntEnum is not an int, a
namedtuple is not a tuple).
"""

from __future__ import annotations

import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np

from ckpt.errors import CkptError, CorruptError, InvalidInputError
from ckpt.format.limits import MAX_NDIM, bounded_product
from ckpt.format.value_types import by_name, by_type, register_value_type
from ckpt_proto.v1 import common_pb2

__all__ = ["MAX_DEPTH", "DecodeLeaf", "EncodeLeaf", "decode_value", "encode_value", "register_value_type"]

EncodeLeaf: TypeAlias = Callable[[str, object], "str | None"]
DecodeLeaf: TypeAlias = Callable[[str], object]

# protobuf refuses to parse more than 100 nested messages; each level of nesting here costs two or three,
# and the value itself lies inside other messages.
MAX_DEPTH = 30

_INT64 = range(-(2**63), 2**63)
_REAL = struct.Struct("<d")
_BITS = struct.Struct("<Q")
# Fixed widths only: longdouble has another size on another machine.
_ARRAY_DTYPE = re.compile(r"\|b1|[|<>]?[iu][1248]|[<>]f[248]|[<>]c(8|16)")
_Mapping = common_pb2.Value.Mapping


def encode_value(value: object, *, leaf: EncodeLeaf | None = None, path: str = "state") -> common_pb2.Value:
    """Return ``value`` as a message that :func:`decode_value` turns back into it.

    Args:
        value: nested plain values.
        leaf: asked for each object that is not a plain value, with its path; returns the name of the tensor
            leaf to store in its place, or None where it does not know the object. It is asked before NumPy
            arrays are stored inline, so it may claim large ones.
        path: what to call ``value`` in errors.

    Raises:
        InvalidInputError: code "value-type" names the path and type of what cannot be stored; code
            "value-depth": nested deeper than ``MAX_DEPTH`` (or an object that contains itself); code
            "value-text": a str that is not valid Unicode.
    """
    message = common_pb2.Value()
    _Encoder(leaf).encode(value, message, (None, path), 0)
    return message


def decode_value(message: common_pb2.Value, *, leaf: DecodeLeaf | None = None) -> Any:
    """Return the value that ``message`` holds.

    Args:
        message: what :func:`encode_value` returned.
        leaf: returns the object for the tensor leaf of a name.

    Raises:
        CorruptError: code "value": the message holds no value, or an array whose size is wrong, or what a
            registered type cannot decode.
        InvalidInputError: code "value-leaf": there is a tensor leaf and ``leaf`` was not given; code
            "value-unregistered": an object of a type that this process has not registered.
    """
    kind = message.WhichOneof("kind")
    decoder = _DECODERS.get(kind or "")
    if decoder is None:
        raise CorruptError("stored value is of no known kind", code="value", kind=kind)
    return decoder(message, leaf)


# (path of the container, index or key), the outermost (None, name): spelled out only where it is needed.
_Path: TypeAlias = tuple[Any, object]


class _Encoder:
    def __init__(self, leaf: EncodeLeaf | None) -> None:
        self._leaf = leaf

    def encode(self, value: object, out: common_pb2.Value, path: _Path, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise InvalidInputError(
                "value is nested too deeply, or contains itself",
                code="value-depth",
                path=_shorten(_spell(path)),
                deepest=MAX_DEPTH,
            )
        # Exact types: a subclass would come back as its base.
        kind = type(value)
        if kind in _SCALARS:
            _SCALARS[kind](value, out, path)
        elif kind in (list, tuple):
            self._sequence(value, out, path, depth)
        elif kind in (dict, OrderedDict, Counter):
            self._mapping(value, out, path, depth)
        else:
            self._foreign(value, out, path, depth)

    def _sequence(self, value: Any, out: common_pb2.Value, path: _Path, depth: int) -> None:
        sequence = out.list if type(value) is list else out.tuple
        sequence.SetInParent()  # an empty one is still there
        if set(map(type, value)) == {int}:
            # Samplers keep millions of indices, and the training thread waits for us: 60 times as fast.
            try:
                sequence.integers.extend(value)
                return
            except ValueError:  # one does not fit in 64 bits
                del sequence.integers[:]
        for i, item in enumerate(value):
            self.encode(item, sequence.items.add(), (path, i), depth + 1)

    def _mapping(self, value: Any, out: common_pb2.Value, path: _Path, depth: int) -> None:
        mapping = out.mapping
        mapping.SetInParent()
        if type(value) is Counter:
            mapping.type = _Mapping.TYPE_COUNTER
        for key, item in value.items():
            inner = (path, key)
            _check_key(key, inner)
            self.encode(key, mapping.keys.add(), inner, depth + 1)
            self.encode(item, mapping.values.add(), inner, depth + 1)

    def _foreign(self, value: object, out: common_pb2.Value, path: _Path, depth: int) -> None:
        name = self._leaf(_spell(path), value) if self._leaf is not None else None
        if name is not None:
            out.tensor = name
        elif type(value) is np.ndarray or isinstance(value, np.generic):
            _encode_array(value, out, path)
        else:
            self._registered(value, out, path, depth)

    def _registered(self, value: object, out: common_pb2.Value, path: _Path, depth: int) -> None:
        entry = by_type(type(value))
        if entry is None:
            _refuse(value, path)
        try:
            plain = entry.encode(value)
        except CkptError:
            raise
        except Exception as error:
            raise InvalidInputError(
                "value cannot be encoded by its registered type",
                code="value-type",
                path=_shorten(_spell(path)),
                type=entry.name,
                cause=str(error),
            ) from error
        out.registered.name = entry.name
        inner = out.registered.value
        self.encode(plain, inner, path, depth + 1)
        if entry.unordered:
            _sort(inner.list)


def _spell(path: _Path) -> str:
    """Return a path as people write it: ``state.extra['x'][3]``."""
    steps: list[str] = []
    here: Any = path
    while here[0] is not None:
        steps.append(f"[{here[1]!r}]")
        here = here[0]
    return str(here[1]) + "".join(reversed(steps))


def _refuse(value: object, path: _Path) -> NoReturn:
    kind = type(value)
    raise InvalidInputError(
        "state holds a value that cannot be stored without pickle; convert it to plain values, lists, dicts, "
        "NumPy arrays or tensors",
        code="value-type",
        path=_shorten(_spell(path)),
        type=f"{kind.__module__}.{kind.__qualname__}",
    )


def _sort(sequence: common_pb2.Value.Sequence) -> None:
    if sequence.integers:
        sequence.integers.sort()
    else:
        sequence.items.sort(key=lambda item: item.SerializeToString(deterministic=True))


def _shorten(path: str) -> str:
    return path if len(path) <= 400 else f"{path[:200]} ... {path[-190:]}"


def _check_key(key: object, path: _Path) -> None:
    parts = [key]
    while parts:
        part = parts.pop()
        if type(part) is tuple:
            parts.extend(part)
        elif not (isinstance(part, np.generic) or type(part) in _SCALARS or by_type(type(part))):
            _refuse(part, path)


def _encode_nothing(_: Any, out: common_pb2.Value, __: _Path) -> None:
    out.nothing.SetInParent()


def _encode_bool(value: Any, out: common_pb2.Value, _: _Path) -> None:
    out.boolean = value


def _encode_int(value: Any, out: common_pb2.Value, _: _Path) -> None:
    if value in _INT64:
        out.integer = value
    else:
        magnitude = value if value >= 0 else ~value
        out.big_integer = value.to_bytes(magnitude.bit_length() // 8 + 1, "little", signed=True)


def _encode_float(value: Any, out: common_pb2.Value, _: _Path) -> None:
    (out.real_bits,) = _BITS.unpack(_REAL.pack(value))


def _encode_str(value: Any, out: common_pb2.Value, path: _Path) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "text is not valid Unicode; store it as bytes", code="value-text", path=_shorten(_spell(path))
        ) from error
    out.text = value


def _encode_bytes(value: Any, out: common_pb2.Value, _: _Path) -> None:
    out.data = bytes(value)


_SCALARS: dict[type, Callable[[Any, common_pb2.Value, _Path], None]] = {
    type(None): _encode_nothing,
    bool: _encode_bool,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
}


def _encode_array(value: Any, out: common_pb2.Value, path: _Path) -> None:
    if _ARRAY_DTYPE.fullmatch(value.dtype.str) is None:
        raise InvalidInputError(
            "NumPy dtype cannot be stored; use booleans, integers, floats or complex of fixed width",
            code="value-type",
            path=_shorten(_spell(path)),
            type=f"{type(value).__name__} of {value.dtype}",
        )
    array = out.array
    array.dtype = value.dtype.str
    array.shape.extend(value.shape)
    array.data = value.tobytes(order="C") if isinstance(value, np.ndarray) else value.tobytes()
    array.is_scalar = not isinstance(value, np.ndarray)


def _decode_float(message: common_pb2.Value, _: DecodeLeaf | None) -> float:
    value: float = _REAL.unpack(_BITS.pack(message.real_bits))[0]
    return value


def _decode_list(message: common_pb2.Value, leaf: DecodeLeaf | None) -> list[Any]:
    stored = message.list
    return list(stored.integers) or [decode_value(item, leaf=leaf) for item in stored.items]


def _decode_tuple(message: common_pb2.Value, leaf: DecodeLeaf | None) -> tuple[Any, ...]:
    stored = message.tuple
    return tuple(stored.integers) or tuple(decode_value(item, leaf=leaf) for item in stored.items)


def _decode_mapping(message: common_pb2.Value, leaf: DecodeLeaf | None) -> dict[Any, Any]:
    mapping = message.mapping
    if mapping.type not in _Mapping.Type.values():
        raise CorruptError("stored mapping is of no known type", code="value", type=mapping.type)
    if len(mapping.keys) != len(mapping.values):
        raise CorruptError("stored mapping has not as many values as keys", code="value")
    result: dict[Any, Any] = Counter() if mapping.type == _Mapping.TYPE_COUNTER else {}
    for key, item in zip(mapping.keys, mapping.values, strict=True):
        decoded = decode_value(key, leaf=leaf)
        try:
            result[decoded] = decode_value(item, leaf=leaf)
        except TypeError as error:
            raise CorruptError("stored mapping has an unhashable key", code="value") from error
    return result


def _decode_tensor(message: common_pb2.Value, leaf: DecodeLeaf | None) -> object:
    if leaf is None:
        raise InvalidInputError(
            "value contains a tensor, and no way to look tensors up was given",
            code="value-leaf",
            tensor=message.tensor,
        )
    return leaf(message.tensor)


def _decode_array(message: common_pb2.Value, _: DecodeLeaf | None) -> Any:
    stored = message.array
    shape = tuple(stored.shape)
    if _ARRAY_DTYPE.fullmatch(stored.dtype) is None:  # never hand np.dtype() an object or structured type
        raise CorruptError("stored array has an unknown dtype", code="value", dtype=stored.dtype)
    dtype = np.dtype(stored.dtype)
    count = bounded_product(shape) if len(shape) <= MAX_NDIM else None
    if count is None or count * dtype.itemsize != len(stored.data) or (stored.is_scalar and shape):
        raise CorruptError(
            "stored array has the wrong size", code="value", shape=shape, nbytes=len(stored.data)
        )
    try:
        array = np.frombuffer(stored.data, dtype).reshape(shape).copy()  # a copy: it can be written to
    except (ValueError, OverflowError) as error:  # more dimensions than NumPy has, or larger ones
        raise CorruptError("stored array has an impossible shape", code="value", shape=shape) from error
    return array[()] if stored.is_scalar else array


def _decode_registered(message: common_pb2.Value, leaf: DecodeLeaf | None) -> Any:
    stored = message.registered
    entry = by_name(stored.name)
    if entry is None:
        raise InvalidInputError(
            "the checkpoint holds an object of a type that is not registered here; import the module that "
            "registers it, or call register_value_type, before the restore",
            code="value-unregistered",
            name=stored.name,
        )
    plain = decode_value(stored.value, leaf=leaf)
    try:
        return entry.decode(plain)
    except CkptError:
        raise
    except Exception as error:
        raise CorruptError(
            "stored object cannot be decoded by its registered type",
            code="value",
            name=stored.name,
            cause=repr(error),
        ) from error


_DECODERS: dict[str, Callable[[common_pb2.Value, DecodeLeaf | None], Any]] = {
    "nothing": lambda _, __: None,
    "boolean": lambda message, _: message.boolean,
    "integer": lambda message, _: message.integer,
    "big_integer": lambda message, _: int.from_bytes(message.big_integer, "little", signed=True),
    "real_bits": _decode_float,
    "text": lambda message, _: message.text,
    "data": lambda message, _: message.data,
    "list": _decode_list,
    "tuple": _decode_tuple,
    "mapping": _decode_mapping,
    "tensor": _decode_tensor,
    "array": _decode_array,
    "registered": _decode_registered,
}
