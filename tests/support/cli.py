"""The ckpt command as a process, and a run to use it on."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from ckpt.format.ids import CheckpointId
from ckpt.storage.open import open_store
from tests.support.builders import build_checkpoint, claim

__all__ = [
    "DAMAGED",
    "DONE",
    "FAILED",
    "LATEST",
    "NOT_FOUND",
    "OTHER_RUN",
    "REFUSED",
    "USAGE",
    "Cli",
    "make_run",
]

DONE, FAILED, USAGE, NOT_FOUND, DAMAGED, REFUSED = range(6)
OTHER_RUN = 7
LATEST = "000000000045.a000002"  # of make_run
_KEPT_OUT = ("CKPT_", "AWS_")


class Cli:
    """Runs ``python -m ckpt.cli`` with a staging directory of its own."""

    def __init__(self, staging: Path) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(_KEPT_OUT)}
        self.env = clean | {"CKPT_STAGING": str(staging), "COLUMNS": "80"}
        self.argv = [sys.executable, "-m", "ckpt.cli"]

    def run(self, *arguments: str, code: int = DONE, **env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit code."""
        found = subprocess.run(
            [*self.argv, *arguments],
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode == code, found.stdout + found.stderr
        assert "Traceback" not in found.stderr or "--debug" in arguments
        return found

    def json(self, *arguments: str, code: int = DONE, **env: str) -> Any:
        """Run with ``--json`` and return the document."""
        return json.loads(self.run(*arguments, "--json", code=code, **env).stdout)

    def steps(self, url: str) -> list[int]:
        return [row["step"] for row in self.json("list", url)["checkpoints"]]

    def terminal(self, *arguments: str, answer: str = "", code: int = DONE) -> str:
        """Run on a terminal of 80 columns, type ``answer``, return everything shown."""
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [*self.argv, *arguments],
            env=self.env | {"TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        os.write(master, answer.encode())
        shown = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # Linux says EIO when the last writer has left
                break
            if not data:
                break
            shown += data
        os.close(master)
        assert process.wait(60) == code, shown.decode()
        return shown.decode().replace("\r\n", "\n")


def make_run(folder: Path) -> str:
    """Make a run below ``folder``: attempt 1 with steps 10 to 50, attempt 2 resumed from 40 with step 45."""
    url = f"file://{folder}/store/run"
    store = open_store(url)
    claim(store)
    for step in (10, 20, 30, 40, 50):
        build_checkpoint(store, step, chunk_nbytes=64 * 1024)
    parent = CheckpointId(40, 1)
    claim(store, parent=parent)
    build_checkpoint(store, 45, 2, parent=parent, chunk_nbytes=64 * 1024)
    return url
