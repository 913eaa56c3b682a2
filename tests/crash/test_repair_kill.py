"""``kill -9`` of ``ckpt repair`` wherever it changes anything, then repaired again.

Each boundary, in each place that it is reached from, is the place of a death. After it each object and each
copy is what it was or what it should be, and never anything else; the second repair brings all of them back.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ckpt.client.repair import repair
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import attempt_key, group_key, layout_key, own_object_key
from ckpt.ops.catalog import latest, load_checkpoint
from ckpt.ops.sweep import sweep_uploads
from ckpt.storage.durable import TEMP_PREFIX
from ckpt.storage.leftovers import sweep_leftovers
from ckpt.storage.open import open_store
from ckpt.storage.peerfile import replicas_dir
from tests.support.boundaries import REPAIR, Site, found
from tests.support.builders import claim
from tests.support.dying import Death, lead
from tests.support.lifecycle import LATE
from tests.support.sealing import make_world
from tests.support.uploading import Node, changed

OLD, NEW = CheckpointId(10, 1), CheckpointId(20, 1)
MEMORY = Path("/dev/shm")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Always the same path, since a run's key comes of it; in memory where that can be had."""
    path = (MEMORY if MEMORY.is_dir() else tmp_path) / f"ckpt-repair-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Damaged:
    """Two checkpoints in ``root``, of which one borrows from the other; damaged, with what they were."""

    def __init__(self, root: Path, attempt: str) -> None:
        self.root = root
        node = Node(root / "node", open_store(f"file://{root}/store/run"))
        claim(node.store)
        world = make_world(rows=24, columns=512, groups=((0, 1),))
        later = changed(world, range(6, 18), 7)
        node.save(OLD, world)
        node.save(NEW, later, wanted="on")
        replica = replicas_dir(node.staging)
        replica.path.mkdir()
        shutil.copytree(node.staging.path / "runs", replica.path / "runs")
        self.good = self.files()
        summary = load_checkpoint(node.store, NEW).summary(1)
        borrows = next(info.key for info in node.store.list_keys(f"index/{NEW}/borrows-"))
        store = root / "store" / "run"
        copies = [place.segment_path(node.run_key, NEW, 0) for place in (node.staging, replica)]
        flipped = [store / group_key(NEW, 0, 1), store / borrows, copies[0]]
        flipped += [copies[1].with_suffix(".index")]
        gone = [store / own_object_key(summary.object_key, summary.pack)]
        gone += [store / layout_key(later.layouts.digest)]
        (gone if attempt == "missing" else flipped).append(store / attempt_key(1))
        for path in flipped:
            data = path.read_bytes()
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        for path in gone:
            path.unlink()
        self.bad = self.files()
        shutil.move(root, root.with_suffix(".bad"))

    def files(self) -> dict[str, bytes]:
        """What counts, by path: neither unfinished files nor what is no part of a checkpoint."""
        found = (path for path in self.root.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in found
            if not path.name.startswith(TEMP_PREFIX) and path.parent.name != "probe"
        }

    def again(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.root.with_suffix(".bad"), self.root)

    def repair(self) -> None:
        node = Node(self.root / "node", open_store(f"file://{self.root}/store/run"))
        for ident in (NEW, OLD):
            assert repair(node.store, ident, node.staging, node.run_key).report.left == []


@pytest.mark.fault(
    "Death of a process",
    "killed in: `ckpt repair` (the attempt's record {attempt}, among other things)",
    "SIGKILL right before each call of the code that changes a file or the store",
    "each object and copy as it was or as it should be; repaired again, all as saved, byte for byte",
)
@pytest.mark.parametrize("attempt", ["damaged", "missing"])
def test_death_wherever_repair_changes_anything(
    root: Path, attempt: str, tried: Callable[[int], None]
) -> None:
    damaged = Damaged(root, attempt)
    sites = found()
    try:
        damaged.again()
        whole = die_at(damaged, sites, 0)
        assert whole.status == 0
        # Of an attempt's record only what a restore needs can be made again, not who started it.
        rebuilt = f"store/run/{attempt_key(1)}"
        assert damaged.files() | {rebuilt: b""} == damaged.good | {rebuilt: b""}
        damaged.good[rebuilt] = damaged.files()[rebuilt]
        assert {label for labels in whole.passed for label in labels} >= REPAIR[attempt]
        places = {chain[:2]: number for number, chain in enumerate(whole.passed, 1)}
        if attempt == "missing":  # all others were those of a damaged record
            places = {chain: at for chain, at in places.items() if "put_attempt" in " ".join(chain)}
        tried(len(places))
        for at in places.values():
            damaged.again()
            death = die_at(damaged, sites, at)
            assert death.status == signal.SIGKILL
            for path, data in damaged.files().items():
                assert data in (damaged.good[path], damaged.bad.get(path)), (at, path)
            assert latest(open_store(f"file://{root}/store/run")) == NEW
            assert die_at(damaged, [], 0).status == 0
            assert damaged.files() == damaged.good
            check_clean(root)
    finally:
        shutil.rmtree(root.with_suffix(".bad"), ignore_errors=True)


def die_at(damaged: Damaged, sites: Sequence[Site], at: int) -> Death:
    return lead(lambda _said: damaged.repair(), sites, at=at)


def check_clean(root: Path) -> None:
    """What the dead one had not finished is swept as anybody's is."""
    store = open_store(f"file://{root}/store/run")
    sweep_uploads(store, older_than_s=0.0, clock=LATE)
    node = Node(root / "node", store)
    for place in (node.staging, replicas_dir(node.staging)):
        sweep_leftovers(place, before=LATE.now())
    left = [path for path in root.rglob("*") if path.name.startswith(TEMP_PREFIX)]
    assert left == []
