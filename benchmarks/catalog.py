"""What reading the catalogue costs with 10 to 100,000 checkpoints: latest, list, verify, prune, sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from benchmarks.options import Options
from benchmarks.report import Report
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import attempt_key, manifest_key
from ckpt.format.manifest import encode_manifest
from ckpt.ops import catalog
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.ops.sweep import sweep
from ckpt.ops.verify import verify_quick
from ckpt.storage.base import Store
from ckpt.storage.local import LocalStore
from tests.support.builders import CountingStore, build_checkpoint, claim, memory_store

__all__ = ["run"]

COUNTS = (10, 100, 1000, 10_000, 100_000)


def run(options: Options) -> Report:
    """A whole newest checkpoint, manifests of the others; a listing counts as a request per 1000 keys."""
    counts = COUNTS[:3] if options.quick else COUNTS
    report = Report(options.name("catalog"), f"{counts[0]} to {counts[-1]} checkpoints of one rank each")
    with options.folder() as folder:
        for count in counts:
            path = folder / f"run{count}"
            for title, inner in (("memory", memory_store()), ("directory", LocalStore(path))):
                _fill(inner, count, path if title == "directory" else None)
                for what, seconds, note in _measured(CountingStore(inner)):
                    report.add(f"{what}, {title}, {count} checkpoints", [seconds], note=note)
    return report


def _fill(store: Store, count: int, folder: Path | None) -> None:
    claim(store)
    ident = build_checkpoint(store, count, world_size=1).ident
    manifest = catalog.read_manifest(store, ident)
    for step in range(1, count):
        other = CheckpointId(step, 1)
        manifest.id.CopyFrom(other.to_proto())
        if folder is None:
            store.put(manifest_key(other), encode_manifest(manifest))
        else:  # without the fsync of each, which is not what is measured
            (folder / manifest_key(other)).write_bytes(encode_manifest(manifest))
    store.head(attempt_key(1))


def _measured(store: CountingStore) -> Iterator[tuple[str, float, str]]:
    def latest() -> None:
        catalog.latest(store)

    def verify() -> None:
        ident = catalog.latest(store)
        if ident is None or verify_quick(catalog.load_checkpoint(store, ident)):
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
