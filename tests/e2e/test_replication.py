"""Three real servers keep replicas of one another's segments, and stand in for the one that is gone."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import latest, load_checkpoint
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from tests.support.cli import Cli
from tests.support.faultproxy import FaultProxy
from tests.support.nodes import Cluster, cluster
from tests.support.s3 import Ministack
from tests.support.sealing import make_world, seal
from tests.support.server import State, eventually
from tests.support.tls import make_certificate

ID = CheckpointId(10, 1)
WORLD = make_world(rows=96, groups=((0, 1), (2,), (3,)))
RACKS = ("rack-a", "rack-b", "rack-c")


@pytest.fixture
def three(tmp_path: Path, url: str) -> Iterator[Cluster]:
    with cluster(tmp_path, url, WORLD, domains=RACKS) as nodes:
        yield nodes


def test_replicas_lie_in_another_domain_and_are_whole(three: Cluster) -> None:
    three.configure()
    three.seal(ID)
    expected = {0: [3], 1: [0, 1], 2: [2]}
    eventually(lambda: {n: three.held(n, ID) for n in range(3)} == expected, what="every replica is sealed")
    for node, ranks in expected.items():
        owner = next(n for n, group in enumerate(three.world.groups) if ranks[0] in group)
        theirs, own = three.replicas(node), three.servers[owner].staging
        for rank in ranks:
            args = (three.run_key, ID, rank)
            assert theirs.segment_path(*args).read_bytes() == own.segment_path(*args).read_bytes()
            assert theirs.read_index_bytes(*args) == own.read_index_bytes(*args)
            assert theirs.layout(three.run_key, theirs.read_index(*args).layout_digest)
    status = three.servers[0].wait_for(three.run_key, ID)
    target = three.peers()[1].target

    def shown() -> dict[int, list[str]]:
        with three.servers[0].client() as client:
            (status,) = client.status(three.run_key).steps
        assert status.replicas_wanted == 1
        return {one.rank: list(one.nodes) for one in status.replicas}

    eventually(lambda: shown() == {0: [target], 1: [target]}, what="status names the node")
    assert status.state == State.STATE_COMMITTED


def test_commands_that_ask_a_server_say_on_which_nodes_copies_are(three: Cluster, tmp_path: Path) -> None:
    three.configure()
    three.seal(ID)
    three.servers[0].wait_for(three.run_key, ID)
    eventually(lambda: [three.held(n, ID) for n in range(3)] == [[3], [0, 1], [2]], what="every replica")
    cli = Cli(tmp_path / "elsewhere")
    cli.env["CKPT_SERVER"] = three.servers[0].target
    targets = [node.target for node in three.peers()]
    expected = [([0, 1], [3]), ([2], [0, 1]), ([3], [2])]

    found = cli.json("show", three.url)["copies"]
    assert [(one["ranks"], one["replica_ranks"]) for one in found] == expected
    assert [one["node"] for one in found] == targets
    assert [one["here"] for one in found] == [True, False, False]
    assert f"{targets[1]}: ranks 2, replicas of ranks 0-1" in cli.run("show", three.url).stdout
    (row,) = cli.json("list", three.url, "--long")["checkpoints"]
    assert [(one["ranks"], one["replica_ranks"]) for one in row["copies"]] == expected
    assert cli.json("list", three.url)["checkpoints"][0]["copies"] is None
    assert "2 x 4 ranks" in cli.run("list", three.url, "--long").stdout

    three.lose(2)
    lost = cli.json("show", three.url)["copies"][2]
    assert lost["node"] == targets[2]
    assert lost["problem"]["kind"] in ("UnavailableError", "TimeoutExceededError")
    assert "1 x 4 ranks" in cli.run("list", three.url, "--long").stdout
    local = Cli(three.servers[1].staging.path).json("show", three.url)["copies"]
    assert [(one["node"], one["ranks"], one["replica_ranks"]) for one in local] == [
        ("this node", [2], [0, 1])
    ]


def test_lost_buddy_is_replaced_by_the_next_node(three: Cluster) -> None:
    three.configure()
    three.seal(ID)
    eventually(lambda: [three.held(n, ID) for n in (1, 2)] == [[0, 1], [2]], what="all have their replicas")
    three.lose(1)
    eventually(lambda: three.held(2, ID) == [0, 1, 2], what="the next node has them", timeout_s=40)
    assert "replicate.lost" in three.servers[0].log()


def test_node_lost_with_its_disk_costs_no_replicated_step(tmp_path: Path, s3_server: Ministack) -> None:
    """The only other copies of what the node had not uploaded: those who hold them upload and commit."""
    url = f"s3://{s3_server.make_bucket()}/run"
    with FaultProxy(s3_server.port) as proxy:
        proxy.fault = lambda method, path: "reset" if method == "PUT" else None
        cut_off = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        environments = (cut_off, s3_server.env, s3_server.env)
        with cluster(tmp_path, url, WORLD, domains=RACKS, environments=environments) as nodes:
            nodes.configure(factor=3)
            nodes.seal(ID)
            eventually(lambda: [nodes.held(n, ID) for n in (1, 2)] == [[0, 1, 3], [0, 1, 2]], what="replicas")
            nodes.servers[1].wait_for(nodes.run_key, ID, State.STATE_UPLOADED)
            assert latest(open_store(url, s3_server.options)) is None
            nodes.lose(0)
            check_committed(url, s3_server.options)
            eventually(
                lambda: all(nodes.replicas(n).is_committed(nodes.run_key, ID) for n in (1, 2)),
                what="both who hold replicas know",
            )


def check_committed(url: str, options: Mapping[str, str] | None = None) -> None:
    store = open_store(url, options)
    eventually(lambda: latest(store) == ID, what="the step is committed", timeout_s=40)
    checkpoint = load_checkpoint(store, ID)
    assert verify_deep(checkpoint) == []
    for name, tensor in WORLD.tensors.items():
        assert fetch_tensor(checkpoint, name)[2] == tensor.tobytes()
    store.close()


def test_run_that_goes_on_elsewhere_adopts_at_once(tmp_path: Path, s3_server: Ministack) -> None:
    """The new start of the run does not have the node any more; nobody waits for the long time-out then."""
    url = f"s3://{s3_server.make_bucket()}/run"
    with FaultProxy(s3_server.port) as proxy:
        proxy.fault = lambda method, path: "reset" if method == "PUT" else None
        cut_off = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        environments = (s3_server.env, s3_server.env, cut_off)
        patient = ("--adopt-after", "3600")
        with cluster(
            tmp_path, url, WORLD, domains=RACKS, environments=environments, arguments=patient
        ) as nodes:
            nodes.configure()
            nodes.seal(ID)
            eventually(lambda: nodes.held(0, ID) == [3], what="the replica of node 2")
            peers = nodes.peers()
            nodes.lose(2)
            nodes.configure(nodes=[0, 1], peers=peers[:2])
            check_committed(url, s3_server.options)
            assert "the run goes on without its node" in nodes.servers[0].log()


def test_replicas_of_the_newest_steps_stay_and_older_ones_go(tmp_path: Path, url: str) -> None:
    with cluster(tmp_path, url, make_world(groups=((0,),)), domains=RACKS[:2]) as nodes:
        nodes.configure(keep_local=2)
        idents = [CheckpointId(step, 1) for step in (10, 20, 30, 40)]
        for ident in idents:
            nodes.seal(ident, 0)
            eventually(lambda i=ident: nodes.held(1, i) == [0], what="it is held")  # type: ignore[misc]
        kept = idents[2:]
        eventually(lambda: nodes.replicas(1).checkpoints(nodes.run_key) == kept, what="the newest two stay")
        assert [nodes.held(1, ident) for ident in kept] == [[0], [0]]


def test_domains_that_do_not_suffice_are_said_once_and_do_not_keep_replicas_away(
    tmp_path: Path, url: str
) -> None:
    world = make_world(groups=((0,), (1,)))
    with cluster(tmp_path, url, world, domains=("one-rack", "one-rack")) as nodes:
        nodes.configure()
        nodes.seal(ID)
        eventually(lambda: [nodes.held(n, ID) for n in range(2)] == [[1], [0]], what="replicas all the same")
        nodes.seal(CheckpointId(20, 1))
        eventually(lambda: nodes.held(1, CheckpointId(20, 1)) == [0], what="of the next step too")
        log = nodes.servers[0].log()
        assert log.count("copies share a failure domain") == 1


@contextlib.contextmanager
def embedded_pair(folder: Path, url: str, *, linger_s: float) -> Iterator[Cluster]:
    """Two embedded servers; their trainer was killed when all of node 0 was committed and held by node 1."""
    world = make_world(groups=((0,),))
    with subprocess.Popen(["sleep", "600"]) as trainer:
        options = ("--embedded", "--idle-exit", "0.3", "--trainer-pid", str(trainer.pid))
        linger = ("--peer-linger", str(linger_s))
        try:
            with cluster(folder, url, world, domains=RACKS[:2], arguments=options + linger) as nodes:
                nodes.configure()
                nodes.seal(ID, 0)
                nodes.servers[0].wait_for(nodes.run_key, ID)
                eventually(lambda: nodes.held(1, ID) == [0], what="the replica")
                trainer.kill()
                yield nodes
        finally:
            trainer.kill()


def processes(nodes: Cluster) -> list[subprocess.Popen[bytes]]:
    return [server.process for server in nodes.servers if server.process is not None]


def test_embedded_server_stays_for_other_nodes_until_the_run_has_ended(tmp_path: Path, url: str) -> None:
    """Its trainer is dead and all is uploaded: others may still need its disk, unless the run is over."""
    with embedded_pair(tmp_path, url, linger_s=3600) as nodes:
        with pytest.raises(subprocess.TimeoutExpired):
            processes(nodes)[0].wait(2)
        for server in nodes.servers:
            server.staging.mark_ended(nodes.run_key)
        assert [process.wait(20) for process in processes(nodes)] == [0, 0]


def test_embedded_servers_leave_when_nobody_came_for_long(tmp_path: Path, url: str) -> None:
    """They greet each other all the time; that alone must not keep them."""
    with embedded_pair(tmp_path, url, linger_s=1.5) as nodes:
        assert [process.wait(30) for process in processes(nodes)] == [0, 0]


def test_of_many_steps_that_wait_the_newest_two_go_first(tmp_path: Path, url: str) -> None:
    """On a link that is too slow for every step, the newest whole are worth more than all of them late."""
    world = make_world(groups=((0,), (1,)))
    with cluster(tmp_path, url, world, domains=RACKS[:2]) as nodes:
        nodes.configure()
        owner = nodes.servers[0]
        owner.kill()
        idents = [CheckpointId(step, 1) for step in (10, 20, 30, 40)]
        for ident in idents:
            seal(owner.staging, nodes.run_key, ident, world, 0)
        owner.start()
        eventually(lambda: all(nodes.held(1, ident) == [0] for ident in idents), what="all are held")
        done = re.findall(r"replicate\.done .*?checkpoint=(\S+)", owner.log())
        assert set(done[:2]) == {str(ident) for ident in idents[2:]}


def test_nodes_replicate_over_tls_and_only_with_the_token(tmp_path: Path, url: str) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "token").write_text("correct-horse-battery")
    secured = ["--peer-listen", "localhost:0", "--tls-cert", str(cert), "--tls-key", str(key)]
    secured += ["--token-file", str(tmp_path / "token"), "--peer-ca", str(cert)]
    world = make_world(groups=((0,), (1,)))
    with cluster(tmp_path, url, world, domains=RACKS[:2], listen=secured) as nodes:
        nodes.configure()
        nodes.seal(ID)
        eventually(lambda: [nodes.held(n, ID) for n in range(2)] == [[1], [0]], what="replicas")
        (tmp_path / "token").write_text("another-horse-battery")
        nodes.servers[1].kill()
        nodes.servers[1].start()  # it has another token now
        nodes.seal(CheckpointId(20, 1), 0)
        eventually(
            lambda: "unauthenticated" in nodes.servers[0].log(),
            timeout_s=30,
            what="it is refused and said so",
        )
        assert nodes.held(1, CheckpointId(20, 1)) == []


def test_holder_finds_commits_in_the_store_that_the_owner_never_told(tmp_path: Path, url: str) -> None:
    """The owner is gone for good; an overtaken replica does not stay for ever."""
    patient = ("--adopt-after", "3600")
    with cluster(tmp_path, url, make_world(groups=((0,),)), domains=RACKS[:2], arguments=patient) as nodes:
        nodes.configure(keep_local=1)
        idents = [CheckpointId(step, 1) for step in (10, 20)]
        for ident in idents:
            nodes.seal(ident, 0)
            nodes.servers[0].wait_for(nodes.run_key, ident)
        eventually(lambda: nodes.held(1, idents[1]) == [0], what="the newer replica")
        nodes.lose(0)
        nodes.servers[1].kill()
        replicas = nodes.replicas(1)
        folder = replicas.checkpoint_dir(nodes.run_key, idents[0])
        shutil.copytree(replicas.checkpoint_dir(nodes.run_key, idents[1]), folder, dirs_exist_ok=True)
        (folder / "committed").unlink(missing_ok=True)
        replicas.mark_committed(nodes.run_key, idents[1])
        nodes.servers[1].start()
        eventually(lambda: replicas.checkpoints(nodes.run_key) == idents[1:], what="the older one went")
