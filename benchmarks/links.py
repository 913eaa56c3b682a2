"""Whether compression pays on the link there is: sealed to committed with it off, on, and left to the server.

A GPT trained on text saves after every step to an S3 server behind a link of a given rate, by way of the real
staging server. The first uploads of a run are raw, with samples: "auto" decides by what they measured. The
last ones count, with the bytes that the checkpoint takes in the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.codec import trained_model
from benchmarks.options import Options
from benchmarks.report import Report, Row
from benchmarks.s3_sink import Sink
from ckpt.format.ids import CheckpointId
from ckpt.format.manifest import stored_nbytes
from ckpt.ops.catalog import read_manifest
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import end_node
from tests.support.faultproxy import FaultProxy

__all__ = ["run"]

_RATES: tuple[float | None, ...] = (20e6, 100e6, None)
"""Bytes per second; None: loopback, with nothing between."""
_URL = "s3://bench/run"
_MODES = ("off", "on", "auto")
_WARM = 2  # saves before the one that counts


@dataclass(frozen=True, slots=True)
class _Upload:
    seconds: float
    nbytes: int


def run(options: Options) -> Report:
    """Every rate and mode has a run of its own."""
    dim = 64 if options.quick else 256
    steps, count = options.repeats(quick=2, full=60), 1 if options.quick else 3
    rates = _RATES[-1:] if options.quick else _RATES
    report = Report("links", "fp32 GPT and AdamW trained on text, from sealed to committed, S3 behind a link")
    with options.folder() as root, _environment():
        for rate in rates:
            off: Row | None = None
            for mode in _MODES:
                if options.time_is_up():
                    report.absent(f"{_label(rate)}: {mode}", "no time was left")
                    continue
                found = _uploads(root / f"{rate}-{mode}", rate, mode, steps=steps, dim=dim, count=count)
                row = report.add(
                    f"{_label(rate)}: {mode}",
                    [upload.seconds for upload in found],
                    over=off,
                    durability="committed",
                    note=f"{found[-1].nbytes / 1e6:.1f} MB of data stored",
                )
                off = off or row
    return report


def _label(rate: float | None) -> str:
    return "loopback" if rate is None else f"{rate / 1e6:.0f} MB/s"


@contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(Sink.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _uploads(root: Path, rate: float | None, mode: str, *, steps: int, dim: int, count: int) -> list[_Upload]:
    model, optimizer, step = trained_model(steps, dim=dim)
    found = []
    with Sink() as sink, FaultProxy(sink.port) as proxy:
        proxy.rate = rate
        endpoint = sink.options["endpoint_url"] if rate is None else proxy.endpoint
        with CheckpointManager(
            _URL,
            model=model,
            optimizer=optimizer,
            staging_dir=root / "staging",
            store_options={**sink.options, "endpoint_url": endpoint},
            mode="blocking",
            compression=mode,
        ) as manager:
            manager.restore()
            for number in range(_WARM + count):
                step()
                handle = manager.save(steps + number + 1)
                handle.local_completion.result(60)
                began = time.perf_counter()
                handle.upload_completion.result(120)
                seconds = time.perf_counter() - began
                if number >= _WARM:
                    found.append(_Upload(seconds, _stored(sink, handle.ident)))
        end_node(root / "staging")
    return found


def _stored(sink: Sink, ident: CheckpointId) -> int:
    """Bytes of data that the committed checkpoint takes in the store."""
    with closing(open_store(_URL, sink.options)) as store:
        return stored_nbytes(read_manifest(store, ident))
