"""``ckpt prefetch`` brings segments to a spare, from other nodes or else the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckpt.client.prefetch import Prefetched, prefetch
from ckpt.client.replica import ReplicaClient
from ckpt.clock import SystemClock
from ckpt.errors import UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.ops.attempts import claim_attempt
from ckpt.ops.catalog import latest
from ckpt.ops.holdings import node_holdings
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from tests.support.cli import USAGE, Cli
from tests.support.nodes import Cluster, cluster
from tests.support.sealing import make_world
from tests.support.server import eventually

STEP = CheckpointId(10, 1)
WORLD = make_world(rows=96, groups=((0, 1), (2,)))
SPARE = 2


@pytest.fixture
def nodes(tmp_path: Path, url: str) -> Iterator[Cluster]:
    """Two nodes with ranks, and a spare; the run has begun."""
    with closing(open_store(url)) as store:
        claim_attempt(store, parent=None, world_size=3, host="here", clock=SystemClock())
    with cluster(tmp_path, url, WORLD, domains=("rack-a", "rack-b", "rack-c")) as running:
        running.configure(nodes=[0, 1], factor=1)
        yield running


def fetch(nodes: Cluster, **more: Any) -> Prefetched:
    targets = [node.target for node in nodes.peers()[:SPARE] if node.target]
    return prefetch(nodes.url, {}, nodes.servers[SPARE].staging, peers=more.pop("peers", targets), **more)


def check_held(nodes: Cluster, ident: CheckpointId, *ranks: int) -> None:
    """The spare has these, byte for byte."""
    assert nodes.held(SPARE, ident) == list(ranks)
    theirs = nodes.replicas(SPARE)
    for rank in ranks:
        owner = next(n for n, group in enumerate(WORLD.groups) if rank in group)
        own, args = nodes.servers[owner].staging, (nodes.run_key, ident, rank)
        assert theirs.segment_path(*args).read_bytes() == own.segment_path(*args).read_bytes()
        assert theirs.read_index_bytes(*args) == own.read_index_bytes(*args)


def block_uploads(url: str) -> None:
    Path(url.removeprefix("file://"), "data").write_bytes(b"")


def test_before_the_commit_from_other_nodes_and_what_has_come_counts(nodes: Cluster, url: str) -> None:
    block_uploads(url)
    nodes.seal(STEP, 0, 1)
    first = fetch(nodes, ranks=[1])
    assert (first.ident, first.here, first.missing) == (STEP, (), {})
    check_held(nodes, STEP, 1)
    rest = fetch(nodes)
    assert (rest.ranks, rest.here) == ((0, 1, 2), (1,))
    check_held(nodes, STEP, 0, 1, 2)
    sizes = {rank: nodes.replicas(SPARE).read_index(nodes.run_key, STEP, rank).nbytes for rank in range(3)}
    assert first.nbytes == {"peer": sizes[1]}
    assert rest.nbytes == {"peer": sizes[0] + sizes[2]}
    assert not fetch(nodes).nbytes


def test_nodes_of_another_topology_fetch_what_their_ranks_will_need(nodes: Cluster, url: str) -> None:
    """Three ranks were saved; of six the last two need what rank 2 has, the middle two what rank 1 has."""
    nodes.seal(STEP, 0, 1)
    assert fetch(nodes, ranks=[4, 5], world_size=6).ranks == (2,)
    check_held(nodes, STEP, 2)
    targets = [option for node in nodes.peers()[:SPARE] for option in ("--peers", str(node.target))]
    cli = Cli(nodes.servers[SPARE].staging.path)
    found = cli.json("prefetch", url, "--world", "6", "--ranks", "2-3", *targets)
    assert (found["ranks"], found["missing"]) == ([1], {})
    check_held(nodes, STEP, 1, 2)
    for wrong in (("--world", "6", "--ranks", "6"), ("--world", "6")):
        assert cli.run("prefetch", url, *wrong, *targets, code=USAGE)


def test_after_the_commit_from_the_store_where_no_node_has_it(nodes: Cluster, url: str) -> None:
    nodes.seal(STEP, 0, 1)
    with closing(open_store(url)) as store:
        eventually(lambda: latest(store) == STEP, what="it is committed")
    silent = nodes.peers()[1].target
    nodes.servers[1].kill()
    found = fetch(nodes)
    check_held(nodes, STEP, 0, 1, 2)
    assert set(found.nbytes) == {"peer", "remote"}
    assert set(found.silent) == {silent}
    assert nodes.replicas(SPARE).is_committed(nodes.run_key, STEP)


def test_cut_off_prefetch_leaves_nothing_that_a_restore_would_take_and_can_be_repeated(
    nodes: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_uploads(url)
    nodes.seal(STEP, 0, 1)
    send = ReplicaClient.send_chunk

    def cut(self: ReplicaClient, run_key: str, ident: CheckpointId, rank: int, *more: Any) -> list[int]:
        if rank == 1:
            raise UnavailableError("the server is gone")
        return send(self, run_key, ident, rank, *more)

    with monkeypatch.context() as patch:
        patch.setattr(ReplicaClient, "send_chunk", cut)
        with pytest.raises(UnavailableError):
            fetch(nodes)
    spare = nodes.servers[SPARE].staging
    (held,) = node_holdings(spare, nodes.run_key)
    assert 1 not in held.ranks
    assert list(nodes.replicas(SPARE).checkpoint_dir(nodes.run_key, STEP).glob("segment-00001*incoming"))
    fetch(nodes)
    check_held(nodes, STEP, 0, 1, 2)


def test_a_segment_that_nobody_has_does_not_keep_the_others_away(nodes: Cluster, url: str) -> None:
    """Half of a step is no step: it is asked for by name, or the one before it is taken."""
    block_uploads(url)
    nodes.seal(STEP, 0, 1)
    targets = [str(node.target) for node in nodes.peers()[:SPARE]]
    path = nodes.servers[1].staging.segment_path(nodes.run_key, STEP, 2)
    path.write_bytes(b"\0" * path.stat().st_size)
    arguments = [option for target in targets for option in ("--peers", target)]
    said = Cli(nodes.servers[SPARE].staging.path).json("prefetch", url, *arguments, code=1)
    assert said["checkpoint"] == str(STEP)
    assert set(said["missing"]) == {"2"}
    check_held(nodes, STEP, 0, 1)


def test_a_node_without_a_server_is_told_to_start_one(tmp_path: Path, url: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        prefetch(url, {}, StagingDir(tmp_path / "staging").ensure())
    assert caught.value.code == "no-peers"
