"""Bytes that leave the store when replicas restore, over those of the checkpoint: 1 for any number of them.

Counted on the wire, between the ranks and an S3 server: what is read twice is counted twice, and so are the
manifest, indexes and headers.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import TracebackType

from benchmarks.layouts import Layout, barrier, build, label, open_manager
from benchmarks.options import Options
from benchmarks.report import Report
from tests.support.ranks import run_ranks
from tests.support.s3 import Ministack

__all__ = ["CountingProxy", "run"]

LAYOUTS: tuple[Layout, ...] = (("none", 1), ("ddp", 2), ("ddp", 4), ("hsdp", 4), ("fsdp2", 4))


class CountingProxy:
    """Passes TCP connections on to a port of loopback and counts what comes back.

    Attributes:
        received: bytes from the server so far.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._lock = threading.Lock()
        self.received = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> CountingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(("127.0.0.1", self._upstream))
            for pair in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if counts:
                    with self._lock:
                        self.received += len(data)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                each.close()


def run(options: Options) -> Report:
    """Save on one rank, restore on each layout with nothing on the node."""
    nbytes = options.size(quick=4 << 20, full=24 << 20)
    layouts = LAYOUTS[:2] if options.quick else LAYOUTS
    report = Report("replicas", f"{nbytes >> 20} MiB state, S3 on loopback, no local copy")
    with options.folder() as root:
        server = Ministack(root / "s3")
        server.start()
        try:
            url = f"s3://{server.make_bucket()}/run"
            keys = {name: value for name, value in server.env.items() if "KEY" in name}
            endpoint = {"endpoint_url": server.endpoint, "region": "us-east-1"}
            run_ranks(1, _save, url, root, endpoint, nbytes, env=keys)
            base = None
            for number, layout in enumerate(layouts):
                with CountingProxy(server.port) as proxy:
                    store = {"endpoint_url": f"http://127.0.0.1:{proxy.port}", "region": "us-east-1"}
                    node = root / f"node-{number}"
                    ranks = run_ranks(layout[1], _restore, url, node, store, layout, nbytes, env=keys)
                    if base is None:
                        base = report.add("bytes of the checkpoint", [ranks[0]], unit="bytes")
                    report.add(
                        f"read from the store: {label(layout)}",
                        [proxy.received],
                        unit="bytes",
                        over=base,
                        bar="<= 1.05",
                        note="HTTP headers and metadata included",
                    )
        finally:
            server.kill()
    return report


def _save(rank: int, world: int, url: str, root: Path, store: dict[str, str], nbytes: int) -> None:
    model, optimizer = build(("none", 1), rank, nbytes)
    with open_manager(url, root / "staging", model, optimizer, options=store) as manager:
        manager.restore()
        manager.save(1)


def _restore(
    rank: int, world: int, url: str, staging: Path, store: dict[str, str], layout: Layout, nbytes: int
) -> float:
    """Restore; return the bytes of the state that was saved."""
    model, optimizer = build(layout, rank, nbytes)
    with open_manager(url, staging, model, optimizer, options=store, uploads=False) as manager:
        manager.restore(1)
    barrier()
    whole, of_whole = build(("none", 1), 0, nbytes)
    state = [*whole.parameters(), *(v for s in of_whole.state.values() for v in s.values())]
    return float(sum(tensor.nbytes for tensor in state))
