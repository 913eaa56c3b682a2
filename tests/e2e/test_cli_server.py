"""The ckpt command through a server: the same answers, and errors that say what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.clock import SystemClock
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.open import open_store
from tests.support.builders import borrow, build_checkpoint, claim
from tests.support.cli import DAMAGED, DONE, FAILED, LATEST, NOT_FOUND, REFUSED, USAGE, Cli, make_run
from tests.support.s3 import Ministack, free_port
from tests.support.sealing import make_world, seal
from tests.support.server import Server, eventually


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "staging")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_run(tmp_path)


@pytest.fixture
def server(cli: Cli) -> Iterator[Server]:
    with Server(Path(cli.env["CKPT_STAGING"])) as running:
        yield running


def stage(server: Server, url: str) -> str:
    """Seal two checkpoints of a run in the staging directory: 60 committed, 70 by one rank of two only."""
    world = make_world()
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
        for ident, ranks in ((CheckpointId(60, 2), (0, 1)), (CheckpointId(70, 2), (0,))):
            for rank in ranks:
                seal(server.staging, run_key, ident, world, rank)
                client.seal(run_key, ident, rank)
    server.wait_for(run_key, CheckpointId(60, 2))
    return run_key


def test_a_server_gives_the_same_answers_as_the_store(cli: Cli, url: str, server: Server) -> None:
    stage(server, url)
    cli.run("pin", url, "20")
    root = url.rpartition("/")[0]
    for arguments in (
        ["list", url, "--long"],
        ["show", url, "60"],
        ["verify", url, "--all", "--deep"],
        ["prune", url, "--keep-last", "2", "--dry-run"],
        ["runs", root],
    ):
        direct = cli.run(*arguments)
        remote = cli.run(*arguments, "--server", server.target)
        assert remote.stdout == direct.stdout
        assert cli.json(*arguments, CKPT_SERVER=server.target) == cli.json(*arguments)

    rows = cli.json("list", url)["checkpoints"]
    assert [(row["step"], row["committed"], row["local"]) for row in rows[:3]] == [
        (70, False, True),
        (60, True, True),
        (45, True, False),
    ]
    assert rows[1]["latest"]
    segments = cli.json("show", url, "60")["segments"]
    assert all(Path(segment["local_path"]).is_file() for segment in segments)


def test_a_prune_names_whose_objects_stay_and_whose_go_after_all(
    cli: Cli, tmp_path: Path, server: Server
) -> None:
    url = f"file://{tmp_path}/store/borrowers"
    store = open_store(url)
    claim(store)
    build_checkpoint(store, 10)
    borrow(store, 20, CheckpointId(10, 1))
    cli.run("prune", url, "10", "--yes")
    build_checkpoint(store, 30)
    borrow(store, 40, CheckpointId(30, 1))
    arguments = ["prune", url, "--keep-last", "1", "--dry-run"]
    found = cli.json(*arguments)
    assert (found["held"], found["freed"]) == (["000000000030.a000001"], ["000000000010.a000001"])
    assert cli.json(*arguments, "--server", server.target) == found
    text = cli.run(*arguments).stdout
    assert "000000000030.a000001: its objects stay" in text
    assert "000000000010.a000001: deleted earlier, its objects go now" in text
    done = cli.json("prune", url, "--keep-last", "1", "--yes", "--server", server.target)
    assert done["deleted_objects"] == found["deleted_objects"]
    cli.run("verify", url, "--deep")
    store.close()


def test_through_a_server_a_damaged_latest_is_named_as_in_the_store(
    cli: Cli, url: str, server: Server
) -> None:
    path = Path(url.removeprefix("file://")) / keys.manifest_key(CheckpointId(45, 2))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    for arguments, code in (
        (["list", url], DONE),
        (["verify", url], DAMAGED),
        (["verify", url, "45"], DAMAGED),
    ):
        direct = cli.run(*arguments, code=code)
        remote = cli.run(*arguments, "--server", server.target, code=code)
        assert remote.stdout == direct.stdout
        assert LATEST in direct.stdout
        assert cli.json(*arguments, code=code, CKPT_SERVER=server.target) == cli.json(*arguments, code=code)
    (row,) = (row for row in cli.json("list", url, CKPT_SERVER=server.target)["checkpoints"] if row["latest"])
    assert (row["checkpoint"], row["damaged"]) == (LATEST, True)

    (Path(url.removeprefix("file://")) / keys.attempt_key(2)).unlink()
    path.unlink()
    claim(open_store(url))  # a newer attempt whose parent nobody can tell any more
    for attempt in Path(url.removeprefix("file://")).glob("attempts/*"):
        attempt.write_bytes(b"{}")
    direct_list, remote_list = cli.json("list", url), cli.json("list", url, CKPT_SERVER=server.target)
    assert direct_list == remote_list
    assert direct_list["problem"]


def test_through_a_server_errors_have_the_same_exit_codes(
    cli: Cli, url: str, server: Server, tmp_path: Path
) -> None:
    path = Path(url.removeprefix("file://")) / keys.segment_key(CheckpointId(10, 1), 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for arguments, code in (
        (["list", f"{tmp_path}/store/other"], NOT_FOUND),
        (["show", url, "77"], NOT_FOUND),
        (["prune", url, "45", "--yes"], REFUSED),
        (["prune", url, "--keep-last", "0"], USAGE),
        (["verify", url, "10", "--deep"], DAMAGED),
        (["list", url, "--endpoint-url", "http://127.0.0.1:1"], USAGE),
    ):
        remote = cli.run(*arguments, "--server", server.target, code=code)
        if code != USAGE:
            direct = cli.run(*arguments, code=code)
            assert (remote.stdout, remote.stderr) == (direct.stdout, direct.stderr)


def test_sweep_takes_what_no_checkpoint_needs_also_through_a_server(
    cli: Cli, url: str, server: Server
) -> None:
    """Case I100."""
    store = open_store(url)
    for step in (5, 15, 60):  # 60 is newer than everything committed: it may still be committed
        build_checkpoint(store, step, 2 if step == 60 else 1, commit=False)
    folder = Path(url.removeprefix("file://"))
    (folder / "data" / ".tmp-left").write_bytes(b"half of an upload")
    objects = sum(1 for key in store.list_keys("") if "000000000005" in key.key) * 2

    assert cli.run("sweep", url).stdout == "nothing to sweep\n"  # all of it is young
    cli.run("sweep", url, "--older-than", "5m", code=USAGE)
    cli.run("sweep", url, "--older-than", "soon", code=USAGE)
    cli.run("sweep", url + "-wrong", code=NOT_FOUND)
    old = SystemClock().now() - 2 * 3600
    for path in folder.rglob("*"):
        os.utime(path, (old, old))
    for through in ([], ["--server", server.target]):
        dry = cli.json("sweep", url, "--older-than", "1h", "--dry-run", *through)
        assert (dry["deleted_objects"], dry["aborted_uploads"]) == (objects, 1)
        assert [row["checkpoint"][:12] for row in dry["checkpoints"]] == ["000000000005", "000000000015"]
        cli.run("sweep", url, "--older-than", "5m", *through, code=USAGE)
        cli.run("sweep", url + "-wrong", *through, code=NOT_FOUND)
    assert (
        f"{objects} objects and 1 unfinished upload deleted"
        in cli.run("sweep", url, "--older-than", "90m", "--server", server.target).stdout
    )
    assert cli.json("sweep", url, "--older-than", "0s", "--force")["deleted_objects"] == 0
    assert cli.steps(url) == [45, 50, 40, 30, 20, 10]
    cli.run("verify", url, "--all", "--deep")
    assert any("000000000060" in info.key for info in store.list_keys("data/"))


def test_a_server_pins_and_prunes_what_was_shown(cli: Cli, url: str, server: Server) -> None:
    through = ["--server", server.target]
    assert cli.run("pin", url, "10", *through).stdout == "000000000010.a000001 pinned\n"

    done = cli.json("prune", url, "--keep-last", "1", "--yes", *through)

    assert done["deleted"] == [f"0000000000{step}.a000001" for step in (50, 40, 30, 20)]
    assert cli.steps(url) == [45, 10]
    cli.run("unpin", url, "10", *through)
    cli.run("prune", url, "10", *through)
    assert cli.steps(url) == [45]


def test_status_shows_every_step_of_the_server(cli: Cli, url: str, server: Server) -> None:
    stage(server, url)

    document = cli.json("status")
    text = cli.run("status", "--server", server.target).stdout

    steps = {step["checkpoint"]: step for step in document["steps"]}
    assert steps["000000000060.a000002"]["state"] == "committed"
    assert steps["000000000070.a000002"]["state"] == "sealing"
    assert steps["000000000070.a000002"]["sealed_ranks"] == [0]
    assert steps["000000000070.a000002"]["ranks"] == [0, 1]
    assert document["oldest_pending_s"] > 0
    assert document["embedded"] is False
    assert "0 of 0-1" in text
    assert "oldest pending for" in text.splitlines()[-1]


def test_without_a_server_the_error_says_what_to_do(cli: Cli, url: str) -> None:
    found = cli.run("status", code=FAILED)
    assert "ckpt serve" in found.stderr

    assert "Traceback" in cli.run("list", url, "--server", "127.0.0.1:1", "--debug", code=FAILED).stderr


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_a_store_where_nobody_listens_is_told_soon_with_what_to_do(cli: Cli, scheme: str) -> None:
    keys_ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    endpoint = f"http://127.0.0.1:{free_port()}"
    began = time.monotonic()
    found = cli.run("list", f"{scheme}://b/run", "--json", AWS_ENDPOINT_URL=endpoint, code=FAILED, **keys_)
    assert time.monotonic() - began < 20  # half of it would do on a machine of our own
    assert json.loads(found.stdout)["error"]["code"] == "unreachable"
    assert "refused" in found.stderr or "Could not connect" in found.stderr
    assert "AWS_ENDPOINT_URL" in found.stderr


def test_a_wrong_url_is_no_run_whatever_is_asked(cli: Cli, url: str, server: Server) -> None:
    wrong = url + "-wrong"
    for arguments in (
        ["list", wrong],
        ["show", wrong],
        ["verify", wrong],
        ["verify", wrong, "--all"],
        ["prune", wrong, "--keep-last", "1"],
        ["pin", wrong, "latest"],
    ):
        for through in ([], ["--server", server.target]):
            error = cli.json(*arguments, *through, code=NOT_FOUND)["error"]
            assert (error["code"], error["context"]["url"]) == ("no-run", wrong), arguments


def test_serve_becomes_the_server(cli: Cli, tmp_path: Path) -> None:
    assert "--upload-concurrency" in cli.run("serve", "--help").stdout

    staging = tmp_path / "served"
    process = subprocess.Popen(
        [*cli.argv, "serve", "--staging", str(staging)], env=cli.env, stderr=subprocess.DEVNULL
    )
    try:
        eventually((staging / "server.json").exists, what="server is ready")
        document = cli.json("status", "--staging", str(staging))
        assert document["steps"] == []
        assert json.loads((staging / "server.json").read_text())["pid"] == process.pid
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_store_options_reach_the_store(cli: Cli, s3_server: Ministack) -> None:
    bucket = s3_server.make_bucket()
    url = f"s3://{bucket}/run"
    store = open_store(url, s3_server.options)
    claim(store)
    build_checkpoint(store, 5)
    env = {key: value for key, value in s3_server.env.items() if key != "AWS_ENDPOINT_URL"}

    by_option = cli.json("list", url, "--endpoint-url", s3_server.endpoint, **env)
    by_pairs = cli.json("list", url, *(f"--option={k}={v}" for k, v in s3_server.options.items()))
    by_environment = cli.json("list", url, **s3_server.env)

    assert by_option == by_pairs == by_environment
    assert by_option["latest"] == "000000000005.a000001"
    cli.run("verify", url, "--deep", **s3_server.env)
    assert cli.json("runs", f"s3://{bucket}", **s3_server.env)["runs"][0]["url"] == url
