"""Host memory that a save and a restore take beyond the state itself.

Private memory of the process and all it started, plus shared memory (so pages that two processes map count
once), at the peak of two saves with training between them, set-up included; less the peak of the training
alone; over the bytes of the state. One at a time: shared memory is that of the whole machine.
"""

from __future__ import annotations

import os
import time

from benchmarks.accounting import PeakMemory, sync_tree
from benchmarks.contestant import Contestant, ContestantError, Stage
from benchmarks.options import Options
from benchmarks.peers import PEERS, SAVERS, missing
from benchmarks.peers.ours import NO_LIBRARY, Nothing
from benchmarks.report import Report
from benchmarks.training import state_nbytes

__all__ = ["TITLES", "run"]

_MIB = 1 << 20
TITLES = [
    title
    for title, peer in SAVERS.items()
    if peer not in NO_LIBRARY and "no crc32" not in title and "blocking, sealed" not in title
]


def run(options: Options) -> Report:
    """Each library alone: set up, two saves with training between them, two restores."""
    nbytes = options.size(quick=24 << 20, full=256 << 20)
    report = Report(options.name("memory"), f"one rank, {nbytes >> 20} MiB state, {options.place}")
    shares: dict[str, list[float]] = {}
    with options.folder() as root:
        for number, title in enumerate([Nothing.title, *options.chosen(TITLES)]):
            if absent := missing(PEERS[title]):
                report.absent(title, "not installed: " + ", ".join(absent))
                continue
            each = Contestant(title, root / f"contestant-{number}", nbytes=nbytes, threads=options.threads)
            try:
                each.answer()
                found = each.play(saves_and_loads).value
            except ContestantError as error:
                report.absent(title, f"failed: {error}")
                continue
            finally:
                each.close()
            shares[title] = found["sizes"]
    _tabulate(report, shares)
    return report


def _tabulate(report: Report, found: dict[str, list[float]]) -> None:
    state, alone, _ = found.pop(Nothing.title)
    share = report.add("the state", [state / _MIB], unit="MiB")
    for title, (_, peak, load) in found.items():
        save = peak - alone
        is_ours = title.startswith("ckpt")
        report.add(
            f"{title}: save",
            [save / _MIB],
            unit="MiB",
            over=share,
            bar="<= 1.1" if is_ours else "",
            note="buffers and helper processes included",
        )
        if load >= 0:
            bar = "<= 0.1" if is_ours else ""
            report.add(f"{title}: restore", [load / _MIB], unit="MiB", over=share, bar=bar)


def saves_and_loads(stage: Stage) -> dict[str, list[float]]:
    """Bytes of the state, of all memory at the peak, and extra of a restore (-1 where it cannot restore)."""
    with PeakMemory(os.getpid()) as saving:
        paths = [_save(stage) for _ in range(2)]
    load = -1.0
    if "sealed" not in stage.peer.title and stage.peer.title != Nothing.title:
        stage.peer.before_load(paths[-1])
        stage.peer.load(paths[-1])  # the first one imports modules and starts threads
        stage.peer.before_load(paths[-1])
        with PeakMemory(os.getpid()) as loading:
            stage.peer.load(paths[-1])
        load = float(loading.extra_nbytes)
    return {"sizes": [float(state_nbytes(stage.training)), float(saving.peak_nbytes), load]}


def _save(stage: Stage):  # type: ignore[no-untyped-def]
    stage.training.step()
    path = stage.new_path()
    stage.peer.save(path)
    stage.peer.before_update()
    while not stage.peer.done():
        time.sleep(0.001)
    if not stage.peer.durable:
        sync_tree(path)
    return path
