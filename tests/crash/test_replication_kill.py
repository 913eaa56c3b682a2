"""Owners, holders and whole jobs killed while replicas travel: nothing sent twice, torn or lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.client import PeerClient
from ckpt.errors import CkptError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.ops.catalog import latest, load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from ckpt.storage.peerfile import read_peer_file, replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import SERVER, end_node, processes
from tests.support.nodes import Cluster, cluster
from tests.support.ranks import run_ranks
from tests.support.sealing import make_world
from tests.support.server import Server, eventually

ID = CheckpointId(10, 1)
WORLD = make_world(rows=3 * CHUNK_NBYTES // 2048, groups=((0,), ()))  # three chunks and a bit
SLOW = 12 << 20  # bytes per second: a chunk takes most of a second


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    with cluster(tmp_path, url, WORLD, domains=("rack-a", "rack-b")) as nodes:
        yield nodes


def sent_bytes(server: Server) -> int:
    with server.client() as client:
        return client.status().replicated_bytes


def segment_nbytes(nodes: Cluster) -> int:
    return nodes.servers[0].staging.read_index(nodes.run_key, ID, 0).nbytes


def begin(nodes: Cluster) -> None:
    """Seal a segment and wait until at least one of its chunks has travelled, and not all."""
    nodes.configure(replication_rate=SLOW)
    nodes.seal(ID, 0)
    eventually(lambda: sent_bytes(nodes.servers[0]) > 1.5 * CHUNK_NBYTES, what="a chunk is there")
    assert nodes.held(1, ID) == []


def check_replica(nodes: Cluster) -> None:
    own, theirs = nodes.servers[0].staging, nodes.replicas(1)
    args = (nodes.run_key, ID, 0)
    assert theirs.segment_path(*args).read_bytes() == own.segment_path(*args).read_bytes()
    assert theirs.read_index_bytes(*args) == own.read_index_bytes(*args)


@pytest.mark.fault(
    "Nodes and network",
    "owner's server in mid-replication",
    "SIGKILL",
    "the replica is completed, byte for byte; what had arrived is not sent again",
)
def test_owner_killed_in_mid_stream_goes_on_where_it_was(two: Cluster) -> None:
    begin(two)
    two.servers[0].kill()
    two.configure_again(replication_rate=0)
    two.servers[0].start()
    eventually(lambda: two.held(1, ID) == [0], what="the replica is sealed")
    check_replica(two)
    assert sent_bytes(two.servers[0]) <= segment_nbytes(two) - CHUNK_NBYTES


@pytest.mark.fault(
    "Nodes and network",
    "holder's server in mid-replication",
    "SIGKILL",
    "the replica is completed, byte for byte; what had arrived is not sent again",
)
def test_holder_killed_in_mid_stream_keeps_what_had_arrived(two: Cluster) -> None:
    begin(two)
    target = two.peers()[1].target
    two.servers[1].kill()
    two.servers[1].start()
    assert two.peers()[1].target == target  # the same port: nobody has to be told
    eventually(lambda: two.held(1, ID) == [0], what="the replica is sealed", timeout_s=30)
    check_replica(two)
    # What was on its way when it died is sent again, and no more than that.
    assert sent_bytes(two.servers[0]) < segment_nbytes(two) + 2 * CHUNK_NBYTES


def test_owner_that_restarts_sends_nothing_that_is_held(two: Cluster) -> None:
    two.configure()
    two.seal(ID, 0)
    eventually(lambda: two.held(1, ID) == [0], what="the replica is sealed")
    two.servers[0].kill()
    two.servers[0].start()

    def shown() -> list[int]:
        with two.servers[0].client() as client:
            return [one.rank for step in client.status().steps for one in step.replicas]

    eventually(lambda: shown() == [0], what="it knows that the replica is there")
    assert sent_bytes(two.servers[0]) == 0


# --- a whole job ---


LISTENING = {
    "CKPT_PEER_LISTEN": "127.0.0.1:0",
    "CKPT_INSECURE": "1",
    "CKPT_PEER_LOST": "5",
    "CKPT_PEER_LINGER": "600",
}


def die_after_seal(rank: int, world: int, root: Path) -> None:
    """Two saves; after the second is sealed here, SIGKILL to the whole process group of this rank."""
    del world
    os.setsid()  # as a job step of its own
    os.environ["CKPT_FAILURE_DOMAIN"] = f"rack-{rank}"
    torch.manual_seed(rank)
    manager = CheckpointManager(
        f"file://{root}/store/run",
        model=torch.nn.Linear(64, 64),
        staging_dir=root / f"staging-{rank}",
        replication_factor=2,
        mode="blocking",
        timeout_s=60.0,
    )
    manager.restore()
    first = manager.save(1)
    first.upload_completion.result(60)
    assert first.peer_completion is not None
    first.peer_completion.result(60)
    manager.save(2).local_completion.result(60)
    with contextlib.suppress(CkptError):  # the other rank may die first
        manager._agreement.gather("sealed", None)
    os.killpg(0, signal.SIGKILL)


@pytest.mark.fault(
    "Nodes and network",
    "whole job, then the servers",
    "SIGKILL of the process groups, then of the servers",
    "uploading, replicating and serving go on; committed",
)
def test_servers_outlive_the_job_and_their_own_restart(tmp_path: Path) -> None:
    """Uploading, replicating and serving go on after SIGKILL of the job, and after that of a server."""
    (tmp_path / "store").mkdir()
    url, step = f"file://{tmp_path}/store/run", CheckpointId(2, 1)
    run_key = keys.run_key(url)
    stagings = [StagingDir(tmp_path / f"staging-{rank}") for rank in range(2)]
    try:
        run_ranks(2, die_after_seal, tmp_path, may_die=frozenset((0, 1)), env=LISTENING)
        eventually(lambda: latest(open_store(url)) == step, what="step 2 is committed", timeout_s=60)
        for number, staging in enumerate(stagings):
            other = replicas_dir(stagings[1 - number])
            eventually(lambda o=other, n=number: o.sealed_ranks(run_key, step) == [n], what="replicas")  # type: ignore[misc]
            assert len(processes(SERVER, staging.path)) == 1
        node = read_peer_file(stagings[0])
        assert node is not None
        (pid,) = processes(SERVER, stagings[0].path)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: processes(SERVER, stagings[0].path) == [], what="the server is dead")
        environment = LISTENING | {"CKPT_FAILURE_DOMAIN": "rack-0"}
        again = Server(stagings[0].path, "--embedded", environment=environment)
        with again:
            assert read_peer_file(stagings[0]) == node  # back at its old address
            assert node.target is not None
            with PeerClient(node.target) as client:
                held: Any = client.have(run_key)
            assert held
        assert verify_deep(load_checkpoint(open_store(url), step)) == []
    finally:
        for staging in stagings:
            end_node(staging.path)
