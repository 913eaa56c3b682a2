"""Encrypted uploads end to end: a server that encrypts; readers with the key, without it, with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.errors import InvalidInputError
from ckpt.format.ids import CheckpointId
from tests.support.cli import DONE, FAILED, USAGE, Cli
from tests.support.sealing import make_world
from tests.support.server import Server, save

ID, NEXT = CheckpointId(10, 1), CheckpointId(20, 1)


def key_file(folder: Path, digit: str) -> str:
    path = folder / f"keys-{digit}"
    path.write_text(f"prod {digit * 64}\n")
    path.chmod(0o600)
    return str(path)


def test_a_server_encrypts_and_readers_need_the_key(tmp_path: Path, url: str) -> None:
    world = make_world()
    keys = {"CKPT_ENCRYPTION_KEYS": key_file(tmp_path, "7")}
    environment = keys | {"CKPT_ENCRYPTION_KEY": "prod"}
    with Server(tmp_path / "staging", environment=environment) as server:
        run_key = save(server, url, world, ID)
        server.wait_for(run_key, ID)
        with server.restore() as restore:
            assert restore.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()
        server.wait_for(save(server, url, make_world(seed=2), NEXT), NEXT)
        assert "7" * 64 not in server.log()
    row = world.tensors["weight"][5].tobytes()
    stored = [path for path in (tmp_path / "store").rglob("data/*/*/*") if path.is_file()]
    assert len(stored) == 2 * world.size
    assert all(row not in path.read_bytes() for path in stored)

    cli = Cli(tmp_path / "elsewhere")
    cli.run("verify", url, "--deep", **keys, code=DONE)
    for wrong in ({}, {"CKPT_ENCRYPTION_KEYS": key_file(tmp_path, "8")}):
        refused = cli.run("verify", url, "--deep", **wrong, code=USAGE)
        assert "prod" in refused.stderr
        assert "8" * 64 not in refused.stderr
    diff = ["diff", f"{url}@10", "@20"]
    different = cli.json(*diff, **keys, code=FAILED)["tensors"]["differences"]
    assert {item["name"] for item in different} == set(world.tensors)
    for wrong in ({}, {"CKPT_ENCRYPTION_KEYS": key_file(tmp_path, "8")}):
        refused = cli.run(*diff, **wrong, code=USAGE)
        assert "prod" in refused.stderr
        assert "8" * 64 not in refused.stderr
    cli.run("diff", url, "@20")  # what digests prove equal needs no key
    cli.run("show", url)  # what tells nothing of the contents needs no key

    with Server(tmp_path / "other") as server, server.restore() as restore:
        with pytest.raises(InvalidInputError) as caught:
            restore.read_tensor(url, "weight")
        assert caught.value.code == "encryption-key"


def test_a_server_without_its_key_does_not_start(tmp_path: Path) -> None:
    server = Server(tmp_path / "staging", environment={"CKPT_ENCRYPTION_KEY": "prod"})
    assert server.spawn().wait(20) == FAILED
    assert "CKPT_ENCRYPTION_KEYS" in server.log()
