"""Losses of ranks, nodes and copies: what is restored, and where its bytes come from."""

from __future__ import annotations

import json
from pathlib import Path

from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import list_checkpoints
from ckpt.storage.open import open_store
from ckpt.storage.peerfile import replicas_dir
from tests.shows.job import TIERS, Told, open_job, read, until
from tests.shows.report import Report

__all__ = ["both_copies_lost", "gpu_lost", "killed_in_mid_save", "node_lost"]

BYTES = ("", "step", "ranks", *TIERS)
TOLERANCE = 1e-5


def _row(report: Report, title: str, told: list[Told], ranks: str) -> None:
    report.row(title, told[0].start, ranks, *(read(told, tier) for tier in TIERS))


def node_lost(root: Path) -> Report:
    """A node is lost with its disk; another one takes its ranks."""
    report = Report("node lost with its disk: bytes read by the restart", BYTES)
    step = CheckpointId(4, 1)
    with open_job(root) as job:
        job.boot("a", "b")
        job.run("ab", until=4, saves=(4,), wait="upload", factor=2)
        first = job.run("ab", factor=2)
        until(lambda: job.holders(step, 1) == ["a"], "a replica of b's part")
        lost = job.nbytes(step, 1)
        job.lose("b")
        job.boot("c")
        told = job.run("ac", factor=2)
        for rank, node in enumerate("ac"):
            _row(report, f"node {node}", told[rank : rank + 1], str(rank))
        report.check(
            all(one.start == 4 and one.state == first[0].state for one in told), "step 4, bit by bit"
        )
        report.check(read(told, "remote") == 0, "nothing came from the store, although it was committed")
        report.check(
            read(told, "peer") == lost, f"from the peer came the lost node's {lost:,} bytes, no more"
        )
    return report


def gpu_lost(root: Path) -> Report:
    """The ranks of a node are gone, its host lives; another node takes over."""
    report = Report("GPU lost, host alive: bytes read by the restart", BYTES)
    step = CheckpointId(4, 2)
    with open_job(root) as job:
        job.boot("a", "b")
        job.run(
            "ab", until=2, saves=(2,), wait="upload"
        )  # else the store would be too broken to begin a run in
        with job.store_without_uploads():
            job.run("ab", until=4, saves=(4,), wait="local")
            first = job.run("ab")
            old = job.nbytes(step, 1)
            job.boot("c")
            told = job.run("ac")
            for rank, node in enumerate("ac"):
                _row(report, f"node {node}", told[rank : rank + 1], str(rank))
        report.check(
            all(one.start == 4 and one.state == first[0].state for one in told), "step 4, bit by bit"
        )
        report.check(bool(told[0].done["staged"]), "a step that was never committed")
        report.check(read(told, "remote") == 0, "nothing came from the store")
        report.check(read(told[1:], "peer") == old, f"the old host gave its {old:,} bytes")
    return report


def both_copies_lost(root: Path) -> Report:
    """A segment and its replica are gone before the commit."""
    report = Report("both copies lost: back to the last commit", BYTES)
    with open_job(root) as job:
        job.boot("a", "b", "c")
        job.run("abc", until=2, saves=(2,), wait="upload", factor=2)
        first = job.run("abc", factor=2)
        ident = CheckpointId(4, first[0].attempt + 1)
        with job.store_without_uploads():
            job.run("abc", until=4, saves=(4,), wait="peer", factor=2)
            (holder,) = job.holders(ident, 1)
            kept = replicas_dir(job.staging(holder))
            for path in (kept.index_path(job.run_key, ident, 1), kept.segment_path(job.run_key, ident, 1)):
                path.unlink()
            job.lose("b")
        job.boot("d")
        told = job.run("adc", factor=2)
        for rank, node in enumerate("adc"):
            _row(report, f"node {node}", told[rank : rank + 1], str(rank))
        report.check(
            all(one.start == 2 and one.state == first[0].state for one in told),
            "step 2, bit by bit, on all ranks",
        )
        losses = [loss for one in told for loss in one.lost]
        report.check(len(losses) == 1, "it is said once")
        said = json.dumps(losses)
        named = [f'"{ident}"', '"ranks": "1"', "rack-b", f'"restored": "{CheckpointId(2, 1)}"']
        report.check(all(text in said for text in named), f"and names step, rank, node: {said}")
    return report


def killed_in_mid_save(root: Path) -> Report:
    """kill -9 of a rank and its flusher between copy and seal; resumed on other topologies."""
    head = ("", "ranks", "from step", "to step", "last loss", "largest difference")
    report = Report("killed in mid-save, resumed on other topologies", head)
    with open_job(root / "reference") as job:
        job.boot("a")
        reference = job.run("aaaa", until=12)[0].losses
        report.row("uninterrupted, fsdp2", 4, 0, 12, f"{reference[11]:.6f}", "")
    with open_job(root / "run") as job:
        job.boot("a")
        job.run("aaaa", until=6, saves=(3, 6), dies=(1, 6))
        killed = CheckpointId(6, 1)
        worst = 0.0
        previous: list[Told] = []
        for kind, nodes, stop in (("tp", "aa", 8), ("fsdp2+tp", "aaaa", 10), ("fsdp2", "aaaa", 12)):
            told = job.run(nodes, kind=kind, until=stop, saves=(stop,))
            gap = max(abs(loss / reference[step] - 1) for step, loss in told[0].losses.items())
            worst = max(worst, gap)
            last = told[0].losses[stop - 1]
            report.row(kind, len(nodes), told[0].start, stop, f"{last:.6f}", f"{gap:.1e}")
            expected = max(previous[0].losses) + 1 if previous else 3
            report.check(told[0].start == expected, f"{kind} goes on at step {expected}")
            previous = told
        store = open_store(job.url)
        listed = [info.ident for info in list_checkpoints(store)]
        store.close()
        report.check(killed not in listed, f"{killed}, whose save was interrupted, is never visible")
        report.check(worst <= TOLERANCE, f"no loss differs by more than {TOLERANCE:g}, relative")
    return report
