"""Spoil valid documents: bytes turned, cut, doubled, spliced; protobuf fields set to hostile values."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

__all__ = ["spoil"]

# Around every width and sign that a length, a count or an offset might have.
_NUMBERS = [0, 1, 2, 3, 7, 15, 16, 17, 63, 64, 127, 128, 255, 4095, 4096, 2**16, 2**20, 2**20 + 1]
_NUMBERS += [8 << 20, (64 << 20) + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_TOKENS = [b"\xff" * 9 + b"\x01", b"\xff" * 8, b"\0" * 8, b"\x80" * 12, b"[" * 200, b'{"a":' * 50, b"1e999"]
_TOKENS += [b"\\ud800", b"-1", b"9" * 30, b"null", b"Infinity", b"NaN", b"true", b"..", b"/", b"\0"]
_TEXTS = [
    "",
    "..",
    "../../x",
    "/etc/passwd",
    "a" * 5000,
    "\0",
    "data/../x",
    "float32",
    "\u202e",
    "1e999999999",
]
_WIDTH = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (0, 2**31 - 1),
}


def spoil(seeds: Sequence[bytes], random: Random, kind: type[Message] | None) -> bytes:
    """Return a spoiled one of ``seeds``; where ``kind`` is given, sometimes by its fields."""
    data = random.choice(seeds)
    if kind is not None and random.random() < 0.6:
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return data
        for _ in range(random.randint(1, 4)):
            _spoil_message(message, random, 0)
        data = message.SerializeToString()
        if random.random() < 0.7:
            return data
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        data = _spoil_bytes(data, seeds, random)
    return data


def _spoil_bytes(data: bytes, seeds: Sequence[bytes], random: Random) -> bytes:
    at = random.randint(0, len(data))
    end = min(len(data), at + random.choice((1, 1, 2, 4, 8, 64)))
    match random.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes(random.getrandbits(8) for _ in range(end - at)) + data[end:]
        case 2:
            return data[:at] + random.choice(_TOKENS) + data[end:]
        case 3:
            return data[:at] + data[end:]
        case 4:
            return data[:end] + data[at:end] * random.choice((1, 3, 50)) + data[end:]
        case 5:
            other = random.choice(seeds)
            start = random.randint(0, len(other))
            return data[:at] + other[start : start + 64] + data[end:]
        case _:
            number = random.choice(_NUMBERS)
            return data[:at] + number.to_bytes(8, "little") + data[at + 8 :]


def _spoil_message(message: Message, random: Random, depth: int) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    set_ones = [field for field, _ in message.ListFields()]
    field = random.choice(set_ones if set_ones and random.random() < 0.7 else fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        message.ClearField(field.name)
        return
    if field.is_repeated:
        _spoil_list(getattr(message, field.name), field, random, depth)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth < 12:
            _spoil_message(inner, random, depth + 1)
    else:
        setattr(message, field.name, _scalar(field, random))


def _spoil_list(items: Any, field: FieldDescriptor, random: Random, depth: int) -> None:
    if items and random.random() < 0.3:
        del items[random.randrange(len(items))]
        return
    if field.message_type is not None:
        item = random.choice(items) if items and random.random() < 0.8 else items.add()
        if depth < 12:
            _spoil_message(item, random, depth + 1)
        return
    if items and random.random() < 0.7:
        items[random.randrange(len(items))] = _scalar(field, random)
    else:
        items.extend([_scalar(field, random)] * random.choice((1, 1, 3, 100)))


def _scalar(field: FieldDescriptor, random: Random) -> Any:
    if field.type in _WIDTH:
        low, high = _WIDTH[field.type]
        if field.enum_type is not None and random.random() < 0.7:
            return random.choice(field.enum_type.values).number
        number = random.choice(_NUMBERS) * random.choice((1, -1 if low < 0 else 1))
        return min(max(number, low), high)
    if field.type == FieldDescriptor.TYPE_STRING:
        return random.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(random.choice((0, 1, 15, 16, 17, 32, 5000)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    return random.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
