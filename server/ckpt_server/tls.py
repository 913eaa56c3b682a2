"""The server's side of TLS: certificates that may be replaced while it runs."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

import grpc

from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger

__all__ = ["server_credentials"]

_log = get_logger("server.tls")


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Return credentials that read the files again when they change, looked at with each new connection.

    Replacements that do not fit together are logged and left out: what was used before stays in use.

    Args:
        cert: PEM chain of the server.
        key: its private key.
        client_ca: authority whose certificate every client must show; None: none is asked for.

    Raises:
        InvalidInputError: code "tls": a file cannot be read, or key and certificate do not belong together.
    """
    files = _Files(cert, key, client_ca)
    return grpc.dynamic_ssl_server_credentials(
        files.first,
        files.changed,  # type: ignore[arg-type]  # the stubs do not know that None means no change
        require_client_authentication=client_ca is not None,
    )


class _Files:
    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._paths = (cert, key, client_ca)
        self._lock = threading.Lock()
        self._seen = self._versions()
        self.first = self._read()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificates; None: as before. Called by gRPC for every handshake."""
        with self._lock:
            versions = self._versions()
            if versions == self._seen:
                return None
            self._seen = versions
            try:
                found = self._read()
            except InvalidInputError as error:
                event(_log, logging.WARNING, "tls.unreadable", error=error)
                return None
        event(_log, logging.INFO, "tls.renewed", cert=self._paths[0])
        return found

    def _versions(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat() if path is not None else None
            except OSError:
                status = None
            found.append((status.st_mtime_ns, status.st_size, status.st_ino) if status else None)
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert, key, client_ca = self._paths
        assert cert is not None
        assert key is not None
        try:
            # gRPC takes anything and fails at the handshake.
            check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            check.load_cert_chain(cert, key)
            if client_ca is not None:
                check.load_verify_locations(client_ca)
            roots = client_ca.read_bytes() if client_ca is not None else None
            pair = (key.read_bytes(), cert.read_bytes())
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidInputError(
                "the TLS files cannot be used", code="tls", cert=cert, key=key, reason=error
            ) from error
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)
