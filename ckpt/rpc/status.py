"""CkptError <-> gRPC status: one table, both ways.

The canonical status code says what a stranger's client needs to know; the whole error (kind, code,
message, context) travels beside it as a serialized ErrorInfo in the trailing metadata
``ckpt-error-bin``. It is bounded, because clients refuse metadata over 8 KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ckpt.errors import (
    BusyError,
    CkptError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    SnapshotTornError,
    TimeoutExceededError,
    UnavailableError,
)
from ckpt.format.problem import MESSAGE_CHARS, cut, error_from_info
from ckpt_proto.v1 import common_pb2

__all__ = [
    "ERROR_METADATA_KEY",
    "STATUS_CODES",
    "error_from_rpc",
    "sent_error",
    "status_code",
]

ERROR_METADATA_KEY = "ckpt-error-bin"

STATUS_CODES: Mapping[type[CkptError], grpc.StatusCode] = MappingProxyType(
    {
        InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
        NotFoundError: grpc.StatusCode.NOT_FOUND,
        ConflictError: grpc.StatusCode.ABORTED,
        CorruptError: grpc.StatusCode.DATA_LOSS,
        RefusedError: grpc.StatusCode.FAILED_PRECONDITION,
        UnavailableError: grpc.StatusCode.UNAVAILABLE,
        TimeoutExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
        BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        SnapshotTornError: grpc.StatusCode.ABORTED,
        CkptError: grpc.StatusCode.INTERNAL,
    }
)

# Refusals of the caller, not of the call.
_BY_CODE: Mapping[str, grpc.StatusCode] = MappingProxyType(
    {
        "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
        "permission-denied": grpc.StatusCode.PERMISSION_DENIED,
    }
)

# Statuses that no CkptError of ours produced: gRPC itself, a proxy or another program did.
_FOREIGN: Mapping[grpc.StatusCode, tuple[type[CkptError], str]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: (InvalidInputError, "invalid-input"),
        grpc.StatusCode.OUT_OF_RANGE: (InvalidInputError, "invalid-input"),
        grpc.StatusCode.UNIMPLEMENTED: (InvalidInputError, "unimplemented"),
        grpc.StatusCode.UNAUTHENTICATED: (RefusedError, "unauthenticated"),
        grpc.StatusCode.PERMISSION_DENIED: (RefusedError, "permission-denied"),
        grpc.StatusCode.NOT_FOUND: (NotFoundError, "not-found"),
        grpc.StatusCode.ABORTED: (ConflictError, "conflict"),
        grpc.StatusCode.ALREADY_EXISTS: (ConflictError, "conflict"),
        grpc.StatusCode.DATA_LOSS: (CorruptError, "corrupt"),
        grpc.StatusCode.FAILED_PRECONDITION: (RefusedError, "refused"),
        grpc.StatusCode.UNAVAILABLE: (UnavailableError, "unavailable"),
        grpc.StatusCode.CANCELLED: (UnavailableError, "cancelled"),
        grpc.StatusCode.DEADLINE_EXCEEDED: (TimeoutExceededError, "timeout"),
        grpc.StatusCode.RESOURCE_EXHAUSTED: (BusyError, "resource-exhausted"),
    }
)


def status_code(error: CkptError) -> grpc.StatusCode:
    """Return the canonical status of ``error``: that of the nearest class in the table."""
    if isinstance(error, RefusedError) and error.code in _BY_CODE:
        return _BY_CODE[error.code]
    for cls in type(error).__mro__:
        if cls in STATUS_CODES:
            return STATUS_CODES[cls]
    return grpc.StatusCode.INTERNAL


def sent_error(error: grpc.RpcError) -> CkptError | None:
    """Return the CkptError that the server sent with a failed call; None where it sent none."""
    for key, value in _trailing_metadata(error):
        if key == ERROR_METADATA_KEY:
            try:
                return error_from_info(common_pb2.ErrorInfo.FromString(value))
            except DecodeError:
                break
    return None


def error_from_rpc(error: grpc.RpcError, *, target: str = "", method: str = "") -> CkptError:
    """Return the CkptError behind a failed call: the server's own one where it sent one."""
    if (sent := sent_error(error)) is not None:
        return sent
    code = _call(error, "code") or grpc.StatusCode.UNKNOWN
    cls, reason = _FOREIGN.get(code, (CkptError, "internal"))
    details = _call(error, "details") or str(error)
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        message = "the staging server cannot be reached"
    else:
        message = f"call to the staging server failed: {code.name.lower()}"
    return cls(
        message,
        code=reason,
        target=target,
        method=method,
        details=cut(details, MESSAGE_CHARS),
    )


def _trailing_metadata(error: grpc.RpcError) -> list[tuple[str, bytes]]:
    return list(_call(error, "trailing_metadata") or ())


def _call(error: grpc.RpcError, name: str) -> Any:
    """Ask the call behind the error; the stubs do not know that grpc raises objects that are both."""
    method = getattr(error, name, None)
    return method() if method is not None else None
