"""Which nodes outside the job a restore asks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckpt.format.peer import PeerNode
from ckpt.storage.known_nodes import known_nodes, remember_nodes
from ckpt.storage.staging import RunConfig, StagingDir

RUN = "run-0123456789abcdef"


def node(name: str, port: int | None = 1) -> PeerNode:
    target = f"{name}:{port}" if port else None
    return PeerNode(node_id=name, target=target, domain="d", host=name, ranks=(0,))


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    return StagingDir(tmp_path).ensure()


def test_a_new_node_has_heard_of_nobody(staging: StagingDir) -> None:
    assert known_nodes(staging, RUN) == ()


def test_nodes_of_the_last_start_come_first_and_each_once(staging: StagingDir) -> None:
    staging.write_run_config(RUN, RunConfig(url="file:///store/run", peers=(node("a", 2), node("b"))))
    remember_nodes(staging, RUN, [node("a", 1), node("c"), node("deaf", None)])
    assert known_nodes(staging, RUN) == (node("a", 2), node("b"), node("c"))


def test_addresses_from_the_environment_are_added(
    staging: StagingDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.write_run_config(RUN, RunConfig(url="file:///store/run", peers=(node("a"),)))
    monkeypatch.setenv("CKPT_PEERS", "a:1, x:7,")
    assert [found.target for found in known_nodes(staging, RUN)] == ["a:1", "x:7"]


def test_damage_is_reported_and_costs_only_what_is_damaged(
    staging: StagingDir, caplog: pytest.LogCaptureFixture
) -> None:
    staging.write_run_config(RUN, RunConfig(url="file:///store/run", peers=(node("a"),)))
    for damage in (b"{", b"3", b'[{"node_id": 1}]'):
        (staging.run_dir(RUN) / "nodes.json").write_bytes(damage)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ckpt"):
            assert known_nodes(staging, RUN) == (node("a"),)
        assert [record.event for record in caplog.records] == ["nodes.unreadable"]  # type: ignore[attr-defined]
