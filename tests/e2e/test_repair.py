"""``ckpt repair``: directly, through a server, from this node's copies and from another node's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from tests.support.builders import Built, build_checkpoint, claim
from tests.support.cli import DAMAGED, DONE, NOT_FOUND, Cli
from tests.support.sealing import seal_copy
from tests.support.server import Server

_CHUNK = 64 << 10


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "staging")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


@pytest.fixture
def built(url: str) -> Built:
    store = open_store(url)
    claim(store)
    return build_checkpoint(store, 10, chunk_nbytes=_CHUNK)


def copies(staging: StagingDir, url: str, built: Built) -> None:
    seal_copy(staging.ensure(), keys.run_key(url), open_store(url), built, [0, 1])


def harm(url: str) -> dict[Path, bytes]:
    """Damage one object of each kind that can be mended; return what they held."""
    folder, ident = Path(url.removeprefix("file://")), CheckpointId(10, 1)
    paths = [
        folder / keys.segment_key(ident, 0),
        folder / keys.segment_key(ident, 1),
        folder / keys.group_key(ident, 1, 2),
        next(folder.glob("layouts/*.pb")),
    ]
    good = {path: path.read_bytes() for path in paths}
    paths[0].unlink()
    paths[1].write_bytes(good[paths[1]][:-100] + b"?" + good[paths[1]][-99:])
    paths[2].unlink()
    paths[3].write_bytes(b"")
    return good


def is_good(good: dict[Path, bytes]) -> bool:
    return all(path.is_file() and path.read_bytes() == data for path, data in good.items())


@pytest.mark.fault(
    "Damage",
    "objects gone, cut and changed, layout empty",
    "files of the store",
    "`ckpt repair` puts all of them again from this node's copies",
)
def test_I124_repair_from_this_nodes_copies(cli: Cli, url: str, built: Built) -> None:
    copies(StagingDir(cli.env["CKPT_STAGING"]), url, built)
    assert "nothing to repair" in cli.run("repair", url).stdout
    good = harm(url)
    cli.run("verify", url, "--deep", code=DAMAGED)

    dry = cli.json("repair", url, "--dry-run")
    assert (len(dry["mended"]), dry["left"], dry["dry_run"]) == (4, [], True)
    assert not is_good(good)

    shown = cli.run("repair", url, "10").stdout
    assert "4 objects put again, 0 still damaged" in shown
    assert is_good(good)
    cli.run("verify", url, "--deep")
    assert cli.json("repair", url)["mended"] == []


def test_repair_without_a_copy_says_what_is_left(cli: Cli, url: str, built: Built) -> None:
    good = harm(url)
    document = cli.json("repair", url, "--peer", "127.0.0.1:1", code=DAMAGED)
    assert document["mended"] == []
    assert [problem["code"] for problem in document["left"]] == ["missing"]
    assert "repair" in document["left"][0]["context"]
    assert list(document["unreachable"]) == ["127.0.0.1:1"]
    assert not is_good(good)
    cli.run("repair", url, "77", code=NOT_FOUND)
    cli.run("repair", url + "-wrong", code=NOT_FOUND)


@pytest.mark.fault(
    "Damage",
    "objects gone, cut and changed, layout empty; copies on another node only",
    "files of the store",
    "`ckpt repair --peer` puts all of them again",
)
def test_I124_repair_from_a_peer_directly_and_through_a_server(
    cli: Cli, url: str, built: Built, tmp_path: Path
) -> None:
    other = StagingDir(tmp_path / "other")
    copies(other, url, built)
    with (
        Server(other.path, "--listen", "127.0.0.1:0", "--insecure") as peer,
        Server(Path(cli.env["CKPT_STAGING"])) as server,
    ):
        good = harm(url)
        direct = cli.json("repair", url, "--peer", peer.tcp_target)
        assert is_good(good)
        assert {name for row in direct["mended"] for name in row["sources"]} == {"peer", "remote"}

        harm(url)
        through = ["--server", server.target]
        assert "still damaged" in cli.run("repair", url, *through, code=DAMAGED).stdout
        remote = cli.json("repair", url, "--peer", peer.tcp_target, *through, code=DONE)
        assert is_good(good)
        assert remote == direct
