"""A real staging server in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckpt.client import CatalogClient, RestoreClient, StagingClient
from ckpt.errors import TimeoutExceededError
from ckpt.format.ids import CheckpointId
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2
from tests.support.s3 import start_process, stop_process
from tests.support.sealing import World, seal

__all__ = ["Server", "State", "dead_pid", "eventually", "save"]

State = staging_pb2.StepStatus


def eventually(condition: Callable[[], object], *, timeout_s: float = 20.0, what: str = "condition") -> None:
    """Poll ``condition`` until it is true; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.02)


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait(10)
    return process.pid


class Server:
    """``python -m ckpt_server`` on ``staging``.

    Args:
        staging: its staging directory.
        arguments: more of the command line.
        environment: added to the environment.
    """

    def __init__(self, staging: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.staging = StagingDir(staging)
        self._arguments = arguments
        self._environment = dict(environment or {})
        self._log = staging.with_name(staging.name + ".log")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        if self.process is not None:
            stop_process(self.process)

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it."""
        argv = [sys.executable, "-m", "ckpt_server", "--staging", str(self.staging.path)]
        argv += ["--scan-interval", "0.2", *self._arguments]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.process = start_process(argv, env=self._environment, cwd=self._log.parent, log=self._log)
        return self.process

    def start(self) -> Server:
        """Start it and wait until it is ready."""
        process = self.spawn()

        def ready() -> bool:
            assert process.poll() is None, f"exit code {process.poll()}\n{self.log()}"
            return self.info().get("pid") == process.pid

        eventually(ready, what="server is ready")
        return self

    def info(self) -> dict[str, object]:
        """server.json, or nothing."""
        path = self.staging.path / "server.json"
        try:
            found: dict[str, object] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def target(self) -> str:
        return self.staging.socket_target()

    @property
    def tcp_target(self) -> str:
        """The first TCP address."""
        listen = self.info()["listen"]
        assert isinstance(listen, list)
        return str(listen[0])

    def kill(self) -> None:
        """SIGKILL, and wait."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGTERM)
        return self.process.wait(timeout_s)

    def client(self) -> StagingClient:
        return StagingClient(self.target)

    def catalog(self) -> CatalogClient:
        return CatalogClient(self.target)

    def restore(self) -> RestoreClient:
        return RestoreClient(self.target)

    def wait_for(
        self,
        run_key: str,
        ident: CheckpointId,
        state: int = State.STATE_COMMITTED,
        *,
        timeout_s: float = 30.0,
    ) -> staging_pb2.StepStatus:
        """Watch until the step is in ``state``, and return its status."""
        with self.client() as client:
            seen = None
            for status in _until(client.watch(run_key, timeout_s=timeout_s)):
                if CheckpointId.from_proto(status.id) == ident:
                    seen = status
                    if status.state == state:
                        return status
        raise AssertionError(f"{ident} never came to state {state}; last seen: {seen}\n{self.log()}")


def _until(statuses: Iterator[staging_pb2.StepStatus]) -> Iterator[staging_pb2.StepStatus]:
    """The stream; a deadline ends it."""
    try:
        yield from statuses
    except TimeoutExceededError:
        return


def save(
    server: Server,
    url: str,
    world: World,
    ident: CheckpointId,
    *,
    store_options: Mapping[str, str] | None = None,
    **retain: int,
) -> str:
    """Register, seal every rank, tell the server; returns the run key."""
    with server.client() as client:
        options = store_options or {}
        run_key = client.register(url, staging=server.staging, store_options=options, **retain).run_key
        for rank in range(world.size):
            seal(server.staging, run_key, ident, world, rank)
            client.seal(run_key, ident, rank)
    return run_key
