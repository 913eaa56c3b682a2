"""An HTTP proxy on loopback that counts requests and, on demand, fails them.

It stands between a client and a test server. A fault is a function of (method, path) that returns what to do:

- ``None``: pass on;
- a status such as 503: answer that, without asking the server;
- ``"reset"``: drop the connection, without asking the server;
- ``"lose-reply"``: let the server do it, then drop the connection;
- ``"truncate"``: announce the whole body, send half of it, drop the connection.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, BinaryIO

__all__ = ["Fault", "FaultProxy"]

Fault = Callable[[str, str], "int | str | None"]

_PIECE_NBYTES = 1 << 16
_HOP = frozenset({"connection", "transfer-encoding", "keep-alive"})


class FaultProxy:
    """Context manager. Signatures stay valid: the Host header is passed on as the client wrote it.

    Args:
        upstream_port: of the server, on loopback.

    Attributes:
        endpoint: URL for clients.
        requests: (method, path) of each, in order of arrival.
        sent: (path, bytes of the body) of each answer to a GET.
        fault: what to do with the next ones.
        received_nbytes: of bodies, in all.
        rate: bytes per second that bodies come in at, all connections together; None: as fast as they can.
    """

    def __init__(self, upstream_port: int) -> None:
        self.requests: list[tuple[str, str]] = []
        self.sent: list[tuple[str, int]] = []
        self.fault: Fault = lambda _method, _path: None
        self.received_nbytes = 0
        self.rate: float | None = None
        self._line = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy
            upstream = upstream_port

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def take(self, body: BinaryIO, nbytes: int) -> bytes:
        """Read a request's body, at the rate of the link."""
        parts = []
        while nbytes:
            part = body.read(min(nbytes, _PIECE_NBYTES))
            with self._line:
                self.received_nbytes += len(part)
                if self.rate is not None:
                    time.sleep(len(part) / self.rate)
            if not part:
                break
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is none of the test's business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy
    upstream: int

    def _serve(self) -> None:
        body = self.owner.take(self.rfile, int(self.headers.get("Content-Length") or 0))
        self.owner.requests.append((self.command, self.path))
        what = self.owner.fault(self.command, self.path)
        if what == "reset":
            self.close_connection = True
        elif isinstance(what, int):
            self._answer(what, [("Content-Type", "application/xml")], b"<Error><Code>Fault</Code></Error>")
        else:
            self._pass_on(body, what)

    def _pass_on(self, body: bytes, what: str | None) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            content = answer.read()
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
        finally:
            upstream.close()
        if self.command == "GET":
            self.owner.sent.append((self.path, len(content)))
        if what == "lose-reply":
            self.close_connection = True
            return
        self._answer(answer.status, headers, content, half=what == "truncate")

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, half: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if self.command == "HEAD" or name.lower() != "content-length":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
        self.close_connection = self.close_connection or half

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
