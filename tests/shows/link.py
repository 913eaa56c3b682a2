"""A TCP link to a server on loopback, with a limited rate: a process of its own, so that it can be killed.

python -m tests.shows.link PORT UPSTREAM_PORT [BYTES_PER_S]
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

_BLOCK = 64 * 1024
_BURST_S = 0.02


class _Rate:
    """A token bucket for all connections together; 0: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + nbytes / self._rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


def _pump(source: socket.socket, sink: socket.socket, rate: _Rate) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_BLOCK):
            rate.take(len(data))
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main(port: int, upstream: int, bytes_per_s: float = 0.0) -> None:
    """Serve until killed."""
    rate = _Rate(bytes_per_s)
    listener = socket.create_server(("127.0.0.1", port), backlog=128, reuse_port=False)
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", upstream))
        except OSError:
            near.close()
            continue
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, sink, rate), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
