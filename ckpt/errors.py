"""The exception tree: classes by what the caller does next, codes that never change.

CkptError
  InvalidInputError   the call or the data given is wrong; nothing was written; fix and call again
  NotFoundError       a run, checkpoint, tensor or object does not exist
  ConflictError       another writer won; reload, then decide; repeating the call cannot help
  CorruptError        stored bytes are damaged or incomplete; use another copy
  RefusedError        the call would lose data; it did nothing
  UnavailableError    a server, store or peer cannot be reached now; try again later (retryable)
  TimeoutExceededError  a deadline passed; the message says who was missing
  BusyError           the previous snapshot is still being written and the policy is "fail"
  SnapshotTornError   the state changed while it was copied; the snapshot was thrown away
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "BusyError",
    "CkptError",
    "ConflictError",
    "CorruptError",
    "InvalidInputError",
    "NotFoundError",
    "RefusedError",
    "SnapshotTornError",
    "TimeoutExceededError",
    "UnavailableError",
    "from_kind",
]


def _rebuild(cls: type[CkptError], args: tuple[Any, ...], state: dict[str, Any]) -> CkptError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class CkptError(Exception):
    """Base class.

    Args:
        message: lower case, without values; says what went wrong and what to do.
        code: stable machine-readable reason; append-only.
        context: the values behind the message (step, rank, tensor, path, ...).
    """

    default_code = "internal"
    retryable = False

    def __init__(self, message: str, /, *, code: str | None = None, **context: object) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.context = context

    def __str__(self) -> str:
        values = ", ".join(f"{key}={value}" for key, value in self.context.items())
        return f"{self.message} ({values})" if values else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Default pickling replays __init__(*args) and loses keyword arguments; in a process
        # pool that turns this error into a bare BrokenProcessPool.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class InvalidInputError(CkptError):
    """The call or the data given is wrong. Nothing was written."""

    default_code = "invalid-input"


class NotFoundError(CkptError):
    """A run, checkpoint, tensor or object does not exist. Only a real "not there", never a hiccup."""

    default_code = "not-found"


class ConflictError(CkptError):
    """Another writer won. Reload, then decide; repeating the same call cannot help."""

    default_code = "conflict"


class CorruptError(CkptError):
    """Stored bytes are damaged or incomplete. Use another copy."""

    default_code = "corrupt"


class RefusedError(CkptError):
    """The call would lose data; it did nothing."""

    default_code = "refused"


class UnavailableError(CkptError):
    """A server, store or peer cannot be reached now. Try again later."""

    default_code = "unavailable"
    retryable = True


class TimeoutExceededError(CkptError):
    """A deadline passed; the context says what was waited for."""

    default_code = "timeout"


class BusyError(CkptError):
    """The previous snapshot is still being written and ``on_busy`` is "fail"."""

    default_code = "busy"


class SnapshotTornError(CkptError):
    """The state changed while it was copied; the snapshot was thrown away.

    Args:
        tensors: names of all that changed.
    """

    default_code = "torn"
    _SHOWN = 5

    def __init__(
        self, message: str, /, *, code: str | None = None, tensors: Sequence[str] = (), **context: object
    ) -> None:
        super().__init__(message, code=code, **context)
        if tensors:
            self.context.update(tensors=list(tensors[: self._SHOWN]), count=len(tensors))
        self.tensors = tuple(tensors)


_KINDS: dict[str, type[CkptError]] = {
    cls.__name__: cls
    for cls in (
        CkptError,
        InvalidInputError,
        NotFoundError,
        ConflictError,
        CorruptError,
        RefusedError,
        UnavailableError,
        TimeoutExceededError,
        BusyError,
        SnapshotTornError,
    )
}


def from_kind(kind: str, message: str, *, code: str, context: dict[str, str]) -> CkptError:
    """Rebuild an error that crossed a process border; an unknown kind becomes a CkptError."""
    return _KINDS.get(kind, CkptError)(message, code=code, **context)
