"""The ckpt command as a process: what it prints, what it changes, how it exits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.manifest import encode_manifest
from ckpt.storage.open import open_store
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import build_checkpoint, claim
from tests.support.cli import DAMAGED, FAILED, LATEST, NOT_FOUND, REFUSED, USAGE, Cli, make_run


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "staging")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_run(tmp_path)


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
    """Case I72."""
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
