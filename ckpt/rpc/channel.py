"""Channels to a staging server: target, TLS, token, limits, and the wrappers of every call.

A target is ``unix:/path/of/server.sock`` (no credentials: the socket's mode is the lock) or
``host:port`` (TLS and a token, unless the server runs with ``--insecure`` on loopback).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from ckpt.errors import InvalidInputError, TimeoutExceededError, UnavailableError
from ckpt.rpc.status import error_from_rpc

__all__ = [
    "CHANNEL_OPTIONS",
    "MAX_MESSAGE_NBYTES",
    "MAX_REQUEST_NBYTES",
    "Connection",
    "is_loopback",
    "open_channel",
]

T = TypeVar("T")

# A reply with the indexes of several ranks of 200,000 tensors each is far over gRPC's default of 4 MiB.
MAX_MESSAGE_NBYTES = 256 * 1024 * 1024
# What a server takes. The largest request is Seal of a rank whose server cannot see its directory: index and
# layout set of 200,000 tensors (about 80 bytes each in both, 32 MB), and as much again of plain state.
MAX_REQUEST_NBYTES = 64 * 1024 * 1024

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    # Two clients of one process must not share a connection's fate or its flow-control window.
    ("grpc.use_local_subchannel_pool", 1),
    # Proxies drop connections that are silent for long; the server allows a ping every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def open_channel(target: str, *, token: str | None = None, ca: Path | None = None) -> grpc.Channel:
    """Open a channel; connects when first used.

    Args:
        target: ``unix:/path`` or ``host:port``.
        token: sent with every call. Refused for a plain-text connection to another machine.
        ca: PEM file of the authority that signed the server's certificate; turns TLS on. To servers that ask
            for one, the certificate that ``CKPT_CLIENT_CERT`` and ``CKPT_CLIENT_KEY`` name is shown.

    Raises:
        InvalidInputError: malformed target, unreadable ``ca``, or a token that would travel in the clear.
    """
    if target.startswith("unix:"):
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInputError("a target is unix:/path or host:port", code="target", target=target)
    if ca is None:
        if not is_loopback(host):
            raise InvalidInputError(
                "a server on another machine needs TLS: give the CA file (CKPT_SERVER_CA, --ca)",
                code="tls-required",
                target=target,
            )
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    try:
        roots = ca.read_bytes()
    except OSError as error:
        raise InvalidInputError("cannot read the CA file", code="ca", path=ca) from error
    cert, key = _own_certificate()
    return grpc.secure_channel(
        target, grpc.ssl_channel_credentials(roots, key, cert), options=CHANNEL_OPTIONS
    )


def _own_certificate() -> tuple[bytes | None, bytes | None]:
    """Certificate and key that this process shows to servers that ask: CKPT_CLIENT_CERT, CKPT_CLIENT_KEY."""
    paths = [os.environ.get(name) for name in ("CKPT_CLIENT_CERT", "CKPT_CLIENT_KEY")]
    if not any(paths):
        return None, None
    if not all(paths):
        raise InvalidInputError("CKPT_CLIENT_CERT and CKPT_CLIENT_KEY go together", code="tls")
    try:
        cert, key = (Path(path or "").read_bytes() for path in paths)
    except OSError as error:
        raise InvalidInputError("cannot read the client's TLS files", code="tls", paths=paths) from error
    return cert, key


class Connection:
    """A channel, its token, and calls that raise CkptErrors. Thread-safe; use as a context manager.

    Args:
        target, token, ca: as for :func:`open_channel`.
        timeout_s: deadline of a call that names none.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 30.0
    ) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.channel = open_channel(target, token=token, ca=ca)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self.channel.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Block until connected. Raises TimeoutExceededError."""
        ready = grpc.channel_ready_future(self.channel)
        try:
            ready.result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            ready.cancel()
            raise TimeoutExceededError(
                "the staging server does not answer", target=self.target, waited_s=timeout_s
            ) from None

    def call(self, method: Callable[..., T], request: object, *, timeout_s: float | None = None) -> T:
        """Make a unary (or client-streaming) call and return the reply. Raises CkptError."""
        try:
            return method(request, timeout=timeout_s or self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_from_rpc(error, target=self.target, method=_name(method)) from error
        except ValueError as error:  # gRPC's way to say that another thread has closed the channel
            raise UnavailableError("the connection is closed", code="closed", target=self.target) from error

    def stream(
        self, method: Callable[..., Any], request: object, *, timeout_s: float | None = None
    ) -> Iterator[Any]:
        """Begin a server-streaming call; returns the replies. Leaving early cancels it. Raises CkptError."""
        call = method(request, timeout=timeout_s or self.timeout_s, metadata=self._metadata)
        return _replies(call, self.target, _name(method))


def _replies(call: Any, target: str, method: str) -> Iterator[Any]:
    try:
        yield from call
    except grpc.RpcError as error:
        raise error_from_rpc(error, target=target, method=method) from error
    finally:
        call.cancel()


def _name(method: object) -> str:
    raw = getattr(method, "_method", b"")
    return raw.decode() if isinstance(raw, bytes) else str(raw)
