"""How long a save keeps the training thread: the first save of a process, and later ones.

Blocked time is that of the call and of the wait before the optimizer step. It is compared with one copy of
the same state into warm memory, made by another process in the same round; overlapped saves of ours with the
training step, too.
"""

from __future__ import annotations

import time

from benchmarks.contestant import Stage, Turn, contestants, rounds
from benchmarks.options import Options
from benchmarks.peers import SAVERS
from benchmarks.peers.ours import Copy, Floor, Nothing
from benchmarks.report import Report, Row

__all__ = ["TITLES", "one_save", "run"]

TITLES = [
    title for title, peer in SAVERS.items() if peer not in (Nothing, Floor) and "committed" not in title
]
_BARS = {"first": "<= 1.10", "later": "<= 1.05"}


def run(options: Options) -> Report:
    """Processes are started anew for every repeat: each has one first save."""
    nbytes = options.size(quick=24 << 20, full=256 << 20)
    starts, later = options.repeats(quick=1, full=7), 1 if options.quick else 2
    report = Report(
        options.name("stall"),
        f"one rank, {nbytes >> 20} MiB state, {options.threads} compute threads, {options.place}",
    )
    first_turns: dict[str, list[Turn]] = {}
    later_turns: dict[str, list[Turn]] = {}
    with options.folder() as root:
        titles = options.chosen(TITLES, always=[Copy.title])
        for start in range(starts):
            known = Report("", "") if start else report  # what is absent is said once
            folder = root / f"start-{start}"
            with contestants(titles, folder, known, nbytes=nbytes, threads=options.threads) as running:
                for found, count in ((first_turns, 1), (later_turns, later)):
                    turns = rounds(
                        running, report, count, one_save, seed=start, time_is_up=options.time_is_up
                    )
                    for title, played in turns.items():
                        found.setdefault(title, []).extend(played)
            if options.time_is_up():
                break
    _tabulate(report, first_turns, later_turns)
    return report


def _tabulate(report: Report, first: dict[str, list[Turn]], later: dict[str, list[Turn]]) -> None:
    copy = report.add("one warmed copy", _stalls(later.pop(Copy.title)), note="the limit of a blocking save")
    first.pop(Copy.title)
    step = report.add("training step", [t.value["step_s"] for turns in later.values() for t in turns])
    for title in later:
        for which, turns in (("first", first[title]), ("later", later[title])):
            _add(
                report,
                f"{title}: {which}",
                turns,
                copy,
                bar=_BARS[which] if "ckpt, blocking" in title else "",
            )
        if "ckpt, overlapped" in title:
            _add(report, f"{title}: later, of a step", later[title], step, bar="<= 0.01")


def _add(report: Report, what: str, turns: list[Turn], over: Row, *, bar: str) -> None:
    foreign = max(turn.cost.foreign for turn in turns)
    report.add(what, _stalls(turns), over=over, bar=bar, foreign=foreign)


def _stalls(turns: list[Turn]) -> list[float]:
    return [turn.value["stall_s"] for turn in turns]


def one_save(stage: Stage) -> dict[str, float]:
    """Train a little, save, train until the save is complete; seconds of stall and of a step without."""
    training, peer = stage.training, stage.peer
    steps = []
    for _ in range(2):
        began = time.perf_counter()
        training.step()
        steps.append(time.perf_counter() - began)
    path = stage.new_path()
    began = time.perf_counter()
    peer.save(path)
    stall = time.perf_counter() - began
    is_done = False
    while not is_done:
        training.forward_backward()
        began = time.perf_counter()
        peer.before_update()
        stall += time.perf_counter() - began
        training.update()
        is_done = peer.done()
    peer.discard(path)
    return {"stall_s": stall, "step_s": min(steps)}
