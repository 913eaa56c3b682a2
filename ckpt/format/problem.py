"""Errors as messages: CkptError <-> ErrorInfo, for every border of a process. No gRPC here."""

from __future__ import annotations

from ckpt.errors import CkptError, from_kind
from ckpt_proto.v1 import common_pb2

__all__ = ["MESSAGE_CHARS", "cut", "error_from_info", "error_to_info"]

# Bytes of ErrorInfo that always fit: gRPC's soft limit for all metadata of a call is 8 KiB, and
# binary values grow by a third where a proxy speaks base64.
MESSAGE_CHARS = 1024
_VALUE_CHARS = 512
_CONTEXT_ITEMS = 12
_INFO_NBYTES = 4096


def error_to_info(error: CkptError) -> common_pb2.ErrorInfo:
    """Return ``error`` as a message of at most 4 KiB; longer texts and contexts are cut."""
    info = common_pb2.ErrorInfo(
        kind=type(error).__name__, code=error.code[:64], message=cut(error.message, MESSAGE_CHARS)
    )
    for key, value in list(error.context.items())[:_CONTEXT_ITEMS]:
        text = cut(str(value), _VALUE_CHARS)
        if info.ByteSize() + len(key) + len(text.encode()) > _INFO_NBYTES - 64:
            break
        info.context[key] = text
    return info


def error_from_info(info: common_pb2.ErrorInfo) -> CkptError:
    """Rebuild the error; its context values are strings now."""
    return from_kind(info.kind, info.message, code=info.code, context=dict(info.context))


def cut(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
