"""Errors as they travel to the trainer."""

from __future__ import annotations

from ckpt.errors import CkptError
from ckpt_proto.v1 import common_pb2

__all__ = ["error_info"]

_TEXT_MAX = 2000  # characters; an event has to fit a packet


def error_info(error: BaseException) -> common_pb2.ErrorInfo:
    """Return ``error`` as a message; a foreign exception becomes an internal CkptError."""
    if not isinstance(error, CkptError):
        error = CkptError("unexpected error in the flusher; see flusher.log", error=repr(error))
    return common_pb2.ErrorInfo(
        kind=type(error).__name__,
        code=error.code,
        message=error.message,
        context={key: str(value)[:_TEXT_MAX] for key, value in error.context.items()},
    )
