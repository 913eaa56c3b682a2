"""One server per staging directory: the flock on server.lock, and server.json for those who look for it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpt.errors import RefusedError
from ckpt.storage.durable import write_durably
from ckpt.storage.peerfile import PEER_NAME
from ckpt.storage.staging import StagingDir

__all__ = ["AlreadyRunningError", "has_server_file", "owned", "write_server_file"]


class AlreadyRunningError(RefusedError):
    """Another server owns the staging directory."""

    default_code = "already-running"


@contextlib.contextmanager
def owned(staging: StagingDir) -> Iterator[None]:
    """Own ``staging`` for the block. The kernel releases the lock when the process ends, however it ends.

    Raises:
        AlreadyRunningError: another process owns it.
    """
    fd = os.open(staging.path / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunningError(
                "another staging server owns this directory",
                staging=staging.path,
                pid=os.pread(fd, 32, 0).decode().strip() or "unknown",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        for stale in (_server_file(staging), staging.path / PEER_NAME):  # of a server that was killed
            stale.unlink(missing_ok=True)
        yield
    finally:
        os.close(fd)


def has_server_file(staging: StagingDir) -> bool:
    """Whether ``server.json`` is there: some server is ready, or died without the chance to delete it."""
    return _server_file(staging).is_file()


def write_server_file(
    staging: StagingDir, *, version: str, listen: Sequence[str], metrics: str | None = None
) -> Path:
    """Write ``server.json``: the server is ready and this is how to reach it."""
    path = _server_file(staging)
    body = {
        "pid": os.getpid(),
        "target": staging.socket_target(),
        "listen": list(listen),
        "metrics": metrics,
        "version": version,
    }
    write_durably(path, json.dumps(body).encode())
    return path


def _server_file(staging: StagingDir) -> Path:
    return staging.path / "server.json"
