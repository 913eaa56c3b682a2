"""What the clients share: the connection, and its end."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from ckpt.rpc.channel import Connection

__all__ = ["Client"]


class Client:
    """One connection to a staging server. Thread-safe; every call has a deadline. A context manager.

    Args:
        target: ``unix:/path`` or ``host:port``.
        token, ca: for TCP; see :func:`ckpt.rpc.channel.open_channel`.
        timeout_s: deadline of each call that has none of its own.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 30.0
    ) -> None:
        self._connection = Connection(target, token=token, ca=ca, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled."""
        self._connection.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Block until the server answers. Raises TimeoutExceededError."""
        self._connection.wait_ready(timeout_s)
