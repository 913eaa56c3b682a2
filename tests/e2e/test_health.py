"""``ckpt health`` over the servers of several nodes, which each know only their own ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.client import StagingClient
from ckpt.format.keys import run_key
from ckpt.format.peer import PeerNode
from ckpt.storage.staging import RunConfig
from ckpt_proto.v1 import staging_pb2
from tests.support.cli import FAILED, Cli
from tests.support.server import Server, eventually

UNHEALTHY = 6
URL = "file:///nowhere/run"
KEY = run_key(URL)


def pulse(rank: int, **more: object) -> staging_pb2.RankPulse:
    usual = {"run_key": KEY, "attempt": 1, "world_size": 3, "step": 8, "phase": "train", "step_s": 0.1}
    return staging_pb2.RankPulse(**{"rank": rank, "node": f"n{rank // 2}", **usual, **more})  # type: ignore[arg-type]


def waiting(rank: int) -> staging_pb2.RankPulse:
    return pulse(rank, still_s=9.0, waits=True, collectives=4, where="all_reduce (distributed_c10d.py:1)")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    listen = ("--listen", "127.0.0.1:0", "--insecure")
    with Server(tmp_path / "a", *listen) as first, Server(tmp_path / "b", *listen) as second:
        yield first, second


def tell(server: Server, *pulses: staging_pb2.RankPulse) -> None:
    with StagingClient(server.staging.socket_target()) as client:
        client.heartbeat(iter(pulses))


def test_culprit_on_another_node_is_named_once_all_servers_are_asked(nodes: tuple[Server, Server]) -> None:
    first, second = nodes
    tell(first, waiting(0), waiting(1))
    tell(second, pulse(2, still_s=9.0, phase="data", where="read (dataset.py:3)"))
    cli = Cli(first.staging.path)

    alone = cli.json("health")
    assert [(row["rank"], row["state"]) for row in alone["ranks"]] == [(0, "waiting"), (1, "waiting")]
    assert "another node" in alone["ranks"][0]["reason"]

    together = cli.json("health", "--peers", second.tcp_target, code=UNHEALTHY)
    assert [row["state"] for row in together["ranks"]] == ["waiting", "waiting", "hung"]
    assert together["culprits"] == [2]
    assert "for rank 2" in together["ranks"][0]["reason"]

    peers = tuple(
        PeerNode(node_id=f"n{i}", target=s.tcp_target, domain=f"d{i}", host=f"h{i}", ranks=ranks)
        for i, (s, ranks) in enumerate(((first, (0, 1)), (second, (2,))))
    )
    first.staging.write_run_config(KEY, RunConfig(url=URL, peers=peers))
    for more in ([], ["--run", URL]):
        tell(first, waiting(0), waiting(1))  # anew: ranks that say nothing for long are culprits too
        tell(second, pulse(2, still_s=9.0, phase="data", where="read (dataset.py:3)"))
        assert cli.json("health", "--job", *more, code=UNHEALTHY)["culprits"] == [2]


def test_server_that_does_not_answer_is_told_and_the_others_are_shown(nodes: tuple[Server, Server]) -> None:
    first, second = nodes
    tell(first, pulse(0), pulse(1), pulse(2))
    gone = second.tcp_target
    second.terminate()
    cli = Cli(first.staging.path)
    found = cli.json("health", "--peers", gone)
    assert found["verdict"] == "healthy"
    assert list(found["unreachable"]) == [gone]
    shown = cli.run("health", "--peers", gone).stdout
    assert f"{gone} does not answer" in shown
    assert shown.splitlines()[-1] == "healthy: 3 ok"
    Cli(second.staging.path).run("health", code=FAILED)


def test_newer_attempt_replaces_the_ranks_of_the_one_before(nodes: tuple[Server, Server]) -> None:
    first, _ = nodes
    tell(first, pulse(0), pulse(1), pulse(2, ended=staging_pb2.RankPulse.ENDED_DIED))
    cli = Cli(first.staging.path)
    assert cli.json("health", code=UNHEALTHY)["culprits"] == [2]
    eventually(lambda: "rank.trouble state=dead" in first.log(), what="the server has looked")
    tell(first, pulse(0, attempt=2, world_size=1))
    tell(first, pulse(1))  # an old flusher that lives on
    found = cli.json("health")
    assert [(row["rank"], row["attempt"], row["state"]) for row in found["ranks"]] == [(0, 2, "ok")]
    assert cli.json("health", "--run", "file:///another/run")["verdict"] == "idle"
