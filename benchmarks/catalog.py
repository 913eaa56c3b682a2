"""What reading the catalogue costs with 10 to 100,000 checkpoints: latest, list, verify, prune, sweep.

In memory, where it is our own CPU; in a directory; and in an S3 server, where it is requests. 100,000 of the
first two take most of a minute, S3 after them another (``--only S3`` takes it alone). (The server is
radosgw where ``python -m tests.support.ceph --install`` was run, else a functional emulator, which is slow: a
row's name says which.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from benchmarks.options import Options
from benchmarks.report import Report
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import manifest_key
from ckpt.format.manifest import encode_manifest
from ckpt.ops import catalog
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.ops.sweep import sweep
from ckpt.ops.threads import map_in_threads
from ckpt.ops.verify import verify_quick
from ckpt.storage.base import Store
from ckpt.storage.local import LocalStore
from ckpt.storage.open import open_store
from tests.support.builders import CountingStore, build_checkpoint, claim, memory_store
from tests.support.ceph import CACHE, Radosgw, UnavailableHere, install
from tests.support.s3 import Ministack

__all__ = ["run"]

COUNTS = (10, 100, 1000, 10_000, 100_000)
_MOST_IN_S3 = 10_000
_NO_TIME = "no time was left"
_S3_START_S = 20.0
_PUTS_AT_A_TIME = 16

Put = Callable[[tuple[str, bytes]], None]
Open = Callable[[int], tuple[Store, Put]]


def run(options: Options) -> Report:
    """A whole newest checkpoint, manifests of the others; a listing counts as a request per 1000 keys."""
    counts = COUNTS[:3] if options.quick else COUNTS
    report = Report(options.name("catalog"), f"{counts[0]} to {counts[-1]} checkpoints of one rank each")
    in_s3 = [count for count in counts if count <= _MOST_IN_S3]
    chosen = options.chosen(["memory", "directory", "S3"])
    with options.folder() as folder:
        if "memory" in chosen:
            _grow(report, options, "memory", _in_memory, counts)
        if "directory" in chosen:
            _grow(report, options, "directory", partial(_in_directory, folder), counts)
        if "S3" not in chosen:
            return report
        if not options.has_time_for(_S3_START_S):
            _leave_out(report, "S3", in_s3)
            return report
        try:
            with _s3_server(folder) as server:
                name = f"S3 ({type(server).__name__})"
                _grow(report, options, name, partial(_in_s3, server, server.make_bucket()), in_s3)
        except RuntimeError as error:  # the emulator is not installed, or did not come up
            report.absent("S3", str(error))
    return report


def _grow(report: Report, options: Options, title: str, open_one: Open, counts: Sequence[int]) -> None:
    """Measure with one count after the other, as far as the time goes."""
    expected_s = before_s = 0.0
    for number, count in enumerate(counts):
        if number and not options.has_time_for(expected_s):
            _leave_out(report, title, counts[number:])
            return
        began = time.monotonic()
        store, put = open_one(count)
        _fill(store, count, put)
        for what, seconds, note in _measured(CountingStore(store)):
            report.add(f"{what}, {title}, {count} checkpoints", [seconds], note=note)
        took_s = time.monotonic() - began
        # What grew grows with the number, and the next is ten times this one; the rest is the start.
        expected_s = took_s + 10 * max(took_s - before_s, 0.0) if number else took_s
        before_s = took_s


def _leave_out(report: Report, title: str, counts: Sequence[int]) -> None:
    for count in counts:
        report.absent(f"{title}, {count} checkpoints", _NO_TIME)


def _in_memory(count: int) -> tuple[Store, Put]:
    del count
    store = memory_store()
    return store, lambda item: store.put(*item)


def _in_directory(folder: Path, count: int) -> tuple[Store, Put]:
    path = folder / f"run{count}"

    def put(item: tuple[str, bytes]) -> None:  # without the fsync of each, which is not what is measured
        (path / item[0]).write_bytes(item[1])

    return LocalStore(path), put


def _in_s3(server: Radosgw | Ministack, bucket: str, count: int) -> tuple[Store, Put]:
    store = open_store(f"s3://{bucket}/run{count}", server.options)
    return store, lambda item: store.put(*item)


@contextlib.contextmanager
def _s3_server(folder: Path) -> Iterator[Radosgw | Ministack]:
    gateway: Radosgw | None = None
    if (CACHE / "root").is_dir():
        with contextlib.suppress(UnavailableHere):
            gateway = Radosgw(install()).start()
    if gateway is not None:
        try:
            yield gateway
        finally:
            gateway.stop()
        return
    emulator = Ministack(folder / "ministack")
    emulator.start()
    try:
        yield emulator
    finally:
        emulator.kill()


def _fill(store: Store, count: int, put: Put) -> None:
    claim(store)
    ident = build_checkpoint(store, count, world_size=1).ident
    manifest = catalog.read_manifest(store, ident)
    others: list[tuple[str, bytes]] = []
    for step in range(1, count):
        other = CheckpointId(step, 1)
        manifest.id.CopyFrom(other.to_proto())
        others.append((manifest_key(other), encode_manifest(manifest)))
    # A directory and a memory are quicker with one thread than with many.
    workers = _PUTS_AT_A_TIME if store.url.startswith("s3:") else 1
    map_in_threads(put, others, workers=workers)


def _measured(store: CountingStore) -> Iterator[tuple[str, float, str]]:
    def latest() -> None:
        catalog.latest(store)

    def verify() -> None:
        ident = catalog.latest(store)
        if ident is None or list(verify_quick(catalog.load_checkpoint(store, ident))):
            raise RuntimeError("the newest checkpoint is not whole")

    def prune() -> None:
        execute_prune(store, plan_retention(store, keep_last=5), dry_run=True)

    work: dict[str, Callable[[], object]] = {
        "latest": latest,
        "first page of list": lambda: list(islice(catalog.list_checkpoints(store), 20)),
        "list": lambda: sum(1 for _ in catalog.list_checkpoints(store)),
        "verify quick": verify,
        "sweep": lambda: list(sweep(store, older_than_s=3600.0, dry_run=True)),
        "prune (dry run, keep 5)": prune,
    }
    for what, call in work.items():
        store.reset()
        began = time.perf_counter()
        call()
        yield what, time.perf_counter() - began, f"{store.total} requests"
