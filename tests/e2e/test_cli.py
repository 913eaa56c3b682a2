"""The ckpt command as a process: what it prints, what it changes, how it exits."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.clock import SystemClock
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.manifest import encode_manifest
from ckpt.storage.open import open_store
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import build_checkpoint, claim
from tests.support.s3 import Ministack, free_port
from tests.support.sealing import make_world, seal
from tests.support.server import Server, eventually

DONE, FAILED, USAGE, NOT_FOUND, DAMAGED, REFUSED = range(6)
_KEPT_OUT = ("CKPT_", "AWS_")


class Cli:
    """Runs ``python -m ckpt.cli`` with a staging directory of its own."""

    def __init__(self, staging: Path) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(_KEPT_OUT)}
        self.env = clean | {"CKPT_STAGING": str(staging), "COLUMNS": "80"}
        self.argv = [sys.executable, "-m", "ckpt.cli"]

    def run(self, *arguments: str, code: int = DONE, **env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit code."""
        found = subprocess.run(
            [*self.argv, *arguments],
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode == code, found.stdout + found.stderr
        assert "Traceback" not in found.stderr or "--debug" in arguments
        return found

    def json(self, *arguments: str, code: int = DONE, **env: str) -> Any:
        """Run with ``--json`` and return the document."""
        return json.loads(self.run(*arguments, "--json", code=code, **env).stdout)

    def steps(self, url: str) -> list[int]:
        return [row["step"] for row in self.json("list", url)["checkpoints"]]

    def terminal(self, *arguments: str, answer: str = "", code: int = DONE) -> str:
        """Run on a terminal of 80 columns, type ``answer``, return everything shown."""
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [*self.argv, *arguments],
            env=self.env | {"TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        os.write(master, answer.encode())
        shown = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # Linux says EIO when the last writer has left
                break
            if not data:
                break
            shown += data
        os.close(master)
        assert process.wait(60) == code, shown.decode()
        return shown.decode().replace("\r\n", "\n")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "staging")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run: attempt 1 with steps 10 to 50, attempt 2 resumed from 40 with step 45."""
    url = f"file://{tmp_path}/store/run"
    store = open_store(url)
    claim(store)
    for step in (10, 20, 30, 40, 50):
        build_checkpoint(store, step, chunk_nbytes=64 * 1024)
    parent = CheckpointId(40, 1)
    claim(store, parent=parent)
    build_checkpoint(store, 45, 2, parent=parent, chunk_nbytes=64 * 1024)
    return url


LATEST = "000000000045.a000002"


def test_version_help_and_usage_errors(cli: Cli, url: str) -> None:
    assert re.fullmatch(r"ckpt \d+\.\d+\.\d+\n", cli.run("--version").stdout)
    assert "Exit codes" in cli.run("--help").stdout
    for arguments in (["nonsense"], ["list", url, "--nonsense"], ["prune", url, "--keep-last", "0"]):
        found = cli.run(*arguments, code=USAGE)
        assert found.stdout == ""
        assert found.stderr


def test_list_shows_the_newest_first_with_marks(cli: Cli, url: str) -> None:
    cli.run("pin", url, "20")

    document = cli.json("list", url)
    text = cli.run("list", url).stdout

    rows = document["checkpoints"]
    assert [row["step"] for row in rows] == [45, 50, 40, 30, 20, 10]
    assert [row["checkpoint"] for row in rows if row["latest"]] == [LATEST] == [document["latest"]]
    assert [row["step"] for row in rows if row["pinned"]] == [20]
    assert document["count"] == 6
    assert rows[0]["details"]["parent"] == "000000000040.a000001"
    assert rows[0]["details"]["world_size"] == 2
    head, *lines, footer = text.splitlines()
    assert head.split() == ["STEP", "CHECKPOINT", "COMMITTED", "SIZE", "RANKS", "MARKS"]
    assert [line.split()[1] for line in lines] == [row["checkpoint"] for row in rows]
    assert lines[0].endswith("latest")
    assert footer == f"6 checkpoints in {url}"


def test_list_shows_few_unless_asked(cli: Cli, url: str) -> None:
    short = cli.run("list", url, "--limit", "2").stdout.splitlines()
    full = cli.run("list", url, "--limit", "2", "--all").stdout.splitlines()
    long = cli.run("list", url, "--long").stdout.splitlines()

    assert len(short) == 4
    assert short[-1].startswith("6 checkpoints")
    assert "--all" in short[-1]
    assert len(full) == 8
    assert "SIZE" not in full[0]
    assert "RESUMED FROM" in long[0]
    assert "000000000040.a000001" in long[1]


def test_a_bare_path_is_a_url(cli: Cli, url: str) -> None:
    assert cli.json("list", url.removeprefix("file://")) == cli.json("list", url)


def test_show_tells_layout_ranks_and_places(cli: Cli, url: str) -> None:
    document = cli.json("show", url, "45")
    text = cli.run("show", url, "45").stdout

    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    weight = tensors["model.weight"]
    assert weight["shape"] == [13, 6]
    assert weight["nbytes"] == 13 * 6 * 4
    assert weight["mesh"] == {"shape": [2], "names": ["dp"]}
    assert weight["placements"] == ["Shard(0)"]
    assert weight["ranks"] == [0, 1]
    assert len(tensors["model.bias"]["ranks"]) == 1
    assert document["parent"] == "000000000040.a000001"
    assert document["environment"] == {"ckpt": "test"}
    assert [segment["rank"] for segment in document["segments"]] == [0, 1]
    assert document["nbytes"] == sum(segment["nbytes"] for segment in document["segments"])
    for expected in (
        "model.embedding",
        "1031x600",
        "dp=2:S(0)",
        "dp=2:R",
        "000000000040.a000001",
        "ckpt=test",
    ):
        assert expected in text
    for segment in document["segments"]:
        assert segment["object_key"] in text

    matched = cli.json("show", url, "--match", "optimizer.*")
    assert [tensor["name"] for tensor in matched["tensors"]] == ["optimizer.phase", "optimizer.step"]
    assert "... 4 more tensors" in cli.run("show", url, "--limit", "1").stdout
    cli.run("show", url, "--match", "nothing.*", code=NOT_FOUND)


def test_what_is_not_there_exits_3(cli: Cli, url: str, tmp_path: Path) -> None:
    nowhere = f"file://{tmp_path}/store/other"
    for arguments in (
        ["list", nowhere],
        ["show", nowhere],
        ["verify", nowhere],
        ["show", url, "77"],
        ["verify", url, "000000000010.a000002"],
        ["pin", url, "77"],
        ["prune", url, "77"],
    ):
        found = cli.run(*arguments, code=NOT_FOUND)
        assert found.stdout == ""
        assert found.stderr.startswith("error: ")
        assert "\n  try: " in found.stderr

    error = cli.json("show", url, "77", code=NOT_FOUND)["error"]
    assert (error["kind"], error["code"]) == ("NotFoundError", "no-checkpoint")
    assert error["context"]["checkpoint"] == "77"


def test_a_run_that_has_committed_nothing_yet_is_an_empty_list(cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/fresh"
    claim(open_store(url))

    assert cli.json("list", url)["checkpoints"] == []
    assert cli.run("list", url).stdout == f"0 checkpoints in {url}\n"


def test_a_flipped_bit_is_found_and_named(cli: Cli, url: str) -> None:
    key = keys.segment_key(CheckpointId(45, 2), 1)
    path = Path(url.removeprefix("file://")) / key
    data = bytearray(path.read_bytes())
    position = 3 * 64 * 1024 + 17
    data[position] ^= 0x10
    path.write_bytes(data)

    quick = cli.json("verify", url)
    deep = cli.json("verify", url, "--deep", code=DAMAGED)
    text = cli.run("verify", url, "--deep", code=DAMAGED).stdout
    everything = cli.json("verify", url, "--all", "--deep", code=DAMAGED)

    assert quick["checkpoints"][0]["problems"] == []
    (problem,) = deep["checkpoints"][0]["problems"]
    assert problem["code"] == "digest"
    assert problem["context"]["key"] == key
    assert problem["context"]["chunk"] == "3"
    assert deep["checkpoints"][0]["checked_nbytes"] > 64 * 1024
    assert f"key: {key}" in text
    assert "chunk: 3" in text
    damaged = [item["checkpoint"] for item in everything["checkpoints"] if item["problems"]]
    assert damaged == [LATEST]
    assert len(everything["checkpoints"]) == 6
    cli.run("verify", url, "40", "--deep")


def test_a_damaged_manifest_hides_only_itself(cli: Cli, url: str) -> None:
    path = Path(url.removeprefix("file://")) / keys.manifest_key(CheckpointId(30, 1))
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    rows = cli.json("list", url)["checkpoints"]
    text = cli.run("list", url).stdout

    assert [row["step"] for row in rows if row["damaged"]] == [30]
    assert sum(row["details"] is not None for row in rows) == 5
    assert re.search(r"^ *30 .*damaged$", text, re.MULTILINE)
    (verified,) = cli.json("verify", url, "30", code=DAMAGED)["checkpoints"]
    assert verified["checkpoint"] == "000000000030.a000001"
    assert verified["problems"]
    cli.run("show", url, "30", code=DAMAGED)


def test_prune_deletes_exactly_what_the_dry_run_listed(cli: Cli, url: str) -> None:
    cli.run("pin", url, "10")
    arguments = ["prune", url, "--keep-last", "2", "--keep-every", "20"]

    text = cli.run(*arguments, "--dry-run").stdout
    planned = cli.json(*arguments, "--dry-run")
    before = cli.json("list", url)["checkpoints"]
    done = cli.json(*arguments, "--yes")
    after = cli.json("list", url)["checkpoints"]

    reasons = {verdict["checkpoint"]: verdict["reason"] for verdict in planned["verdicts"]}
    assert reasons == {
        LATEST: "latest",
        "000000000050.a000001": "on an abandoned branch",
        "000000000040.a000001": "among the last 2",
        "000000000030.a000001": "no rule keeps it",
        "000000000020.a000001": "multiple of 20",
        "000000000010.a000001": "pinned",
    }
    assert planned["deleted"] == []
    assert len(before) == 6
    condemned = [verdict["checkpoint"] for verdict in planned["verdicts"] if not verdict["keep"]]
    assert done["deleted"] == condemned == ["000000000050.a000001", "000000000030.a000001"]
    assert done["deleted_objects"] == planned["deleted_objects"] > 2
    assert [row["checkpoint"] for row in after] == [
        row["checkpoint"] for row in before if row["checkpoint"] not in condemned
    ]
    assert re.search(r"^000000000030\.a000001 +delete +no rule keeps it$", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith("dry run: 2 checkpoints (")
    assert cli.run(*arguments).stdout.endswith("nothing to delete\n")
    cli.run("verify", url, "--all", "--deep")


def test_prune_refuses_what_a_run_would_resume_from(cli: Cli, url: str) -> None:
    cli.run("pin", url, "20")

    found = cli.run("prune", url, "45", "--yes", code=REFUSED)
    pinned = cli.run("prune", url, "20", "--yes", code=REFUSED)
    Path(url.removeprefix("file://"), keys.segment_key(CheckpointId(45, 2), 0)).unlink()
    damaged = cli.run("prune", url, "--keep-last", "1", "--yes", code=REFUSED)

    assert LATEST in found.stderr
    assert "unpin" in pinned.stderr
    assert "try: `ckpt verify" in damaged.stderr
    assert cli.steps(url) == [45, 50, 40, 30, 20, 10]


def test_the_only_checkpoint_cannot_be_pruned(cli: Cli, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/one"
    store = open_store(url)
    claim(store)
    build_checkpoint(store, 7)

    cli.run("prune", url, "7", "--yes", code=REFUSED)
    assert cli.run("prune", url, "--keep-last", "1", "--yes").stdout.endswith("nothing to delete\n")
    assert cli.steps(url) == [7]


def test_prune_by_name_deletes_just_that(cli: Cli, url: str) -> None:
    cli.run("prune", url, "20", "000000000030.a000001")

    assert cli.steps(url) == [45, 50, 40, 10]


def test_a_pin_holds_until_it_is_taken_off(cli: Cli, url: str) -> None:
    assert cli.run("pin", url, "10").stdout == "000000000010.a000001 pinned\n"
    cli.run("prune", url, "--keep-last", "1", "--yes")
    assert cli.steps(url) == [45, 10]

    assert cli.json("unpin", url, "10") == {"url": url, "checkpoint": "000000000010.a000001", "pinned": False}
    cli.run("prune", url, "--keep-last", "1", "--yes")
    assert cli.steps(url) == [45]


def test_on_a_terminal_prune_asks(cli: Cli, url: str) -> None:
    refused = cli.terminal("prune", url, "--keep-last", "3", answer="n\n", code=FAILED)
    assert "Delete 3 checkpoints for good?" in refused
    assert "nothing was deleted" in refused
    assert len(cli.steps(url)) == 6

    agreed = cli.terminal("prune", url, "--keep-last", "3", answer="y\n")
    assert "3 checkpoints (" in agreed
    assert cli.steps(url) == [45, 40, 30]

    assert "Delete" not in cli.terminal("prune", url, "--keep-last", "2", "--yes")
    assert cli.steps(url) == [45, 40]


def test_a_terminal_gets_colours_and_no_line_is_cut(cli: Cli, url: str) -> None:
    listed = cli.terminal("list", url)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", cli.terminal("show", url))

    assert "\x1b[" in listed
    assert LATEST in listed
    rows = shown.split("\n\n", 1)[1].splitlines()
    assert max(map(len, rows)) <= 80
    assert "data/" in shown
    assert "\x1b[" not in cli.run("list", url).stdout


def test_progress_is_shown_on_stderr_only(cli: Cli, url: str) -> None:
    assert "verifying" in cli.terminal("verify", url, "--deep")
    assert cli.run("verify", url, "--deep").stderr == ""


def test_ten_thousand_checkpoints_are_listed_from_their_keys(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "store" / "big"
    (root / "manifests").mkdir(parents=True)
    for step in range(1, 10_001):
        ident = CheckpointId(step, 1 + step // 4000)
        manifest = disk_pb2.Manifest(run="big", id=ident.to_proto(), world_size=4096, nbytes=step << 30)
        # Only the newest can be read: a listing that opened any other would say "damaged".
        data = encode_manifest(manifest) if step > 9_980 else b""
        (root / keys.manifest_key(ident)).write_bytes(data)

    short = cli.run("list", str(root)).stdout
    full = cli.run("list", str(root), "--all").stdout
    document = cli.json("list", str(root))

    assert len(short.splitlines()) == 22
    assert short.splitlines()[-1].startswith("10,000 checkpoints in ")
    assert "9.77 TiB" in short
    assert len(full.splitlines()) == 10_002
    assert "damaged" not in short + full
    assert document["count"] == len(document["checkpoints"]) == 10_000
    assert document["latest"] == document["checkpoints"][0]["checkpoint"] == "000000010000.a000003"
    assert sum(row["details"] is not None for row in document["checkpoints"]) == 20


def test_runs_are_found_below_a_root(cli: Cli, url: str, tmp_path: Path) -> None:
    claim(open_store(f"file://{tmp_path}/store/fresh"))
    (tmp_path / "store" / "notes").mkdir()
    (tmp_path / "store" / "notes" / "readme").write_text("no run")

    document = cli.json("runs", f"{tmp_path}/store")
    text = cli.run("runs", f"{tmp_path}/store").stdout

    assert document["runs"] == [
        {"run": "fresh", "url": f"file://{tmp_path}/store/fresh", "checkpoints": 0, "latest": None},
        {"run": "run", "url": url, "checkpoints": 6, "latest": LATEST},
    ]
    assert text.splitlines()[-1].startswith("2 runs below ")


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
