"""Many ranks and many restoring clients on one server, and what that costs it.

``python -m tests.support.load [--minutes M]`` is the long form: prints the server's memory, threads,
descriptors and files over time, and what 500 clients at once meant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ckpt.client import RestoreClient, StagingClient
from ckpt.format.ids import CheckpointId
from ckpt.geometry import Box
from ckpt.storage.durable import TEMP_PREFIX
from ckpt_proto.v1 import staging_pb2
from tests.support.sealing import World, make_world, seal
from tests.support.server import Server

__all__ = ["RANKS", "Ranks", "Usage", "restore_all_at_once"]

RANKS = 64
_ROWS, _COLUMNS = 4 * RANKS, 512  # 8 KiB of weight per rank, for each step anew
_WORLDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a server holds at one moment.

    Attributes:
        rss_kib: resident memory.
        threads, descriptors: how many.
        staged, temporary: files below its staging directory; those that are half written, in the store too.
        objects: in the store.
    """

    rss_kib: int
    threads: int
    descriptors: int
    staged: int
    temporary: int
    objects: int

    @classmethod
    def of(cls, pid: int, staging: Path, store: Path) -> Usage:
        proc = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        here, there = _files(staging), _files(store)
        return cls(
            rss_kib=int(status["VmRSS"].split()[0]),
            threads=int(status["Threads"]),
            descriptors=len(list((proc / "fd").iterdir())),
            staged=len(here),
            temporary=sum(_is_temporary(path) for path in [*here, *there]),
            objects=len(there),
        )


def _files(root: Path) -> list[Path]:
    """Files below ``root``; folders that go meanwhile are passed over."""
    return [Path(folder, name) for folder, _, names in os.walk(root) for name in names]


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMP_PREFIX) or path.suffix in (".tmp", ".incoming")


def world_of(step: int) -> World:
    """Some steps are alike, so that some are borrowed and some are sent."""
    return _world(step // 2 % _WORLDS)


@cache
def _world(seed: int) -> World:
    return make_world(rows=_ROWS, columns=_COLUMNS, groups=[range(RANKS)], seed=seed)


class Ranks:
    """64 ranks of one node: a channel each, a heartbeat each, and a sealed segment each for every step."""

    def __init__(self, server: Server, url: str) -> None:
        self._server, self._url = server, url
        self._clients = [StagingClient(server.target) for _ in range(RANKS)]
        self._over = threading.Event()
        self._step = 0
        registered = self._clients[0].register(
            url, staging=server.staging, store_options={}, keep_local=2, keep_last=2
        )
        self.run_key = registered.run_key
        self._threads = ThreadPoolExecutor(2 * RANKS, thread_name_prefix="rank")
        self._hearts = [self._threads.submit(self._beat, rank) for rank in range(RANKS)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for heart in self._hearts:
            heart.result(30)
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def _beat(self, rank: int) -> None:
        def pulses() -> Iterator[staging_pb2.RankPulse]:
            while not self._over.is_set():
                yield staging_pb2.RankPulse(run_key=self.run_key, rank=rank, step=self._step)
                self._over.wait(0.5)

        self._clients[rank].heartbeat(pulses())

    def save(self) -> CheckpointId:
        """One step: every rank seals and tells the server, all at once; returns when it is committed."""
        self._step += 1
        ident, world = CheckpointId(self._step, 1), world_of(self._step)

        def one(rank: int) -> None:
            seal(self._server.staging, self.run_key, ident, world, rank)
            self._clients[rank].seal(self.run_key, ident, rank)

        list(self._threads.map(one, range(RANKS)))
        self._server.wait_for(self.run_key, ident, timeout_s=60)
        return ident


def restore_all_at_once(
    target: str, url: str, ident: CheckpointId, *, clients: int, reads: int, processes: int
) -> list[float]:
    """Let ``clients``, with a channel each, read slices of ``ident`` at once and compare every byte.

    Returns:
        How long each client took from the common start to its last byte, seconds, ascending.
    """
    each = clients // processes
    command = [sys.executable, "-m", "tests.support.load", "--clients", str(each), str(reads), target, url]
    started = [
        subprocess.Popen(
            [*command, str(ident.step)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate(timeout=60)[1]
        told = []
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err[-3000:]
            told += json.loads(out)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return sorted(told)


def _be_clients(count: int, reads: int, target: str, url: str, step: int) -> None:
    weight = world_of(step).tensors["weight"]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RestoreClient(target)) for _ in range(count)]
        gate = threading.Barrier(count + 1)

        def read(number: int) -> float:
            gate.wait()
            began = time.monotonic()
            for turn in range(reads):
                row = (number * reads + turn) % (_ROWS - 8)
                found = clients[number].read_tensor(
                    url, "weight", checkpoint=str(step), box=Box((row, 0), (8, _COLUMNS))
                )
                assert bytes(found.data) == weight[row : row + 8].tobytes()
            return time.monotonic() - began

        with ThreadPoolExecutor(count) as pool:
            jobs = [pool.submit(read, number) for number in range(count)]
            print("ready", flush=True)
            sys.stdin.readline()
            gate.wait()
            print(json.dumps([job.result() for job in jobs]), flush=True)


def _long(minutes: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "store").mkdir()
        url = f"file://{folder}/store/run"
        with Server(root / "staging") as server, Ranks(server, url) as ranks:
            assert server.process is not None
            pid = server.process.pid
            print("step " + " ".join(f"{field.name:>11}" for field in fields(Usage)), flush=True)
            end, ident = time.monotonic() + 60 * minutes, CheckpointId(0, 1)
            while time.monotonic() < end or ident.step < 20:
                ident = ranks.save()
                if ident.step % 20 == 0:
                    _print(str(ident.step), Usage.of(pid, root / "staging", root / "store"))
            for round_ in range(3):
                took = restore_all_at_once(server.target, url, ident, clients=500, reads=2, processes=4)
                print(f"500 clients: median {took[250]:.2f} s, last {took[-1]:.2f} s")
                _print(f"r{round_}", Usage.of(pid, root / "staging", root / "store"))


def _print(name: str, usage: Usage) -> None:
    print(f"{name:4} " + " ".join(f"{getattr(usage, field.name):11}" for field in fields(Usage)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clients"]:
        _be_clients(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], int(sys.argv[6]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--minutes", type=float, default=2.0)
        _long(parser.parse_args().minutes)
