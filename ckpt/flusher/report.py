"""Errors as they travel to the trainer."""

from __future__ import annotations

from ckpt.errors import CkptError
from ckpt.format.problem import error_to_info
from ckpt_proto.v1 import common_pb2

__all__ = ["error_info"]


def error_info(error: BaseException) -> common_pb2.ErrorInfo:
    """Return ``error`` as a message that fits a packet; a foreign exception becomes an internal CkptError."""
    if not isinstance(error, CkptError):
        error = CkptError("unexpected error in the flusher; see flusher.log", error=repr(error))
    return error_to_info(error)
