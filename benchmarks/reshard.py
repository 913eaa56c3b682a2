"""What another topology costs a restore: each of 12 moves against the restore of the same layout.

Everything comes from the store (a directory, in the page cache); time is that of the slowest rank. That the
bytes are right on every pair of layouts is what tests/dist/test_matrix.py shows.
"""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.layouts import Layout, barrier, build, label, open_manager
from benchmarks.options import Options
from benchmarks.report import Report
from tests.support.ranks import run_ranks

__all__ = ["MOVES", "run"]

_ONE: Layout = ("none", 1)
MOVES: tuple[tuple[Layout, Layout], ...] = (
    (("fsdp2", 4), ("fsdp2", 2)),
    (("pp", 2), ("fsdp2", 2)),
    (("ddp", 2), ("fsdp2", 2)),
    (("fsdp2", 2), ("fsdp2", 4)),
    (("tp", 2), ("fsdp2", 4)),
    (("hsdp", 4), ("fsdp2", 4)),
    (("fsdp2+tp", 4), ("fsdp2", 4)),
    (("fsdp2", 4), ("fsdp2", 3)),
    (("fsdp2", 4), ("tp", 2)),
    (("fsdp2", 2), ("pp", 2)),
    (("tp", 4), ("fsdp2+tp", 4)),
    (("fsdp2", 2), _ONE),
)
_LAYOUTS: tuple[Layout, ...] = tuple(dict.fromkeys(layout for move in MOVES for layout in move))


def run(options: Options) -> Report:
    """Every source is saved once; each target restores its sources, and its own layout, in turn."""
    nbytes = options.size(quick=12 << 20, full=96 << 20)
    count = options.repeats(quick=1, full=7)
    moves = MOVES[:1] if options.quick else MOVES
    report = Report(
        options.name("reshard"), f"{nbytes >> 20} MiB state, ranks of one thread each, store: {options.place}"
    )
    layouts = [each for each in _LAYOUTS if any(each in move for move in moves)]
    with options.folder() as root:
        for layout in layouts:
            run_ranks(layout[1], _save, root, layout, nbytes)
        for target in dict.fromkeys(move[1] for move in moves):
            sources = [target, *(source for source, onto in moves if onto == target)]
            ranks = run_ranks(target[1], _restore, root, target, sources, nbytes, count)
            seconds = {s: [max(r[s][n] for r in ranks) for n in range(count)] for s in sources}
            base = report.add(f"{label(target)} onto the same", seconds[target])
            for source in sources[1:]:
                what = f"{label(source)} onto {label(target)}"
                report.add(what, seconds[source], over=base, bar="<= 1.10")
    return report


def _number(layout: Layout) -> int:
    return _LAYOUTS.index(layout) + 1


def _save(rank: int, world: int, root: Path, layout: Layout, nbytes: int) -> None:
    model, optimizer = build(layout, rank, nbytes)
    with open_manager(_url(root), root / f"staging-{_number(layout)}", model, optimizer) as manager:
        manager.restore(start_over=True)
        manager.save(_number(layout))
    barrier()


def _restore(
    rank: int, world: int, root: Path, target: Layout, sources: list[Layout], nbytes: int, count: int
) -> dict[Layout, list[float]]:
    """Seconds of this rank for each source, round by round; the first round is for warmth."""
    model, optimizer = build(target, rank, nbytes)
    staging = root / f"staging-empty-{_number(target)}"
    found: dict[Layout, list[float]] = {source: [] for source in sources}
    with open_manager(_url(root), staging, model, optimizer, uploads=False) as manager:
        for number in range(count + 1):
            for source in sources[number % len(sources) :] + sources[: number % len(sources)]:
                barrier()
                began = time.perf_counter()
                manager.restore(_number(source))
                if number:
                    found[source].append(time.perf_counter() - began)
    barrier()
    return found


def _url(root: Path) -> str:
    return (root / "store" / "run").as_uri()
