"""An HTTP proxy on loopback that counts requests and, on demand, fails them.

It stands between a client and a test server. A fault is a function of (method, path) that returns what to do:

- ``None``: pass on;
- a status such as 503: answer that, without asking the server; (400, "ExpiredToken") with this code;
- ``"reset"``: drop the connection, without asking the server;
- ``"lose-reply"``: let the server do it, then drop the connection;
- ``"truncate"``: announce the whole body, send half of it, drop the connection;
- ``"damage"``: flip a bit of the body on its way, up (PUT, POST) or down;
- ``"stale"``: to a listing what was answered the first time that it was asked for.
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

Fault = Callable[[str, str], "int | tuple[int, str] | str | None"]

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""

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
        rate: bytes per second of bodies, either way, all connections together; None: as fast as they can.
        session_token: the only one that is good; others have expired. None: any.
    """

    def __init__(self, upstream_port: int) -> None:
        self.requests: list[tuple[str, str]] = []
        self.sent: list[tuple[str, int]] = []
        self.fault: Fault = lambda _method, _path: None
        self.received_nbytes = 0
        self.rate: float | None = None
        self.session_token: str | None = None
        self.first_answers: dict[str, Answer] = {}
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
            self._pass(len(part))
            with self._line:
                self.received_nbytes += len(part)
            if not part:
                break
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def give(self, body: BinaryIO, data: bytes) -> None:
        """Write an answer's body, at the rate of the link."""
        for start in range(0, len(data), _PIECE_NBYTES):
            part = data[start : start + _PIECE_NBYTES]
            self._pass(len(part))
            body.write(part)

    def _pass(self, nbytes: int) -> None:
        with self._line:
            if self.rate is not None:
                time.sleep(nbytes / self.rate)

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
        wanted = self.owner.session_token
        if wanted is not None and self.headers.get("x-amz-security-token") != wanted:
            what = (400, "ExpiredToken")
        if what == "reset":
            self.close_connection = True
        elif isinstance(what, int):
            self._refuse(what, "Fault")
        elif isinstance(what, tuple):
            self._refuse(*what)
        else:
            self._pass_on(body, what)

    def _refuse(self, status: int, code: str) -> None:
        content = f"<Error><Code>{code}</Code><Message>the proxy says so</Message></Error>".encode()
        self._answer(status, [("Content-Type", "application/xml")], content)

    def _pass_on(self, body: bytes, what: str | None) -> None:
        upwards = self.command in ("PUT", "POST")
        answer = self._ask(_flipped(body) if what == "damage" and upwards else body)
        if "list-type=" in self.path:
            first = self.owner.first_answers.setdefault(self.path, answer)
            answer = first if what == "stale" else answer
        status, headers, content = answer
        if what == "damage" and not upwards:
            content = _flipped(content)
        if self.command == "GET":
            self.owner.sent.append((self.path, len(content)))
        if what == "lose-reply":
            self.close_connection = True
            return
        self._answer(status, headers, content, half=what == "truncate")

    def _ask(self, body: bytes) -> Answer:
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
        return answer.status, headers, content

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
            self.owner.give(self.wfile, content[: len(content) // 2] if half else content)
        self.close_connection = self.close_connection or half

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _flipped(data: bytes) -> bytes:
    """``data`` with one bit of the byte in the middle the other way; of nothing, nothing."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data
