"""Types beside the plain ones that values may hold: each known by a name on both sides.

Only the name and plain values are stored. To decode is to call the function that *this* process has
registered under the name, so what is stored can never choose code to run; a name that nobody has registered
is an error. The entries below are safe whatever they are given.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import threading
import types
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ckpt.errors import InvalidInputError

__all__ = ["BUILT_IN_NAMES", "ValueType", "by_name", "by_type", "register_value_type"]

T = TypeVar("T")
Encode: TypeAlias = Callable[[Any], Any]
Decode: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ValueType:
    """One registered type.

    Attributes:
        cls: the exact type; subclasses need entries of their own.
        name: what is stored.
        encode: an object to plain values (or values of registered types).
        decode: the inverse.
        unordered: ``encode`` returns a list whose order means nothing; it is stored sorted, so that equal
            objects give equal bytes on every rank.
    """

    cls: type
    name: str
    encode: Encode
    decode: Decode
    unordered: bool = False


_lock = threading.Lock()  # for writers; readers see whole entries
_by_type: dict[type, ValueType] = {}
_by_name: dict[str, ValueType] = {}


def by_type(cls: type) -> ValueType | None:
    """The entry of exactly this type."""
    return _by_type.get(cls)


def by_name(name: str) -> ValueType | None:
    """The entry of this name."""
    return _by_name.get(name)


def register_value_type(
    cls: type[T],
    name: str | None = None,
    encode: Callable[[T], Any] | None = None,
    decode: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let values hold objects of exactly the type ``cls``. Also a class decorator.

    Register in the programs that save and in those that restore, before the first save or restore.

    Args:
        cls: an enum, a dataclass or a namedtuple needs no functions; other types need both.
        name: stored in the checkpoint; default ``module.qualname`` of ``cls``. Keep it when the class moves.
        encode: returns plain values for an object. Default: the name of an enum's member; the fields of a
            dataclass or namedtuple by name.
        decode: returns an object for what ``encode`` returned. Default: the class called with the fields; one
            that has no such field any more, or needs one that was not stored, is an error.

    Raises:
        InvalidInputError: code "value-register": the type is a plain one, or a function is missing, or the
            name belongs to another type.
    """
    if (encode is None) != (decode is None):
        raise InvalidInputError(
            "give both functions or neither", code="value-register", type=cls.__qualname__
        )
    if encode is None or decode is None:
        encode, decode = _defaults(cls)
    entry = ValueType(cls, name or f"{cls.__module__}.{cls.__qualname__}", encode, decode)
    if cls in _PLAIN or entry.name in BUILT_IN_NAMES or cls in _BUILT_IN_TYPES:
        raise InvalidInputError(
            "plain and built-in types cannot be registered", code="value-register", name=entry.name
        )
    _add(entry)
    return cls


def _add(entry: ValueType) -> None:
    with _lock:
        other = _by_name.get(entry.name)
        if other is not None and _identity(other.cls) != _identity(entry.cls):
            raise InvalidInputError(
                "the name belongs to another type",
                code="value-register",
                name=entry.name,
                type=entry.cls.__qualname__,
                other=other.cls.__qualname__,
            )
        _by_name[entry.name] = _by_type[entry.cls] = entry  # again: a module that was loaded anew


def _identity(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _defaults(cls: type) -> tuple[Encode, Decode]:
    if issubclass(cls, enum.Enum):
        return _enum_functions(cls)
    if dataclasses.is_dataclass(cls):
        return _dataclass_functions(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return lambda value: value._asdict(), lambda stored: cls(**stored)
    raise InvalidInputError(
        "only enums, dataclasses and namedtuples are registered without functions",
        code="value-register",
        type=cls.__qualname__,
    )


def _enum_functions(cls: type[enum.Enum]) -> tuple[Encode, Decode]:
    if issubclass(cls, enum.Flag):  # a union of members has no name
        return lambda value: value.value, cls
    return lambda value: value.name, lambda stored: cls[stored]


def _dataclass_functions(cls: type) -> tuple[Encode, Decode]:
    fields = dataclasses.fields(cls)
    later = [field.name for field in fields if not field.init]

    def encode(value: Any) -> dict[str, Any]:
        return {field.name: getattr(value, field.name) for field in fields}

    def decode(stored: Mapping[str, Any]) -> Any:
        made = cls(**{key: value for key, value in stored.items() if key not in later})
        for key in later:
            object.__setattr__(made, key, stored[key])  # also where it is frozen
        return made

    return encode, decode


def _encode_moment(value: Any) -> tuple[str, int]:
    zone = value.tzinfo
    if zone is not None and type(zone) is not datetime.timezone:  # its rules are not in the text
        raise ValueError("only fixed offsets from UTC can be stored; use astimezone(timezone.utc)")
    return value.isoformat(), value.fold


def _moment_decoder(cls: type) -> Decode:
    def decode(stored: Any) -> Any:
        text, fold = stored
        return cls.fromisoformat(text).replace(fold=fold)  # type: ignore[attr-defined]

    return decode


# What a decoder is given comes from the store. A constructor that takes more than it should would turn a few
# bytes into any amount of memory or time: set(range(2**62)), deque(*range(2**62)), Fraction("1e999999999").


def _of(make: Callable[..., T], *kinds: Any) -> Decode:
    """A decoder that calls ``make`` with the items of a tuple, which must be of these types."""

    def decode(stored: Any) -> T:
        if type(stored) is not tuple or len(stored) != len(kinds):
            raise TypeError("not a tuple of that length")
        if not all(isinstance(item, kind) for item, kind in zip(stored, kinds, strict=True)):
            raise TypeError("of other types")
        return make(*stored)

    return decode


def _from_list(make: Callable[[list[Any]], T]) -> Decode:
    def decode(stored: Any) -> T:
        if type(stored) is not list:
            raise TypeError("not a list")
        return make(stored)

    return decode


def _from_text(make: Callable[[str], T]) -> Decode:
    def decode(stored: Any) -> T:
        if type(stored) is not str:
            raise TypeError("not text")
        return make(stored)

    return decode


_PLAIN = (type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict)

_BUILT_IN = (
    ValueType(complex, "complex", lambda z: (z.real, z.imag), _of(complex, float, float)),
    ValueType(set, "set", list, _from_list(set), unordered=True),
    ValueType(frozenset, "frozenset", list, _from_list(frozenset), unordered=True),
    ValueType(deque, "deque", lambda d: (list(d), d.maxlen), _of(deque, list, int | None)),
    ValueType(range, "range", lambda r: (r.start, r.stop, r.step), _of(range, int, int, int)),
    ValueType(slice, "slice", lambda s: (s.start, s.stop, s.step), _of(slice, object, object, object)),
    ValueType(type(pathlib.Path()), "path", str, _from_text(pathlib.Path)),
    ValueType(pathlib.PurePosixPath, "posix_path", str, _from_text(pathlib.PurePosixPath)),
    ValueType(pathlib.PureWindowsPath, "windows_path", str, _from_text(pathlib.PureWindowsPath)),
    ValueType(
        datetime.timedelta,
        "timedelta",
        lambda d: (d.days, d.seconds, d.microseconds),
        _of(datetime.timedelta, int, int, int),
    ),
    ValueType(datetime.date, "date", lambda d: d.isoformat(), datetime.date.fromisoformat),
    ValueType(datetime.time, "time", _encode_moment, _moment_decoder(datetime.time)),
    ValueType(datetime.datetime, "datetime", _encode_moment, _moment_decoder(datetime.datetime)),
    ValueType(decimal.Decimal, "decimal", str, _from_text(decimal.Decimal)),
    ValueType(
        fractions.Fraction,
        "fraction",
        lambda f: (f.numerator, f.denominator),
        _of(fractions.Fraction, int, int),
    ),
    ValueType(uuid.UUID, "uuid", lambda u: u.bytes, lambda stored: uuid.UUID(bytes=stored)),
    ValueType(
        types.SimpleNamespace,
        "namespace",
        lambda n: dict(vars(n)),
        lambda stored: types.SimpleNamespace(**stored),
    ),
    ValueType(
        argparse.Namespace,
        "argparse_namespace",
        lambda n: dict(vars(n)),
        lambda stored: argparse.Namespace(**stored),
    ),
)
BUILT_IN_NAMES = tuple(sorted(entry.name for entry in _BUILT_IN))
_BUILT_IN_TYPES = frozenset(entry.cls for entry in _BUILT_IN)
for _entry in _BUILT_IN:
    _add(_entry)
