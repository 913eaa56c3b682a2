"""What the checksum of every chunk costs: the writer of sealed segments against one without it."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.accounting import Meter
from benchmarks.limits import RawFile
from benchmarks.options import Options
from benchmarks.report import Report
from ckpt.digest import digest
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.storage.direct import DirectFile, aligned_buffer, write_chunks
from ckpt.storage.durable import fsync_dir

__all__ = ["run"]

_THREADS = 4


def run(options: Options) -> Report:
    """Both write as many bytes, from warm memory, with as many threads and fdatasync, in turn."""
    nbytes = options.size(quick=24 << 20, full=256 << 20)
    report = Report(
        options.name("checksums"),
        f"{nbytes >> 20} MiB, chunks of {CHUNK_NBYTES >> 20} MiB, {_THREADS} threads, {options.place}",
    )
    raw = RawFile(nbytes)
    buffer = aligned_buffer(nbytes)
    buffer[:] = os.urandom(1 << 20) * (len(buffer) >> 20)
    meters: dict[str, list[Meter]] = {"without": [], "with": [], "digest": []}
    with options.folder() as root:
        for number in range(options.repeats(quick=1, full=7) + 1):
            for which, played in meters.items():
                path = root / which
                path.unlink(missing_ok=True)
                with Meter() as meter:
                    if which == "without":
                        raw.write(path, _THREADS, CHUNK_NBYTES)
                    elif which == "with":
                        _write_with(path, buffer)
                    else:
                        digest(buffer)
                if number:  # the first round is for warmth
                    played.append(meter)
    without = report.add("written, no checksum", _walls(meters["without"]), cpu_s=_cpus(meters["without"]))
    report.add(
        "written with a checksum per chunk",
        _walls(meters["with"]),
        over=without,
        inverse=True,
        bar=">= 0.9",
        cpu_s=_cpus(meters["with"]),
        note="what the flusher does",
    )
    report.add("checksum alone, one thread", _walls(meters["digest"]), over=without)
    return report


def _write_with(path: Path, buffer: memoryview) -> None:
    file = DirectFile(path, os.O_WRONLY | os.O_CREAT)
    try:
        write_chunks(file, buffer, len(buffer), chunk_nbytes=CHUNK_NBYTES, threads=_THREADS)
        os.fdatasync(file.fd)
    finally:
        file.close()
    fsync_dir(path.parent)


def _walls(meters: list[Meter]) -> list[float]:
    return [meter.cost.wall_s for meter in meters]


def _cpus(meters: list[Meter]) -> list[float]:
    return [meter.cost.cpu_s for meter in meters]
