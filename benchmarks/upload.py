"""From sealed on the local disk to committed in an object store, beside a client that only sends.

Both send as many bytes, from a file that is not in the page cache, in parts of the same size and as many at a
time, to the same server (benchmarks.s3_sink, which costs next to nothing). Ours is the real staging server,
with everything that a commit takes; its CPU is that of the server process. The raw client is obstore: one
multipart put, from a mapping of the file or from memory.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.accounting import Cost, Meter, forget_cached
from benchmarks.contestant import Stage, Turn, contestants, rounds
from benchmarks.limits import RawFile
from benchmarks.options import Options
from benchmarks.peers.ours import ToObjectStore
from benchmarks.report import Report
from benchmarks.s3_sink import Sink
from ckpt_server.settings import Settings

__all__ = ["run", "upload_one"]

_SOURCES = ("file", "memory")


def run(options: Options) -> Report:
    """The raw client and the staging server take turns."""
    nbytes = options.size(quick=24 << 20, full=384 << 20)
    count = options.repeats(quick=1, full=5)
    defaults = Settings(staging=Path())
    part_nbytes, concurrency = defaults.part_nbytes, defaults.upload_concurrency
    report = Report(
        options.name("upload"),
        f"one rank, {nbytes >> 20} MiB state, parts of {part_nbytes >> 20} MiB, {concurrency} at a time, "
        f"segment on {options.place}, S3 on loopback",
    )
    with options.folder() as root, Sink() as sink:
        path = root / "raw"
        RawFile(nbytes).write(path, 4, 8 << 20)
        client = RawClient(sink.options["endpoint_url"], path, part_nbytes, concurrency)
        titles = [ToObjectStore.title]
        raw: dict[str, list[tuple[float, Cost]]] = {source: [] for source in _SOURCES}
        turns: list[Turn] = []
        with contestants(
            titles,
            root / "contest",
            report,
            nbytes=nbytes,
            threads=options.threads,
            environment={**Sink.environment(), "CKPT_BENCH_STORE_OPTIONS": json.dumps(sink.options)},
        ) as running:
            rounds(running, report, 1, upload_one)
            for number in range(count):
                if number and options.time_is_up():
                    break
                for source in _SOURCES:
                    raw[source].append(client.send(source))
                found = rounds(running, report, 1, upload_one, seed=number)
                turns += found.get(ToObjectStore.title, [])
        client.close()
    _tabulate(report, raw, turns, nbytes)
    return report


def _tabulate(
    report: Report, raw: dict[str, list[tuple[float, Cost]]], turns: list[Turn], nbytes: int
) -> None:
    rows, cpu_rows = {}, {}
    for source, sent in raw.items():
        cpu = [cost.cpu_s for _, cost in sent]
        rows[source] = report.add(
            f"raw client (obstore) from {source}",
            [seconds for seconds, _ in sent],
            cpu_s=cpu,
            foreign=max(cost.foreign for _, cost in sent),
            note=_per_gb(cpu, nbytes),
        )
        cpu_rows[source] = report.add(f"CPU: raw client from {source}", cpu)
    if not turns:
        return
    seconds = [turn.value["upload_s"] for turn in turns]
    cpu = [turn.value["cpu_s"] for turn in turns]
    foreign = max(turn.cost.foreign for turn in turns)
    report.add(
        "ckpt: sealed to committed",
        seconds,
        over=rows["file"],
        inverse=True,
        bar=">= 0.95",
        durability="committed",
        cpu_s=cpu,
        foreign=foreign,
        note=_per_gb(cpu, nbytes) + "; digests verified, index and manifest included",
    )
    report.add("CPU: ckpt staging server", cpu, over=cpu_rows["file"], bar="<= 1.15")


def _per_gb(cpu_s: list[float], nbytes: int) -> str:
    return f"{statistics.median(cpu_s) / nbytes * 1e9:.2f} CPU s per GB"


def upload_one(stage: Stage) -> dict[str, float]:
    """Change the state, save it, and follow the upload; seconds and the server's CPU from seal to commit."""
    peer: Any = stage.peer
    stage.training.step()  # a chunk that is as it was would not be sent again
    handle = peer.save_now()
    with Meter(peer.server_pid()) as meter:  # seal and upload hardly overlap; what does counts against us
        handle.local_completion.result(60)
        began = time.perf_counter()
        handle.upload_completion.result(120)
        seconds = time.perf_counter() - began
    return {"upload_s": seconds, "cpu_s": meter.cost.cpu_s}


class RawClient:
    """obstore in a process of its own: this module as a program."""

    def __init__(self, endpoint: str, path: Path, part_nbytes: int, concurrency: int) -> None:
        self._path = path
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.upload",
                endpoint,
                str(path),
                str(part_nbytes),
                str(concurrency),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **Sink.environment()},
        )
        self._answer()

    def send(self, source: str) -> tuple[float, Cost]:
        """Upload the file once; return its seconds and what the process used."""
        assert self._process.stdin is not None
        forget_cached(self._path)
        with Meter(self._process.pid) as meter:
            self._process.stdin.write(source + "\n")
            seconds = float(self._answer())
        return seconds, meter.cost

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the raw client died")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _serve(endpoint: str, path: str, part_nbytes: int, concurrency: int) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "bench",
        config={"endpoint": endpoint, "region": "us-east-1", "unsigned_payload": True},
        client_options={"allow_http": True},
    )
    with Path(path).open("rb") as file:
        memory = memoryview(bytearray(file.read()))
    print(0.0, flush=True)
    for number, line in enumerate(sys.stdin):
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        source = memory if line.strip() == "memory" else memoryview(mapped)
        began = time.perf_counter()
        obstore.put(
            store,
            f"raw/{number}",
            source,
            use_multipart=True,
            chunk_size=part_nbytes,
            max_concurrency=concurrency,
        )
        print(time.perf_counter() - began, flush=True)
        # The client may still hold the view for a moment: the mapping goes with the last reference.


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
