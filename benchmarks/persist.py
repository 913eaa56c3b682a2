"""From the call of save until the state is durable on the local disk, while nothing else goes on.

Ratios are shares of the raw writer's speed: the fastest of several ways to write as many bytes, directly and
aligned, from warm memory, with fdatasync and a synced folder. Beside it CPU seconds; on tmpfs those of a bare
copy into tmpfs are the limit.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.accounting import Meter, sync_tree
from benchmarks.contestant import Contestant, Stage, Turn, contestants, rounds
from benchmarks.limits import WRITERS, RawFile
from benchmarks.options import Options
from benchmarks.peers import PEERS, SAVERS
from benchmarks.peers.ours import NO_LIBRARY, OURS
from benchmarks.report import Report

__all__ = ["TITLES", "run", "save_idle"]

TITLES = [title for title, peer in SAVERS.items() if peer not in NO_LIBRARY]


def run(options: Options) -> Report:
    """The raw writers take their turn in every round."""
    nbytes = options.size(quick=24 << 20, full=256 << 20)
    count = options.repeats(quick=1, full=5)
    report = Report(options.name("persist"), f"one rank, {nbytes >> 20} MiB state, idle, {options.place}")
    with options.folder() as root:
        limits = _RawWriters(root, nbytes)
        titles = options.chosen(TITLES)
        with contestants(titles, root / "contest", report, nbytes=nbytes, threads=options.threads) as running:
            rounds(running, report, 1, save_idle)  # buffers and helper processes are made at the first save

            def with_limits(each: Contestant, number: int) -> dict[str, object]:
                limits.play(number)
                return {}

            turns = rounds(running, report, count, save_idle, with_limits, time_is_up=options.time_is_up)
    _tabulate(report, limits, turns, nbytes)
    return report


class _RawWriters:
    """Measures every raw writer once per round."""

    def __init__(self, root: Path, nbytes: int) -> None:
        self._raw = RawFile(nbytes)
        self._root = root
        self._rounds = 0
        self.costs: dict[str, list[Meter]] = {title: [] for title in WRITERS}
        for title in WRITERS:
            self._write(title)

    def _write(self, title: str) -> Meter:
        threads, chunk_nbytes, in_place = WRITERS[title]
        path = self._root / f"raw-{threads}-{in_place}"
        if not in_place:
            path.unlink(missing_ok=True)
        with Meter() as meter:
            self._raw.write(path, threads, chunk_nbytes, in_place=in_place)
        return meter

    def play(self, number: int) -> None:
        """Take the turn of round ``number``, once."""
        if number < self._rounds:
            return
        self._rounds = number + 1
        for title in WRITERS:
            self.costs[title].append(self._write(title))


def _tabulate(report: Report, limits: _RawWriters, turns: dict[str, list[Turn]], nbytes: int) -> None:
    seconds = {title: [m.cost.wall_s for m in meters] for title, meters in limits.costs.items()}
    if not all(seconds.values()):
        return
    fastest = min(seconds, key=lambda title: statistics.median(seconds[title]))
    limit = None
    cpu_limit = statistics.median(meter.cost.cpu_s for meter in limits.costs[fastest])
    for title in sorted(seconds, key=lambda t: t != fastest):
        meters = limits.costs[title]
        row = report.add(
            title,
            seconds[title],
            durability="fsync file+dir",
            cpu_s=[meter.cost.cpu_s for meter in meters],
            foreign=max(meter.cost.foreign for meter in meters),
            note=_cpu_per_gb([meter.cost.cpu_s for meter in meters], nbytes)
            + ("; the limit" if limit is None else ""),
        )
        limit = limit or row
    ours = {each.title for each in OURS if each.durability == "sealed"}
    for title, played in turns.items():
        peer = PEERS[title]
        cpu = [turn.value["cpu_s"] for turn in played]
        report.add(
            title,
            [turn.value["durable_s"] for turn in played],
            over=limit,
            inverse=True,
            bar=">= 0.95" if title in ours else "",
            durability=peer.durability if peer.durable else "fsync file+dir (by the harness)",
            cpu_s=cpu,
            foreign=max(turn.cost.foreign for turn in played),
            note=f"{_cpu_per_gb(cpu, nbytes)}, {_times(cpu, cpu_limit)} the limit's; "
            f"itself: {peer.durability}, {statistics.median(turn.value['done_s'] for turn in played):.2f} s",
        )


def _times(cpu_s: list[float], limit_s: float) -> str:
    return f"{statistics.median(cpu_s) / max(limit_s, 0.01):.1f} x"  # 10 ms: what the counters resolve


def _cpu_per_gb(cpu_s: list[float], nbytes: int) -> str:
    return f"{statistics.median(cpu_s) / nbytes * 1e9:.2f} CPU s per GB"


def save_idle(stage: Stage) -> dict[str, float]:
    """One save with nothing beside it: seconds until the library is done and until it is durable, CPU."""
    path = stage.new_path()
    with Meter() as meter:
        began = time.perf_counter()
        stage.peer.save(path)
        stage.peer.before_update()
        while not stage.peer.done():
            time.sleep(0.001)
        done_s = time.perf_counter() - began
        if not stage.peer.durable:
            sync_tree(path)
    stage.peer.discard(path)
    return {"done_s": done_s, "durable_s": meter.cost.wall_s, "cpu_s": meter.cost.cpu_s}
