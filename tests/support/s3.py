"""S3 servers on loopback for tests: started in a second, on a free port, gone with the test run.

``Ministack`` is a functional emulator and runs most tests. ``Rclone`` ignores conditional puts, as several
S3-compatible servers do, and runs the tests of the fallback. The real store is in ``tests.support.ceph``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import botocore.config  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]

__all__ = ["Ministack", "Rclone", "S3Endpoint", "Server", "free_port", "start_process", "stop_process"]

_START_S = 60.0


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_process(argv: list[str], *, env: dict[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a server in its own session; it dies with this process, however that ends."""
    # The kernel kills the child when the parent dies, even by SIGKILL. Not by preexec_fn: that is
    # unsafe once threads exist.
    setpriv = shutil.which("setpriv")
    prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            prefix + argv,
            env=clean | env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    atexit.register(stop_process, process)
    return process


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, and reap it. Does nothing when it is gone already."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


class S3Endpoint:
    """How to reach a server.

    Attributes:
        port: on loopback.
        access_key_id, secret_access_key: of a user who may do everything.
    """

    access_key_id = "testkey"
    secret_access_key = "testsecret12345"
    port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Options for ``open_store``."""
        return {
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }

    @property
    def env(self) -> dict[str, str]:
        """The same for a child process, by the names every AWS client reads."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }

    def make_bucket(self, name: str | None = None) -> str:
        """Create a bucket with a name nobody uses and return the name."""
        name = name or f"ckpt-{uuid.uuid4().hex[:16]}"
        client = botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
            config=botocore.config.Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
            ),
        )
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def wait_ready(self, process: subprocess.Popen[bytes], log: Path, start_s: float = _START_S) -> None:
        """Return once the port answers HTTP. Raises RuntimeError with the end of the log."""
        deadline = time.monotonic() + start_s
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.endpoint + "/", timeout=5).close()
                return
            except urllib.error.HTTPError as error:
                error.close()
                return
            except OSError:
                time.sleep(0.02)
        ended = process.poll()
        stop_process(process)
        tail = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the server is not up (exit status {ended}):\n{tail}")


class Server(S3Endpoint):
    """A server of one process. Its data stay in ``data`` over kill and restart.

    Args:
        data: folder of its own, created here.
    """

    def __init__(self, data: Path) -> None:
        self.data = data
        data.mkdir(parents=True, exist_ok=True)
        self._log = data / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return (argv, environment) for the current port."""
        raise NotImplementedError

    def start(self) -> Server:
        """Start on a free port; another one where somebody was faster to take it."""
        for tries_left in (2, 1, 0):
            self.port = free_port()
            try:
                self.restart()
            except RuntimeError:
                if not tries_left:
                    raise
            else:
                break
        return self

    def restart(self) -> None:
        """Start on the same port and data; to be called after :meth:`kill`."""
        argv, env = self._command()
        self._process = start_process(argv, env=env, cwd=self.data, log=self._log)
        self.wait_ready(self._process, self._log)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None:
            stop_process(self._process)
            self._process = None


def _script(name: str) -> str:
    """Return the path of a command installed beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install .[test]")
    return found


class Ministack(Server):
    """Functional emulator: conditional puts, pages, parts, ranges. Does not check signatures."""

    access_key_id = "test"
    secret_access_key = "test"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        env = {
            "GATEWAY_PORT": str(self.port),
            "BIND_HOST": "127.0.0.1",
            "SERVICES": "s3",
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(self.data / "s3"),
            "AUTH": "true",
            "LOG_LEVEL": "WARNING",
            "IOT_MTLS_ENABLED": "0",  # would listen on a fixed port
        }
        return [_script("ministack")], env


class Rclone(Server):
    """``rclone serve s3``: answers success to a conditional put without looking at the condition."""

    def _command(self) -> tuple[list[str], dict[str, str]]:
        root = self.data / "root"
        root.mkdir(exist_ok=True)
        keys = f"{self.access_key_id},{self.secret_access_key}"
        address = f"127.0.0.1:{self.port}"
        return [
            _script("rclone"), "serve", "s3", "--config", "", "--addr", address, "--auth-key", keys, str(root)
        ], {}  # fmt: skip
