"""What ranks agree on about their nodes: who is where, how its server is reached, what fails together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.client import StagingClient
from ckpt.errors import InvalidInputError
from ckpt.format import keys
from ckpt.format.peer import PeerNode
from ckpt.storage.peerfile import node_id, read_peer_file
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import end_node
from tests.support.ranks import run_ranks
from tests.support.runs import stop_server

NODE_OF = ["a", "a", "b"]
LISTENING = {"CKPT_PEER_LISTEN": "127.0.0.1:0", "CKPT_INSECURE": "1", "CKPT_PEER_LINGER": "0"}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "store").mkdir()
    yield tmp_path
    for staging in tmp_path.glob("staging*"):
        stop_server(staging)
        end_node(staging)


def manager(root: Path, name: str, **more: Any) -> CheckpointManager:
    return CheckpointManager(
        f"file://{root}/store/run",
        model=torch.nn.Linear(2, 2),
        staging_dir=root / f"staging-{name}",
        timeout_s=60.0,
        **more,
    )


def gather(rank: int, world: int, root: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The nodes as this rank sees them, and as its server finds them in run.json."""
    del world
    os.environ["CKPT_FAILURE_DOMAIN"] = f"rack-{NODE_OF[rank]}"
    own = manager(root, NODE_OF[rank], replication_factor=2)
    own.restore()
    assert own._session is not None
    config = StagingDir(root / f"staging-{NODE_OF[rank]}").read_run_config(
        keys.run_key(f"file://{root}/store/run")
    )
    assert config.replication_factor == 2
    own._agreement.gather("done", None)  # no node leaves before all have looked
    return [node.to_json() for node in own._session.nodes], [node.to_json() for node in config.peers]


def test_every_rank_learns_the_same_nodes_and_each_server_finds_them(root: Path) -> None:
    seen = run_ranks(3, gather, root, env=LISTENING)
    assert all(session == seen[0][0] and config == seen[0][0] for session, config in seen)
    nodes = [PeerNode.from_json(node) for node in seen[0][0]]
    assert [node.ranks for node in nodes] == [(0, 1), (2,)]
    assert [node.domain for node in nodes] == ["rack-a", "rack-b"]
    assert [node.node_id for node in nodes] == [node_id(StagingDir(root / f"staging-{n}")) for n in "ab"]
    assert all(node.target is not None and node.target.startswith("127.0.0.1:") for node in nodes)


def test_server_that_listens_for_peers_is_made_known_and_answers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LISTENING.items():
        monkeypatch.setenv(name, value)
    with manager(root, "a") as own:
        own.restore()
        assert own._session is not None
        (node,) = own._session.nodes
        assert node == read_peer_file(StagingDir(root / "staging-a")) or node.ranks == (0,)
        assert node.target is not None
        with StagingClient(node.target) as client:
            assert client.status().embedded


def test_nodes_without_a_server_for_peers_have_no_target(root: Path) -> None:
    with manager(root, "a") as own:
        own.restore()
        assert own._session is not None
        (node,) = own._session.nodes
    assert node.target is None
    assert node.domain.startswith("machine:")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"replication_factor": 2}, "peer-listen"),
        ({"replication_factor": 0}, "invalid-input"),
        ({"replication_jump": 1}, "invalid-input"),
        ({"replication_factor": 2, "replication_rate": 0}, "invalid-input"),
    ],
)
def test_replication_that_cannot_work_is_refused_at_once(
    root: Path, options: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPT_PEER_LISTEN", raising=False)
    with pytest.raises(InvalidInputError) as caught:
        manager(root, "a", **options)
    assert caught.value.code == code
