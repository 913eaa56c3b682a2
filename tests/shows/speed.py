"""How much faster a restart is from the node's own disk than from a store behind a slow link."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tests.shows.job import open_job, read
from tests.shows.report import Report
from tests.support.chain import ROOT
from tests.support.s3 import Ministack, free_port, start_process, stop_process
from tests.support.server import eventually

__all__ = ["link", "local_against_throttled_store"]

RATE = 50e6  # bytes per second
WIDTH, BLOCKS = 512, 8  # 8 * 512**2 * 8 parameters and their momentum: 128 MiB


@contextmanager
def link(root: Path, upstream: int, rate: float) -> Iterator[int]:
    """A link to a server on loopback; its port."""
    port = free_port()
    argv = [sys.executable, "-m", "tests.shows.link", str(port), str(upstream), str(rate)]
    process = start_process(argv, env={"PYTHONPATH": str(ROOT)}, cwd=root, log=root / "link.log")
    try:
        eventually(lambda: _listens(port), what="the link listens")
        yield port
    finally:
        stop_process(process)


def _listens(port: int) -> bool:
    text = Path("/proc/net/tcp").read_text()
    return any(
        line.split()[1] == f"0100007F:{port:04X}" and line.split()[3] == "0A"
        for line in text.splitlines()[1:]
    )


def local_against_throttled_store(
    root: Path, s3: Ministack, *, blocks: int = BLOCKS, repeats: int = 1
) -> Report:
    """The same step read from NVMe, and, with that gone, from the store; the median of ``repeats`` each."""
    report = Report(
        f"restore from the local tier against a store at {RATE / 1e6:.0f} MB/s",
        ("read from", "bytes", "seconds", "from", "to", "n", "MB/s"),
    )
    url = f"s3://{s3.make_bucket()}/run"
    times = {}
    with link(root, s3.port, RATE) as port:
        slow = s3.env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        with open_job(root / "job", url=url, environment=s3.env) as job:
            job.boot("a")
            life = {"width": WIDTH, "blocks": blocks}
            job.run("a", until=1, saves=(1,), wait="upload", **life)
            job.environment = slow
            local = [job.run("a", **life) for _ in range(1 + repeats)][1:]  # the first one finds cold caches
            remote = []
            for _ in range(repeats):
                job.lose("a")
                job.boot("a")
                remote.append(job.run("a", **life))
            for name, runs in (("local", local), ("remote", remote)):
                nbytes, seconds = read(runs[0], name), sorted(map(_seconds, runs))
                times[name] = median(seconds)
                rate = nbytes / times[name] / 1e6
                spread = (f"{seconds[0]:.3f}", f"{seconds[-1]:.3f}", len(seconds))
                report.row(name, nbytes, f"{times[name]:.3f}", *spread, f"{rate:.0f}")
                same = all(told[0].state == local[0][0].state for told in runs)
                report.check(nbytes > 0 and same, f"all of it, bit by bit, {name}")
            alone = all(read(told, "remote") == 0 for told in local) and all(
                read(told, "local") == 0 for told in remote
            )
            report.check(alone, "each from one tier alone")
    ratio = times["remote"] / times["local"]
    report.check(ratio >= 5, f"{ratio:.1f} times as fast (promised: 5)")
    return report


def _seconds(told: list) -> float:
    return max(float(one.done["elapsed_s"]) for one in told)
