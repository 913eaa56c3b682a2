"""The staging directory: markers, damage, tokens, keys from elsewhere."""

from __future__ import annotations

import errno
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.digest import digest
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.storage.staging import RunConfig, StagingDir, default_staging_path, os_errors
from ckpt_proto.v1 import disk_pb2

KEY = "run-0123456789ab"
IDENT = CheckpointId(12, 3)


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    return StagingDir(tmp_path / "deep" / "staging").ensure()


def seal(staging: StagingDir, ident: CheckpointId, rank: int) -> disk_pb2.SegmentIndex:
    index = disk_pb2.SegmentIndex(id=ident.to_proto(), rank=rank, nbytes=3)
    staging.make_checkpoint_dir(KEY, ident)
    staging.segment_path(KEY, ident, rank).write_bytes(b"abc")
    staging.write_index(KEY, ident, rank, index)
    return index


def test_directory_is_private_and_its_token_stays(staging: StagingDir) -> None:
    assert stat.S_IMODE(staging.path.stat().st_mode) == 0o700
    token = staging.token()
    assert bytes.fromhex(token.decode())
    assert StagingDir(staging.path).ensure().token() == token


def test_racers_agree_on_one_token(tmp_path: Path) -> None:
    places = [StagingDir(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(StagingDir.token, places))
    assert len(tokens) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_directories_have_different_tokens(tmp_path: Path) -> None:
    assert StagingDir(tmp_path / "a").ensure().token() != StagingDir(tmp_path / "b").ensure().token()


def test_default_path_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_STAGING", "/somewhere")
    assert default_staging_path() == Path("/somewhere")
    monkeypatch.delenv("CKPT_STAGING")
    assert default_staging_path() == Path.home() / ".cache" / "ckpt" / "staging"


def test_socket_is_in_the_directory_unless_its_path_is_too_long(tmp_path: Path) -> None:
    """Case I64."""
    assert StagingDir("/s").socket_target() == "unix:/s/server.sock"
    long = StagingDir(tmp_path / ("x" * 100))
    path = long.socket_path()
    assert path.parent == Path(tempfile.gettempdir())
    assert len(str(path)) < 100
    assert long.socket_path() == path != StagingDir(tmp_path / ("y" * 100)).socket_path()


def test_run_config_survives_and_an_unchanged_one_is_not_written_again(staging: StagingDir) -> None:
    peers = (
        PeerNode(node_id="0a", target="h:1", domain="rack-1", host="h", ranks=(0, 1)),
        PeerNode(node_id="0b", target=None, domain="rack-2", host="i"),
    )
    config = RunConfig(
        url="s3://b/run",
        store_options={"region": "x"},
        keep_local=5,
        keep_last=3,
        keep_every=100,
        peers=peers,
        replication_factor=2,
        replication_jump=1,
        replication_rate=10**9,
    )
    staging.write_run_config(KEY, config)
    path = staging.run_dir(KEY) / "run.json"
    before = path.stat()
    staging.write_run_config(KEY, config)
    assert path.stat().st_ino == before.st_ino
    assert staging.read_run_config(KEY) == config
    assert RunConfig.from_proto(config.to_proto()) == config
    assert staging.run_keys() == [KEY]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"keep_local": 1}', b'{"url": "x", "keep_last": "a"}'])
def test_unreadable_run_config_is_corrupt(staging: StagingDir, data: bytes) -> None:
    staging.write_run_config(KEY, RunConfig(url="s3://b/run"))
    (staging.run_dir(KEY) / "run.json").write_bytes(data)
    with pytest.raises(CorruptError):
        staging.read_run_config(KEY)


def test_unknown_run_is_not_found(staging: StagingDir) -> None:
    with pytest.raises(NotFoundError):
        staging.read_run_config(KEY)
    assert staging.run_keys() == []
    assert staging.checkpoints(KEY) == []


@pytest.mark.parametrize("key", ["", "..", "../x", "a/b", "/etc", ".hidden", "a\0b", "a\n"])
def test_run_key_that_could_leave_the_directory_is_refused(staging: StagingDir, key: str) -> None:
    with pytest.raises(InvalidInputError):
        staging.run_dir(key)


def test_layout_is_stored_once_verified_and_mended(staging: StagingDir) -> None:
    payload = b"layout bytes"
    name = digest(payload)
    with pytest.raises(NotFoundError):
        staging.layout(KEY, name)
    staging.write_layout(KEY, name, payload)
    assert staging.layout(KEY, name) == payload
    path = next((staging.run_dir(KEY) / "layouts").iterdir())
    inode = path.stat().st_ino
    staging.write_layout(KEY, name, payload)
    assert path.stat().st_ino == inode
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        staging.layout(KEY, name)
    staging.write_layout(KEY, name, payload)
    assert staging.layout(KEY, name) == payload
    with pytest.raises(InvalidInputError):
        staging.write_layout(KEY, bytes(16), payload)


def test_presence_of_the_index_means_sealed(staging: StagingDir) -> None:
    other = CheckpointId(2, 4)
    assert staging.sealed_ranks(KEY, IDENT) == []
    index = seal(staging, IDENT, 3)
    seal(staging, IDENT, 1)
    staging.make_checkpoint_dir(KEY, other)
    staging.segment_tmp_path(KEY, other, 0).write_bytes(b"unfinished")
    assert staging.checkpoints(KEY) == [other, IDENT]
    assert staging.sealed_ranks(KEY, IDENT) == [1, 3]
    assert staging.sealed_ranks(KEY, other) == []
    assert staging.read_index(KEY, IDENT, 3) == index
    with pytest.raises(NotFoundError):
        staging.read_index(KEY, other, 0)


def test_index_of_another_segment_or_damaged_is_corrupt(staging: StagingDir) -> None:
    seal(staging, IDENT, 1)
    path = staging.index_path(KEY, IDENT, 1)
    path.rename(staging.index_path(KEY, IDENT, 2))
    with pytest.raises(CorruptError) as caught:
        staging.read_index(KEY, IDENT, 2)
    assert caught.value.code == "mismatch"
    seal(staging, IDENT, 1)
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        staging.read_index(KEY, IDENT, 1)


def test_index_sealed_elsewhere_is_kept_byte_for_byte(staging: StagingDir) -> None:
    seal(staging, IDENT, 1)
    data = staging.read_index_bytes(KEY, IDENT, 1)
    staging.write_index(KEY, IDENT, 1, data)
    assert staging.read_index_bytes(KEY, IDENT, 1) == data


def test_uploaded_and_committed_are_remembered(staging: StagingDir) -> None:
    seal(staging, IDENT, 1)
    assert staging.read_uploaded(KEY, IDENT, 1) is None
    assert not staging.is_committed(KEY, IDENT)
    record = disk_pb2.UploadRecord(object_key="data/x", nbytes=3)
    staging.mark_uploaded(KEY, IDENT, 1, record)
    staging.mark_committed(KEY, IDENT)
    assert staging.read_uploaded(KEY, IDENT, 1) == record
    assert staging.is_committed(KEY, IDENT)


def test_removed_checkpoint_is_gone_and_removing_it_again_is_no_error(staging: StagingDir) -> None:
    seal(staging, IDENT, 1)
    staging.remove_checkpoint(KEY, IDENT)
    assert staging.checkpoints(KEY) == []
    staging.remove_checkpoint(KEY, IDENT)


def test_interrupted_removal_never_leaves_a_marker_without_its_segment(
    staging: StagingDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(staging, IDENT, 1)

    def crash(path: Path) -> None:
        raise OSError(errno.EIO, "crash")

    monkeypatch.setattr("shutil.rmtree", crash)
    with pytest.raises(UnavailableError):
        staging.remove_checkpoint(KEY, IDENT)
    assert staging.sealed_ranks(KEY, IDENT) == []
    assert staging.segment_path(KEY, IDENT, 1).exists()


@pytest.mark.parametrize(
    ("number", "cls", "code"),
    [
        (errno.ENOSPC, UnavailableError, "no-space"),
        (errno.EDQUOT, UnavailableError, "no-space"),
        (errno.EFBIG, UnavailableError, "no-space"),
        (errno.EACCES, UnavailableError, "denied"),
        (errno.EIO, UnavailableError, "unavailable"),
        (errno.ENOENT, NotFoundError, "not-found"),
    ],
)
def test_os_errors_become_ours_and_keep_the_message(number: int, cls: type[Exception], code: str) -> None:
    with pytest.raises(cls) as caught, os_errors("it failed", path="/x"):
        raise OSError(number, "reason")
    assert (caught.value.message, caught.value.code) == ("it failed", code)  # type: ignore[attr-defined]
    assert caught.value.context["path"] == "/x"  # type: ignore[attr-defined]


def test_unlistable_folder_is_an_error_and_not_nothing(
    staging: StagingDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "bad disk")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UnavailableError):
        staging.run_keys()
