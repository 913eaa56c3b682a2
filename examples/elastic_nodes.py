"""Nodes of a cluster, all on this machine, that can be lost with everything on them.

A node is what an agent of torchrun starts on it: its workers, their flushers, the staging server; and a
staging directory of its own, a failure domain of its own, and an address for other nodes' servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import TCPStore

__all__ = ["Node", "Rendezvous", "wait_for"]

HERE = Path(__file__).resolve().parent


def wait_for(
    condition: Callable[[], object],
    what: str,
    *,
    timeout: float,
    hint: Callable[[], str],
    pause: float = 0.05,
) -> None:
    """Poll ``condition`` until it is true. Raises TimeoutError with ``what`` and ``hint()``."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:.0f} s: {what}\n{hint()}")
        time.sleep(pause)


class Rendezvous:
    """Where agents find one another. It lives outside the nodes (on a head node, in etcd), since one that is
    lost would take it along.

    Args:
        smallest, largest: numbers of nodes that the job may run on.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.nodes = (smallest, largest)

    def options(self) -> list[str]:
        """Options of torchrun."""
        # A lost node is missed after 3 s, and others are waited for for 3 s more. On a cluster, where nodes
        # start at different times, leave last_call_timeout at its 30 s.
        settings = {
            "is_host": 0,
            "last_call_timeout": 3,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
        }
        return [
            f"--nnodes={self.nodes[0]}:{self.nodes[1]}",
            "--max-restarts=20",
            "--monitor-interval=0.2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
            "--rdzv-id=elastic",
            "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
        ]


class Node:
    """One node; see above.

    Args:
        name: of the node, and of its failure domain.
        number: makes its address.
        out: folder of the example.
        environment: of everything on it.
    """

    def __init__(self, name: str, number: int, out: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.ip = f"127.0.0.{101 + number}"  # all of 127/8 is this machine
        self.staging = out / "nodes" / name
        self.log = out / "logs" / f"{name}.log"
        self.agent: subprocess.Popen[bytes] | None = None
        self._environment = environment | {
            "CKPT_STAGING": str(self.staging),
            "CKPT_FAILURE_DOMAIN": name,
            "CKPT_PEER_LISTEN": f"{self.ip}:0",
            # torchrun else keeps one key-value store over its restarts, on the node that had rank 0 first,
            # and the process group of one start may find addresses of the start before in it.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "CKPT_INSECURE": "1",  # loopback only: on a cluster use TLS and a token (docs/replication.md)
        }

    def start_agent(self, rendezvous: Rendezvous, program: Sequence[str]) -> None:
        """Start torchrun with one worker that runs ``program``."""
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *rendezvous.options(),
            f"--local-addr={self.ip}",
        ]
        self.agent = self._start([*command, "--nproc-per-node=1", *program])

    def start_server(self) -> None:
        """Start a staging server before any worker is there, as on a spare that is kept ready."""
        self._start([sys.executable, "-m", "ckpt_server", "--staging", str(self.staging)])
        ready = self.staging / "server.json"
        wait_for(ready.exists, f"the server of {self.name} is ready", timeout=60, hint=self.tail)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cli(self, *arguments: str) -> dict[str, object]:
        """Run ``ckpt`` on this node, and return its JSON document."""
        done = subprocess.run(
            [sys.executable, "-m", "ckpt.cli", *arguments, "--json"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"ckpt {' '.join(arguments)}: status {done.returncode}\n{done.stderr}")
        return json.loads(done.stdout)

    @property
    def address(self) -> str:
        """Of its server, for other nodes."""
        return json.loads((self.staging / "peer.json").read_text())["target"]

    def lose(self) -> None:
        """End the node as a power cut and a new disk would: no process and no file is left."""
        self.end(signal.SIGKILL)
        shutil.rmtree(self.staging)

    def end(self, number: int) -> None:
        """Send a signal to every process of the node until there is none."""
        while found := self._processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if self.agent is not None:
                self.agent.poll()
            time.sleep(0.05)

    def _processes(self) -> list[int]:
        """Those that were started with this node's environment, in whatever session they are."""
        mark = f"CKPT_STAGING={self.staging}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
        return found

    def holds_replica(self, step: int, rank: int) -> bool:
        """Whether it has a sealed replica of the segment of ``rank``."""
        return any(self.staging.glob(f"replicas/runs/*/{step:012d}.a*/segment-{rank:05d}.index"))

    def tail(self) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return "\n".join([f"--- {self.log}", *self.log.read_text(errors="replace").splitlines()[-30:]])
