"""Files of a staging directory are taken only where they are what they seem; names cannot lead elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.errors import CkptError, CorruptError, InvalidInputError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId, check_run_name, split_run_url
from ckpt.ops.tiers import LocalTier
from ckpt.storage.local import LocalStore
from ckpt.storage.own_file import open_own
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_server.runs import check_options, check_url
from tests.support.sealing import make_world, seal

ID = CheckpointId(10, 1)
KEY = "run-0123456789ab"
NOBODY = 65534


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    return StagingDir(tmp_path / "staging").ensure()


def read_all(staging: StagingDir) -> bytes:
    """Read the segment of rank 0 as a restore does."""
    path = staging.segment_path(KEY, ID, 0)
    data = bytearray(100)
    LocalTier(staging, KEY).read_into([memoryview(data)], ID, 0, 0)
    os.close(open_own(staging.path, path))
    return bytes(data)


def test_a_sealed_segment_is_read(staging: StagingDir) -> None:
    seal(staging, KEY, ID, make_world(), 0)
    assert read_all(staging)


def test_links_are_not_followed(staging: StagingDir, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1 << 20))
    seal(staging, KEY, ID, make_world(), 0)
    path = staging.segment_path(KEY, ID, 0)
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CorruptError) as caught:
        read_all(staging)
    assert caught.value.code == "foreign-file"

    index = staging.index_path(KEY, ID, 0)
    elsewhere = tmp_path / "index"
    index.rename(elsewhere)
    index.symlink_to(elsewhere)
    with pytest.raises(CorruptError):
        staging.read_index(KEY, ID, 0)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_links_above_the_file_are_not_followed(staging: StagingDir, tmp_path: Path, level: int) -> None:
    """The folder of the step, of the run, and ``runs`` itself."""
    seal(staging, KEY, ID, make_world(), 0)
    folder = staging.segment_path(KEY, ID, 0).parents[level]
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(CorruptError):
        read_all(staging)


def test_a_linked_staging_directory_is_the_operators_own(staging: StagingDir, tmp_path: Path) -> None:
    seal(staging, KEY, ID, make_world(), 0)
    (tmp_path / "link").symlink_to(staging.path)
    assert read_all(StagingDir(tmp_path / "link"))


def test_pipes_and_folders_are_no_segments(staging: StagingDir) -> None:
    seal(staging, KEY, ID, make_world(), 0)
    path = staging.segment_path(KEY, ID, 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptError):  # and does not wait for a writer
        read_all(staging)
    path.unlink()
    path.mkdir()
    with pytest.raises(CkptError):
        read_all(staging)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_taken(staging: StagingDir, tmp_path: Path) -> None:
    """Also behind a hard link, which has no owner of its own."""
    foreign = tmp_path / "foreign"
    foreign.write_bytes(bytes(1 << 20))
    os.chown(foreign, NOBODY, NOBODY)
    seal(staging, KEY, ID, make_world(), 0)
    path = staging.segment_path(KEY, ID, 0)
    path.unlink()
    os.link(foreign, path)
    with pytest.raises(CorruptError) as caught:
        read_all(staging)
    assert caught.value.code == "foreign-file"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_is_no_staging_directory(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(InvalidInputError) as caught:
        StagingDir(path).ensure()
    assert caught.value.code == "staging-unsafe"
    assert not list(path.iterdir())


BAD_NAMES = [
    "..",
    ".",
    "",
    "../x",
    "a/b",
    "/etc",
    "a\0b",
    "a\nb",
    "-x",
    ".hidden",
    "é",
    "a\u202eb",
    "\uff0e\uff0e",
]
BAD_NAMES += ["a" * 200, "a\\b", "a b", "%2e%2e", "\u0661run", "run\n"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_run_names_and_run_keys_cannot_leave(name: str, staging: StagingDir) -> None:
    with pytest.raises(InvalidInputError):
        check_run_name(name)
    for place in (staging, replicas_dir(staging)):
        with pytest.raises(InvalidInputError):
            place.run_dir(name)
        with pytest.raises(InvalidInputError):
            place.read_run_config(name)


@pytest.mark.parametrize("name", ["..", ".", "a\0b", "a\nb", "é", "a b", "%2e%2e", "-x"])
def test_the_last_part_of_a_url_is_a_run_name(name: str) -> None:
    with pytest.raises(InvalidInputError):
        split_run_url(f"s3://bucket/{name}")


@pytest.mark.parametrize(
    "key", ["..", "../x", "a/../b", "/etc/passwd", "a//b", "a\0b", "", "a/.", ".tmp-x", "a/"]
)
def test_keys_cannot_leave_a_directory_store(tmp_path: Path, key: str) -> None:
    store = LocalStore(tmp_path / "store")
    (tmp_path / "x").write_bytes(b"outside")
    for call in (lambda: store.put(key, b"1"), lambda: store.get(key), lambda: store.delete([key])):
        with pytest.raises(InvalidInputError):
            call()
    assert (tmp_path / "x").read_bytes() == b"outside"


@pytest.mark.parametrize("key", ["..", "data/../../x", "/x", ""])
def test_stored_keys_are_looked_at(key: str) -> None:
    with pytest.raises(CorruptError):
        keys.require_below(key)


@pytest.mark.parametrize(
    "text", ["\u0660" * 12 + ".a000001", "000000000012.a000001\n", "12.a1", "000000000012.a000001/.."]
)
def test_digits_are_ascii_and_ids_are_whole(text: str) -> None:
    """Python's int() takes the digits of every script; two keys must never mean one checkpoint."""
    with pytest.raises(InvalidInputError):
        CheckpointId.parse(text)
    assert keys.parse_pin_key(f"pins/{text}") is None
    assert keys.parse_manifest_key(f"manifests/{0:018d}.{text}.pb") is None


@pytest.mark.parametrize(
    "option", ["secret", "aws_session_token", "Password", "connection_string", "sas", "credential"]
)
def test_secrets_are_no_store_options(option: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_options({option: "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["ftp://me:hunter2@host/run", "https://bucket/run?X-Amz-Signature=hunter2", "s3://b/run?token=hunter2"],
)
def test_secrets_are_no_part_of_a_url(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_url(url)
    assert "hunter2" not in str(caught.value)
