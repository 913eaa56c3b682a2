"""Messages inside raw streams, which no generated stub parses for us."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ckpt.errors import CorruptError, InvalidInputError

__all__ = ["parse_reply", "parse_request"]

M = TypeVar("M", bound=Message)


def parse_request(message: M, data: bytes) -> M:
    """Parse what a client sent into ``message`` and return it. Raises InvalidInputError."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidInputError(f"the request is not a {message.DESCRIPTOR.name}", code="request") from error
    return message


def parse_reply(message: M, data: bytes) -> M:
    """Parse what a server sent into ``message`` and return it. Raises CorruptError."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise CorruptError(f"the reply is not a {message.DESCRIPTOR.name}", code="decode") from error
    return message
