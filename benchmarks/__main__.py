"""``python -m benchmarks [NAME ...] [--quick] [--folder DIR]``."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from benchmarks import durable, restore, scale, stall, tiny

BENCHMARKS = {
    "stall": stall.run,
    "tiny": tiny.run,
    "durable": durable.run,
    "restore": restore.run,
    "scale": scale.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which; default all")
    parser.add_argument("--quick", action="store_true", help="small sizes: proves that it runs")
    parser.add_argument("--folder", type=Path, help="where to put data: a disk, or a tmpfs such as /dev/shm")
    options = parser.parse_args()
    # torch.distributed.checkpoint says at every call that it is used without a process group.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.checkpoint")
    for name in options.names or BENCHMARKS:
        BENCHMARKS[name](quick=options.quick, folder=options.folder).publish()


if __name__ == "__main__":
    main()
