"""Time of a restore into live tensors, cold and warm, every byte compared with what was saved.

Cold: the files' pages are dropped from the page cache before; the limit is the fastest raw reader of as many
bytes into warm memory. Warm: the files have just been read; the limit is one memory copy. Before every load
the state is overwritten, after it compared with that at the save.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks.accounting import Meter, forget_cached, sync_tree, warm_cache
from benchmarks.contestant import Stage, Turn, contestants, rounds
from benchmarks.limits import READERS, RawFile
from benchmarks.options import Options
from benchmarks.peers import PEERS
from benchmarks.peers.native import Dcp, TorchSave
from benchmarks.peers.others import Safetensors, TorchCheckpointing, TorchSnapshot
from benchmarks.peers.ours import BlockingCommitted, Copy, StoreOnly
from benchmarks.report import Report, Row

__all__ = ["TITLES", "keep_one_save", "load", "run"]

# One for each way to load: the others read what these read, by the same calls.
TITLES = [
    each.title
    for each in (
        Copy,
        BlockingCommitted,
        StoreOnly,
        TorchSave,
        Dcp,
        Safetensors,
        TorchCheckpointing,
        TorchSnapshot,
    )
]
_NAMES = {
    BlockingCommitted.title: "ckpt, from local NVMe",
    TorchSave.title: "torch.load",
    Dcp.title: "DCP load",
    TorchSnapshot.title: "torchsnapshot",
}


def run(options: Options) -> Report:
    """Cold (on disk) and warm loads of each library, and the raw readers, in every round."""
    nbytes = options.size(quick=24 << 20, full=256 << 20)
    count = options.repeats(quick=1, full=5)
    report = Report(
        options.name("restore"),
        f"one rank, {nbytes >> 20} MiB state, {options.threads} threads, {options.place}; "
        "ckpt alone verifies digests",
    )
    temperatures = ("cold", "warm") if options.place == "disk" else ("warm",)
    with options.folder() as root:
        readers = _RawReaders(root, nbytes)
        titles = options.chosen(TITLES, always=[Copy.title])
        with contestants(titles, root / "contest", report, nbytes=nbytes, threads=options.threads) as running:
            rounds(running, report, 1, keep_one_save)
            rounds(running, report, 1, load, lambda each, number: {"cold": False})
            turns: dict[str, dict[str, list[Turn]]] = {each: {} for each in temperatures}
            for number in range(count):
                if number and options.time_is_up():
                    break
                for temperature in temperatures:
                    cold = temperature == "cold"
                    readers.play(cold=cold)
                    found = rounds(running, report, 1, load, lambda each, n, c=cold: {"cold": c}, seed=number)
                    for title, played in found.items():
                        turns[temperature].setdefault(title, []).extend(played)
    for temperature in temperatures:
        _tabulate(report, temperature, readers, turns[temperature])
    return report


class _RawReaders:
    """Measures every raw reader once per round."""

    def __init__(self, root: Path, nbytes: int) -> None:
        self._raw = RawFile(nbytes)
        self._path = root / "raw"
        self._raw.write(self._path, 4, 8 << 20)
        self.costs: dict[tuple[bool, str], list[Meter]] = {}

    def play(self, *, cold: bool) -> None:
        for title, (threads, chunk_nbytes, direct) in READERS.items():
            (forget_cached if cold else warm_cache)(self._path)
            with Meter() as meter:
                self._raw.read(self._path, threads, chunk_nbytes, direct=direct)
            self.costs.setdefault((cold, title), []).append(meter)


def _tabulate(report: Report, temperature: str, readers: _RawReaders, turns: dict[str, list[Turn]]) -> None:
    limits = {
        title: report.add(
            f"{temperature}: {title}",
            [meter.cost.wall_s for meter in meters],
            cpu_s=[meter.cost.cpu_s for meter in meters],
        )
        for (cold, title), meters in readers.costs.items()
        if cold == (temperature == "cold")
    }
    copy = report.add(
        f"{temperature}: one memory copy", [turn.value["load_s"] for turn in turns.pop(Copy.title, [])]
    )
    limit = copy if temperature == "warm" else min(limits.values(), key=lambda row: row.median)
    bar = ">= 0.5" if temperature == "warm" else ">= 0.95"
    for title, played in turns.items():
        _add(report, temperature, title, played, limit, bar=bar if PEERS[title] is BlockingCommitted else "")


def _add(report: Report, temperature: str, title: str, turns: list[Turn], limit: Row, *, bar: str) -> None:
    wrong = sum(turn.value["wrong"] for turn in turns)
    if wrong:
        report.absent(f"{temperature}: {title}", f"{wrong:.0f} tensors came back with other bytes")
        return
    cpu = [turn.value["cpu_s"] for turn in turns]
    report.add(
        f"{temperature}: {_NAMES.get(title, title)}",
        [turn.value["load_s"] for turn in turns],
        over=limit,
        inverse=True,
        bar=bar,
        cpu_s=cpu,
        foreign=statistics.median(turn.cost.foreign for turn in turns),
        note="bytes as saved",
    )


def keep_one_save(stage: Stage) -> None:
    """Save the live state, durably, for the loads to come."""
    path = stage.new_path()
    stage.peer.save(path)
    stage.peer.before_update()
    while not stage.peer.done():
        time.sleep(0.001)
    if not stage.peer.durable:
        sync_tree(path)
    stage.kept = {"path": path, "digest": stage.training.digest()}


def load(stage: Stage, *, cold: bool) -> dict[str, float]:
    """Load what was kept; seconds, CPU seconds, and how many tensors have other bytes than at the save."""
    stage.training.scramble()
    stage.peer.before_load(stage.kept["path"])
    (forget_cached if cold else warm_cache)(stage.folder)
    with Meter() as meter:
        stage.peer.load(stage.kept["path"])
    found = stage.training.digest()
    wrong = [name for name, digest in stage.kept["digest"].items() if found.get(name) != digest]
    return {"load_s": meter.cost.wall_s, "cpu_s": meter.cost.cpu_s, "wrong": float(len(wrong))}
