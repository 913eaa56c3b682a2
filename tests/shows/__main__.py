"""Show what a restart can rely on: python -m tests.shows [NAME ...] [--kills N] [--seed S] [--repeat N]

Each show prints a table, its promises, and PASS or FAIL; the exit status is 0 if all pass.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.shows import recovery, speed
from tests.shows.kills import random_kills
from tests.shows.report import Report
from tests.support.s3 import Ministack

SHOWS = ("mid-save", "node-lost", "gpu-lost", "both-lost", "speed", "kills")
KILLS = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHOWS)}; default: all")
    parser.add_argument("--kills", type=int, default=KILLS, help="random kills of the show of that name")
    parser.add_argument("--seed", type=int, help="of the random kills, to run the same ones again")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of the show speed, per tier")
    args = parser.parse_args()
    if unknown := set(args.names) - set(SHOWS):
        parser.error(f"no such show: {', '.join(sorted(unknown))}")
    passed = []
    with tempfile.TemporaryDirectory(prefix="ckpt-shows-") as folder:
        s3 = Ministack(Path(folder))
        s3.start()
        shows: dict[str, Callable[[Path], Report]] = {
            "mid-save": recovery.killed_in_mid_save,
            "node-lost": recovery.node_lost,
            "gpu-lost": recovery.gpu_lost,
            "both-lost": recovery.both_copies_lost,
            "speed": lambda root: speed.local_against_throttled_store(root, s3, repeats=args.repeat),
            "kills": lambda root: random_kills(root, s3, kills=args.kills, seed=args.seed),
        }
        try:
            for name in args.names or SHOWS:
                root = Path(folder) / name
                root.mkdir()
                began = time.monotonic()
                report = shows[name](root)
                print(f"\n{report} ({time.monotonic() - began:.0f} s)", flush=True)
                passed.append(report.passed)
        finally:
            s3.kill()
    print(f"\n{sum(passed)} of {len(passed)} shows pass")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
