"""Restores from what nodes still have: real ranks on two nodes, real servers that outlive them.

Nodes are staging directories with a server each: ranks 0 and 1 on node "a", ranks 2 and 3 on node "b". A file
in the way of the store's ``data`` folder keeps a step from being uploaded; attempts and manifests work.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops import catalog
from ckpt.ops.attempts import read_attempt
from ckpt.storage.open import open_store
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import bits_of
from tests.support.models import barrier, build, full_state, train
from tests.support.ranks import run_ranks
from tests.support.server import Server

NODES = {4: "aabb", 2: "aa"}
Bits = dict[str, bytes]
Told = tuple[int, Bits, Bits, dict[str, Any], list[dict[str, Any]]]


class Cluster:
    """Two nodes with a server each, and a store."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.url = f"file://{root}/store/run"
        self.run_key = keys.run_key(self.url)
        self._stack = stack
        (root / "store" / "run").mkdir(parents=True)
        self.servers = {name: self.boot(name) for name in "ab"}

    def staging(self, name: str) -> StagingDir:
        return StagingDir(self.root / f"staging-{name}")

    def boot(self, name: str) -> Server:
        """Start the server of a node, on an empty disk if there is none."""
        path = self.staging(name).path
        options = ("--peer-listen", "127.0.0.1:0", "--insecure", "--failure-domain", f"rack-{name}")
        return self._stack.enter_context(Server(path, *options))

    def lose(self, name: str) -> None:
        """The node dies with its disk, and another one takes its place."""
        self.servers[name].kill()
        shutil.rmtree(self.staging(name).path)
        self.servers[name] = self.boot(name)

    def block_uploads(self) -> None:
        (self.root / "store" / "run" / "data").write_bytes(b"")

    def unblock_uploads(self) -> None:
        """Servers try again at once after a restart; by themselves within a minute."""
        (self.root / "store" / "run" / "data").unlink()
        for name in "ab":
            self.servers[name].kill()
            self.servers[name] = self.boot(name)

    def replicate(self, ident: CheckpointId, source: str, to: str) -> None:
        """Put replicas of what ``source`` sealed where the server of ``to`` keeps them."""
        own, kept = self.staging(source), replicas_dir(self.staging(to))
        shutil.copytree(own.run_dir(self.run_key) / "layouts", kept.run_dir(self.run_key) / "layouts")
        kept.make_checkpoint_dir(self.run_key, ident)
        for rank in own.sealed_ranks(self.run_key, ident):
            shutil.copy(
                own.segment_path(self.run_key, ident, rank), kept.segment_path(self.run_key, ident, rank)
            )
            kept.write_index(self.run_key, ident, rank, own.read_index_bytes(self.run_key, ident, rank))

    def nbytes(self, ident: CheckpointId, ranks: range) -> int:
        """Bytes of segments, as node a has them itself or as replicas."""
        places = (self.staging("a"), replicas_dir(self.staging("a")), self.staging("b"))
        found = {
            rank: place.read_index(self.run_key, ident, rank).nbytes
            for place in places
            for rank in place.sealed_ranks(self.run_key, ident)
        }
        return sum(found[rank] for rank in ranks)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


class _Events(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "event"):
            fields = {
                name: value if isinstance(value, int | bool) else str(value)
                for name, value in record.fields.items()  # type: ignore[attr-defined]
            }
            self.seen.append((record.event, fields))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.seen if event == name]


def _run(rank: int, world: int, root: Path, kind: str, saves: list[int], committed: list[int]) -> Told:
    """Restore, tell what was restored and how, train on, save ``saves``, and die without a word."""
    events = _Events()
    logging.getLogger("ckpt").addHandler(events)
    logging.getLogger("ckpt").setLevel(logging.INFO)
    staging = root / f"staging-{NODES[world][rank]}"
    model, optimizer = build(kind, world, seed=rank)
    manager = CheckpointManager(
        f"file://{root}/store/run",
        model=model,
        optimizer=optimizer,
        staging_dir=staging,
        server=StagingDir(staging).socket_target(),
        mode="blocking",
        timeout_s=60.0,
        pending_wait_s=0.0,
    )
    start = manager.restore()
    restored = _bits(model, optimizer)
    step = start
    for until in saves:
        list(train(model, optimizer, range(step, until)))
        handle = manager.save(until)
        (handle.upload_completion if until in committed else handle.local_completion).result(60)
        step = until
    left = _bits(model, optimizer) if saves else restored
    barrier()  # no rank leaves before all have sealed
    done = events.of("restore.done")
    return start, restored, left, done[-1] if done else {}, events.of("restore.step_lost")


def _bits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    return {name: bits_of(tensor) for name, tensor in full_state(model, optimizer).items()}


def run(
    cluster: Cluster,
    world: int,
    kind: str = "fsdp2",
    saves: tuple[int, ...] = (),
    committed: tuple[int, ...] = (),
) -> list[Told]:
    """One start of the run."""
    return run_ranks(world, _run, cluster.root, kind, list(saves), list(committed))


def sums(told: list[Told]) -> dict[str, int]:
    """Bytes by tier over all ranks."""
    return {
        tier: sum(fields[f"{tier}_nbytes"] for *_, fields, _ in told)
        for tier in ("local", "replica", "peer", "remote")
    }


def test_trainers_die_and_their_hosts_live_nothing_comes_from_the_store(cluster: Cluster) -> None:
    """Case I10."""
    cluster.block_uploads()
    first = run(cluster, 4, saves=(4,))
    again = run(cluster, 4, saves=(5,))
    assert [start for start, *_ in again] == [4] * 4
    for _, restored, _, done, lost in again:
        assert restored == first[0][2]
        assert (done["staged"], done["remote_nbytes"], lost) == (True, 0, [])
        assert done["local_nbytes"] > 0
    with closing(open_store(cluster.url)) as store:
        assert catalog.latest(store) is None  # it was not committed, and is the parent all the same
        assert read_attempt(store, 2).parent == CheckpointId(4, 1)
        cluster.unblock_uploads()
        line = [CheckpointId(5, 2), CheckpointId(4, 1)]
        for name in "ab":  # the servers commit what was resumed from too
            for ident in line:
                cluster.servers[name].wait_for(cluster.run_key, ident)
        assert list(catalog.candidates(store)) == line


def test_a_node_lost_with_its_disk_is_read_from_its_replicas(cluster: Cluster) -> None:
    """Case I36."""
    step = CheckpointId(4, 1)
    cluster.block_uploads()
    first = run(cluster, 4, saves=(4,))
    cluster.replicate(step, "b", "a")
    cluster.lose("b")
    again = run(cluster, 4)
    assert [start for start, *_ in again] == [4] * 4
    for _, restored, _, _, lost in again:
        assert (restored, lost) == (first[0][2], [])
    on_a, on_b = sums(again[:2]), sums(again[2:])
    assert on_a["remote"] == on_b["remote"] == 0
    assert on_a["peer"] == 0  # what was lost lies here
    assert on_b["local"] == on_b["replica"] == 0
    assert on_b["peer"] > 0
    # Fewer ranks, split another way, on the node that is left: the same tiers.
    cluster.servers["b"].kill()
    resharded = run(cluster, 2, "tp")
    for start, restored, _, done, _ in resharded:
        assert (start, restored) == (4, first[0][2])
        assert (done["peer_nbytes"], done["remote_nbytes"]) == (0, 0)
    assert sums(resharded)["replica"] >= cluster.nbytes(step, range(2, 4))


def test_a_node_that_left_the_job_still_serves_and_the_step_is_whole_only_with_it(cluster: Cluster) -> None:
    """Case I10."""
    step = CheckpointId(4, 1)
    cluster.block_uploads()
    first = run(cluster, 4, saves=(4,))
    resharded = run(cluster, 2, "tp", saves=(5,))  # on node a alone; node b is asked, since it was in the job
    for start, restored, _, done, lost in resharded:
        assert restored == first[0][2]
        assert (start, done["staged"], done["remote_nbytes"], lost) == (4, True, 0, [])
    assert sums(resharded)["peer"] >= cluster.nbytes(step, range(2, 4))
    grown = run(cluster, 4)
    for start, restored, _, done, _ in grown:
        assert (start, done["staged"], done["remote_nbytes"]) == (5, True, 0)
        assert restored == resharded[0][2]
    assert not os.path.lexists(cluster.root / "store" / "run" / "manifests")


def test_all_copies_lost_falls_back_to_the_last_commit_and_names_the_loss(cluster: Cluster) -> None:
    """Cases I10, I33."""
    first = run(cluster, 4, saves=(2,), committed=(2,))
    shutil.move(cluster.root / "store/run/data", cluster.root / "data")
    cluster.block_uploads()
    run(cluster, 4, saves=(4,))
    cluster.lose("b")
    (cluster.root / "store/run/data").unlink()
    shutil.move(cluster.root / "data", cluster.root / "store/run/data")
    again = run(cluster, 4)
    for start, restored, _, done, _ in again:
        assert (start, done["staged"]) == (2, False)
        assert restored == first[0][2]
    committed = cluster.nbytes(CheckpointId(2, 1), range(2))
    total = sum(sums(again)[tier] for tier in ("local", "peer", "remote"))
    assert sums(again[:2])["local"] >= committed
    assert 0 < sums(again)["remote"] < total  # node b's parts only; the rest is still on node a
    (loss,) = again[0][4]
    assert loss["checkpoint"] == str(CheckpointId(4, 2))
    assert (loss["ranks"], loss["restored"]) == ("2-3", str(CheckpointId(2, 1)))
    assert "rack-b" in loss["nodes"]
    assert all(lost == [] for *_, lost in again[1:])  # told once, by rank 0
