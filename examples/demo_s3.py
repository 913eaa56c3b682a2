"""An S3 server on loopback for the demo: ministack, in a directory of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

__all__ = ["S3Server"]

START_DEADLINE = 60.0  # seconds; the first start on a cold disk takes ten
ACCESS_KEY = SECRET_KEY = "test"  # what ministack accepts


class S3Server:
    """Context manager: a running server whose objects live in ``directory``; ``url`` is its endpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> S3Server:
        self._directory.mkdir(parents=True)
        settings = {
            "GATEWAY_PORT": str(self._port),
            "BIND_HOST": "127.0.0.1",
            "SERVICES": "s3",
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(self._directory / "objects"),
            "AUTH": "true",
            "LOG_LEVEL": "WARNING",
        }
        with (self._directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [find_ministack()],
                env=without_proxies() | settings,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the demo, which ends the server
            )
        try:
            self._await_answer()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def create_bucket(self, name: str) -> None:
        """Create a bucket (with botocore, which ministack depends on)."""
        import botocore.session

        client = botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        client.create_bucket(Bucket=name)

    def client_environment(self) -> dict[str, str]:
        """Return the whole environment for processes that talk to this server."""
        environment = {k: v for k, v in without_proxies().items() if not k.startswith("AWS_")}
        return environment | {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _await_answer(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"ministack ended with status {self._process.returncode}")
            try:
                opener.open(self.url, timeout=2).close()
            except urllib.error.HTTPError:
                return  # an answer, if only "access denied"
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"ministack does not answer within {START_DEADLINE:.0f} s")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a TCP port that was free on loopback a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def find_ministack() -> str:
    """Return the ministack program of this Python environment. Raises RuntimeError."""
    beside = Path(sys.executable).with_name("ministack")
    found = str(beside) if beside.exists() else shutil.which("ministack")
    if found is None:
        raise RuntimeError("ministack is missing: pip install 'ckpt-training-state[demo]'")
    return found


def without_proxies() -> dict[str, str]:
    """Return this process's environment less the proxy settings: everything here is on loopback."""
    return {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
