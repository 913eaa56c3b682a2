"""``python -m benchmarks [NAME ...]``: measure; tables, JSON and plots, the latter in benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    catalog,
    checksums,
    codec,
    cost,
    links,
    memory,
    persist,
    replicas,
    reshard,
    restore,
    scale,
    stall,
    tiny,
    upload,
)
from benchmarks.options import Options
from benchmarks.report import RESULTS, Report

# name: (what runs it, the places where it is measured)
BENCHMARKS: dict[str, tuple[Callable[[Options], Report], tuple[str, ...]]] = {
    "stall": (stall.run, ("disk",)),
    "cost": (cost.run, ("disk",)),
    "persist": (persist.run, ("disk", "tmpfs")),
    "upload": (upload.run, ("disk", "tmpfs")),
    "restore": (restore.run, ("disk", "tmpfs")),
    "reshard": (reshard.run, ("disk",)),
    "replicas": (replicas.run, ("disk",)),
    "memory": (memory.run, ("disk",)),
    "checksums": (checksums.run, ("disk", "tmpfs")),
    "codec": (codec.run, ("disk",)),
    "links": (links.run, ("disk",)),
    "tiny": (lambda options: tiny.run(quick=options.quick, folder=options.disk), ("disk",)),
    "catalog": (catalog.run, ("disk",)),
    "scale": (lambda options: scale.run(quick=options.quick, folder=options.disk), ("disk",)),
}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmarks that ``argv`` names; all of them by default."""
    settings = _parser().parse_args(argv)
    # torch.distributed.checkpoint says at every call that it is used without a process group.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
    for name in settings.names or BENCHMARKS:
        measure, places = BENCHMARKS[name]
        for place in places:
            if settings.on in (None, place):
                _publish(measure(_options(settings, place)), settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which; default all")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: proves that it runs")
    parser.add_argument(
        "--on", choices=["disk", "tmpfs"], help="only there; default: all that tell something"
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: for temporary files")
    parser.add_argument("--only", default="", help="rows whose names contain one of these, comma-separated")
    parser.add_argument("--mib", type=int, help="size of the state")
    parser.add_argument("--repeats", type=int, help="rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads")
    parser.add_argument("--seconds", type=float, help="begin no round of a benchmark after so long")
    parser.add_argument("--add", action="store_true", help="add the repeats to those in the results folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where JSON and plots go")
    return parser


def _options(settings: argparse.Namespace, place: str) -> Options:
    return Options(
        quick=settings.quick,
        place=place,
        disk=settings.folder,
        only=tuple(part for part in settings.only.split(",") if part),
        mib=settings.mib,
        repeat=settings.repeats,
        threads=settings.threads,
        seconds=settings.seconds,
    )


def _publish(report: Report, settings: argparse.Namespace) -> None:
    path = settings.results / f"{report.name}.json"
    if settings.add and path.exists():
        report.merge(Report.from_json(json.loads(path.read_text())))
    report.publish(settings.results)


if __name__ == "__main__":
    main()
