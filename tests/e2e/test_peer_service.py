"""What one node's server tells and gives to others, and a reader's patience with it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from ckpt.client import PeerClient
from ckpt.client.peer_tier import PeerTier
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, TimeoutExceededError
from ckpt.format.held import Held
from ckpt.format.keys import segment_key
from ckpt.geometry import Region
from ckpt.ops import catalog
from ckpt.ops.fetch import FetchStats, NumpyTargets, fetch
from ckpt.ops.tiers import PEER, REMOTE, Tier
from ckpt.plan.read import Want, plan_read
from ckpt.storage.memory import MemoryStore
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from tests.support.builders import Built, build_checkpoint, claim, memory_store
from tests.support.sealing import seal_copy
from tests.support.server import Server

_runs = itertools.count()
_CHUNK = 256 * 1024


@dataclass
class Node:
    """A node that sealed rank 0 of two and has a replica of rank 1, its server, and a client of that."""

    server: Server
    client: PeerClient
    run_key: str
    store: MemoryStore
    built: Built

    def tier(self, **options: float) -> PeerTier:
        return PeerTier(self.server.tcp_target, self.run_key, self.built.ident, [0, 1], **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    staging = StagingDir(tmp_path_factory.mktemp("node") / "staging").ensure()
    with Server(staging.path, "--listen", "127.0.0.1:0", "--insecure") as running:
        yield running


@pytest.fixture
def node(server: Server) -> Iterator[Node]:
    store = memory_store()
    claim(store)
    built = build_checkpoint(store, 20, world_size=2, chunk_nbytes=_CHUNK)
    run_key = f"run-{next(_runs):016x}"
    # No run.json: this server uploads nothing, it only has the files.
    seal_copy(server.staging, run_key, store, built, [0])
    seal_copy(replicas_dir(server.staging), run_key, store, built, [1])
    with PeerClient(server.tcp_target) as client:
        yield Node(server, client, run_key, store, built)


def read(node: Node, tiers: list[Tier]) -> FetchStats:
    """Read every tensor and compare its bits."""
    checkpoint = catalog.load_checkpoint(node.store, node.built.ident)
    names = list(node.built.layouts)
    arrays = [np.zeros_like(node.built.tensors[name]) for name in names]
    wants = [Want(name, Region.whole(arrays[i].shape), i) for i, name in enumerate(names)]
    stats = fetch(checkpoint, plan_read(checkpoint.layouts, wants), NumpyTargets(arrays), tiers=tiers)
    for name, array in zip(names, arrays, strict=True):
        assert array.tobytes() == node.built.tensors[name].tobytes(), name
    return stats


def test_a_node_says_what_it_holds_and_of_whom(node: Node) -> None:
    (message,) = node.client.have(node.run_key)
    held = Held.from_proto(message)
    assert (held.ident, held.world_size, held.is_committed) == (node.built.ident, 2, False)
    assert (held.own, held.replicas) == ((0,), (1,))
    (with_headers,) = node.client.have(node.run_key, node.built.ident, with_headers=True)
    for segment in with_headers.segments:
        (summary,) = segment.header.segments
        assert (summary.rank, summary.nbytes) == (segment.rank, node.built.segments[segment.rank].nbytes)
        assert segment.header.group.count == 2


def test_unknown_runs_and_checkpoints_are_not_held(node: Node) -> None:
    assert node.client.have("other-0123456789abcdef") == []
    with pytest.raises(NotFoundError):
        node.client.segment("other-0123456789abcdef", node.built.ident, 0)
    with pytest.raises(NotFoundError):
        node.client.segment(node.run_key, node.built.ident, 2)
    with pytest.raises(NotFoundError):
        node.client.read_into([memoryview(bytearray(8))], node.run_key, node.built.ident, 2, 0)


def test_names_cannot_leave_the_staging_directory_and_reads_are_bounded(node: Node) -> None:
    with pytest.raises(InvalidInputError):
        node.client.have("../runs")
    with pytest.raises(InvalidInputError):
        node.client.read_into([memoryview(bytearray(8))], "../runs", node.built.ident, 0, 0)
    with pytest.raises(InvalidInputError):
        node.client.read_into([memoryview(bytearray((64 << 20) + 1))], node.run_key, node.built.ident, 0, 0)
    end = node.built.segments[0].nbytes
    with pytest.raises(CorruptError):
        node.client.read_into([memoryview(bytearray(8))], node.run_key, node.built.ident, 0, end - 4)


def test_layouts_come_with_a_segment(node: Node) -> None:
    assert node.client.segment_layouts(node.run_key, node.built.ident, 1) == node.built.layouts


def test_everything_is_read_from_the_peer_and_nothing_from_the_store(node: Node) -> None:
    tier = node.tier()
    node.store.delete([segment_key(node.built.ident, rank) for rank in range(2)])
    stats = read(node, [tier])
    assert dict(stats.nbytes) == {PEER: sum(index.nbytes for index in node.built.segments.values())}
    tier.close()


def test_a_chunk_that_the_peer_has_damaged_comes_from_the_next(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    path = node.server.staging.segment_path(node.run_key, node.built.ident, 0)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    tier = node.tier()
    stats = read(node, [tier])
    tier.close()
    assert (stats.nbytes[REMOTE], stats.repaired_chunks) == (_CHUNK, 1)
    bad = [record.fields for record in caplog.records if getattr(record, "event", "") == "fetch.bad_copy"]  # type: ignore[attr-defined]
    assert [(fields["tier"], fields["error"].code) for fields in bad] == [(PEER, "digest")]


def test_a_peer_that_hangs_is_given_up_after_a_bounded_time(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    tier = node.tier(base_s=0.5)
    assert tier.index(node.built.ident, 0) is not None  # connected
    assert node.server.process is not None
    os.kill(node.server.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutExceededError):
            tier.read_into([memoryview(bytearray(_CHUNK))], node.built.ident, 0, 0)
        stats = read(node, [tier])
        assert stats.nbytes[PEER] == 0
        given_up = [r.fields for r in caplog.records if getattr(r, "event", "") == "peer.given_up"]  # type: ignore[attr-defined]
        assert [fields["peer"] for fields in given_up] == [node.server.tcp_target]
    finally:
        os.kill(node.server.process.pid, signal.SIGCONT)
        tier.close()


def test_a_dead_peer_is_passed_over(node: Node) -> None:
    tier = node.tier()
    node.server.kill()
    try:
        assert read(node, [tier]).nbytes[PEER] == 0
    finally:
        tier.close()
        node.server.start()


_FORKS = """
import multiprocessing, os, sys
from ckpt.client import PeerClient

def work(pipe):
    pipe.send(os.getpid())

with PeerClient(sys.argv[1]) as client:
    client.have(sys.argv[2])
    for _ in range(20):  # the channel is open, as while a restore reads
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
        child.start()
        assert ours.poll(20) and ours.recv() == child.pid
        child.join(20)
        assert child.exitcode == 0
    assert client.have(sys.argv[2])
"""


def test_I121_data_workers_can_be_forked_after_a_peer_was_read(node: Node) -> None:
    argv = [sys.executable, "-c", _FORKS, node.server.tcp_target, node.run_key]
    done = subprocess.run(argv, timeout=100, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
