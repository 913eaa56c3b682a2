"""``python -m benchmarks.s3_sink``: an S3 server that costs almost nothing, so that the client's cost shows.

Functional emulators are slower than a good client on the same cores. This one keeps small objects (manifests,
indexes) and answers conditional puts truly; of what is larger it keeps the size and drops the bytes. It says
its port and serves until its standard input is closed. No authentication; loopback only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

__all__ = ["Sink"]

_KEPT_NBYTES = 1 << 20
_BUFFER_NBYTES = 1 << 20
_DATE = "Mon, 01 Jan 2024 00:00:00 GMT"
_ISO_DATE = "2024-01-01T00:00:00.000Z"


class Sink:
    """The server in a process of its own; a context manager.

    Attributes:
        pid: of the process.
        port: on loopback.
    """

    def __enter__(self) -> Sink:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.s3_sink"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.pid = self._process.pid
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()

    @property
    def options(self) -> dict[str, str]:
        """Store options that lead here; keys are in ``environment``."""
        return {"endpoint_url": f"http://127.0.0.1:{self.port}", "region": "us-east-1"}

    @staticmethod
    def environment() -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}


@dataclass(slots=True)
class _Objects:
    """What the sink knows: size of each object, content of the small ones."""

    sizes: dict[str, int] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, int]] = field(default_factory=dict)  # of uploads that are not complete
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, nbytes: int, body: bytes, *, create: bool) -> bool:
        """Store an object; return False where ``create`` forbids to replace one."""
        with self.lock:
            if create and key in self.sizes:
                return False
            self.sizes[key] = nbytes
            self.small[key] = body
            return True

    def begin(self) -> str:
        with self.lock:
            name = f"upload-{len(self.parts)}"
            self.parts[name] = {}
            return name

    def complete(self, key: str, upload: str) -> None:
        with self.lock:
            self.sizes[key] = sum(self.parts[upload].values())
            self.small.pop(key, None)

    def listing(self, prefix: str, after: str, most: int) -> tuple[list[tuple[str, int]], bool]:
        with self.lock:
            keys = sorted(key for key in self.sizes if key.startswith(prefix) and key > after)
            return [(key, self.sizes[key]) for key in keys[:most]], len(keys) > most


class _Connection(threading.Thread):
    def __init__(self, sock: socket.socket, objects: _Objects) -> None:
        super().__init__(daemon=True)
        self._sock, self._objects = sock, objects
        self._rest = b""
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))

    def run(self) -> None:
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, ConnectionError), self._sock:
            while (head := self._head()) is not None:
                self._serve(*head)

    def _head(self) -> tuple[str, str, dict[str, str]] | None:
        while b"\r\n\r\n" not in self._rest:
            data = self._sock.recv(65536)
            if not data:
                return None
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = text.decode("latin1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.split(":", 1) for line in lines)
        return method, target, {name.strip().lower(): value.strip() for name, value in pairs}

    def _body(self, nbytes: int) -> bytes:
        """Read a body; return it if it is small, else drop it."""
        if nbytes <= _KEPT_NBYTES:
            while len(self._rest) < nbytes:
                self._rest += self._receive(nbytes)
            body, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            return body
        left = nbytes - len(self._rest)
        self._rest = b""
        while left:
            got = self._sock.recv_into(self._buffer[: min(left, _BUFFER_NBYTES)])
            if not got:
                raise ConnectionError
            left -= got
        return b""

    def _receive(self, most: int) -> bytes:
        data = self._sock.recv(min(most, 65536))
        if not data:
            raise ConnectionError
        return data

    def _serve(self, method: str, target: str, headers: dict[str, str]) -> None:
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        key = unquote(url.path).lstrip("/").partition("/")[2]
        if "100-continue" in headers.get("expect", ""):
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        nbytes = int(headers.get("content-length", 0))
        body = self._body(nbytes)
        if method == "PUT" and "uploadId" in query:
            self._objects.parts[query["uploadId"]][int(query["partNumber"])] = nbytes
            self._reply("200 OK")
        elif method == "PUT":
            made = self._objects.put(key, nbytes, body, create="if-none-match" in headers)
            self._reply("200 OK" if made else "412 Precondition Failed")
        elif method == "POST":
            self._post(key, query, body)
        elif method == "DELETE":
            with self._objects.lock:
                self._objects.sizes.pop(key, None)
            self._reply("204 No Content")
        elif not key:
            self._list(query)
        else:
            self._get(key, headers, is_head=method == "HEAD")

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "delete" in query:
            names = [name.decode() for name in re.findall(rb"<Key>(.*?)</Key>", body)]
            with self._objects.lock:
                for name in names:
                    self._objects.sizes.pop(unescape(name), None)
            self._xml("DeleteResult", "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names))
        elif "uploads" in query:
            upload = self._objects.begin()
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        else:
            self._objects.complete(key, query["uploadId"])
            self._xml("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>&quot;0&quot;</ETag>")

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        found, more = self._objects.listing(prefix, after, int(query.get("max-keys", 1000)))
        inner, folders = [], []
        for key, nbytes in found:
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.append(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                inner.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{_ISO_DATE}</LastModified>"
                    f"<ETag>&quot;0&quot;</ETag><Size>{nbytes}</Size></Contents>"
                )
        inner += [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(set(folders))
        ]
        token = f"<NextContinuationToken>{escape(found[-1][0])}</NextContinuationToken>" if more else ""
        self._xml(
            "ListBucketResult",
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}<KeyCount>{len(found)}</KeyCount>"
            + "".join(inner),
        )

    def _get(self, key: str, headers: dict[str, str], *, is_head: bool) -> None:
        nbytes = self._objects.sizes.get(key)
        if nbytes is None:
            body = b"" if is_head else b"<Error><Code>NoSuchKey</Code></Error>"
            self._reply("404 Not Found", body)
            return
        if is_head:
            self._reply("200 OK", length=nbytes, is_head=True)
            return
        content = self._objects.small.get(key, b"")
        wanted = re.match(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        if wanted is None:
            self._reply("200 OK", content)
            return
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, nbytes)
        part = content[start:stop]
        self._reply("206 Partial Content", part, more=f"Content-Range: bytes {start}-{stop - 1}/{nbytes}\r\n")

    def _xml(self, root: str, inner: str) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{inner}</{root}>'
        self._reply("200 OK", text.encode(), more="Content-Type: application/xml\r\n")

    def _reply(
        self,
        status: str,
        body: bytes = b"",
        *,
        more: str = "",
        length: int | None = None,
        is_head: bool = False,
    ) -> None:
        size = len(body) if length is None else length
        head = (
            f"HTTP/1.1 {status}\r\nDate: {_DATE}\r\nLast-Modified: {_DATE}\r\nContent-Length: {size}\r\n"
            f'ETag: "0"\r\nAccept-Ranges: bytes\r\n{more}\r\n'
        )
        self._sock.sendall(head.encode() + (b"" if is_head else body))


def _main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        objects = _Objects()
        while True:
            _Connection(listener.accept()[0], objects).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _main()
