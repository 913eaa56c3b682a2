"""Retired segments kept to be overwritten: what stays visible, who may still read them, when they go."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId
from ckpt.storage import spares
from ckpt.storage.spares import drop_spares, is_ours_alone, retire_checkpoint, spare_path, take_spare
from ckpt.storage.staging import StagingDir

KEY = "run-0123456789ab"
OLD, NEW = CheckpointId(10, 1), CheckpointId(20, 1)


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    return StagingDir(tmp_path / "staging").ensure()


def seal(staging: StagingDir, ident: CheckpointId, *ranks: int) -> None:
    staging.make_checkpoint_dir(KEY, ident)
    for rank in ranks:
        staging.segment_path(KEY, ident, rank).write_bytes(b"%d of %d" % (rank, ident.step))
        staging.write_index(KEY, ident, rank, b"sealed")


def test_retired_step_is_gone_and_its_segments_are_spares(staging: StagingDir) -> None:
    seal(staging, OLD, 0, 3)
    retire_checkpoint(staging, KEY, OLD)

    assert staging.checkpoints(KEY) == []
    assert spare_path(staging, KEY, 0).read_bytes() == b"0 of 10"
    assert spare_path(staging, KEY, 3).read_bytes() == b"3 of 10"


def test_one_spare_is_kept_per_rank(staging: StagingDir) -> None:
    for ident in (OLD, NEW):
        seal(staging, ident, 0)
        retire_checkpoint(staging, KEY, ident)

    assert [path.name for path in spare_path(staging, KEY, 0).parent.iterdir()] == [
        spare_path(staging, KEY, 0).name
    ]
    assert spare_path(staging, KEY, 0).read_bytes() == b"0 of 20"


def test_unfinished_segments_never_become_spares(staging: StagingDir) -> None:
    staging.make_checkpoint_dir(KEY, OLD)
    staging.segment_path(KEY, OLD, 0).write_bytes(b"renamed, never sealed")
    retire_checkpoint(staging, KEY, OLD)

    assert not spare_path(staging, KEY, 0).exists()
    assert staging.checkpoints(KEY) == []


@pytest.mark.parametrize("call", ["replace", "rmtree"])
def test_retiring_cut_short_leaves_no_sealed_step_and_can_be_repeated(
    staging: StagingDir, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    seal(staging, OLD, 0, 1)

    def crash(*_: object) -> None:
        raise OSError("crash")

    with monkeypatch.context() as broken:
        broken.setattr(Path if call == "replace" else shutil, call, crash)
        with pytest.raises(CkptError):
            retire_checkpoint(staging, KEY, OLD)
    assert staging.sealed_ranks(KEY, OLD) == []

    retire_checkpoint(staging, KEY, OLD)
    assert staging.checkpoints(KEY) == []


def test_marker_is_durably_gone_before_a_segment_leaves(
    staging: StagingDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(staging, OLD, 0)
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(fd: int) -> None:
        calls.append(f"fsync, sealed {staging.sealed_ranks(KEY, OLD)}")
        real_fsync(fd)

    def replace(path: Path, target: Path) -> Path:
        calls.append("moved")
        return real_replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    retire_checkpoint(staging, KEY, OLD)
    assert calls[:2] == ["fsync, sealed []", "moved"]


def test_spare_is_taken_once(staging: StagingDir, tmp_path: Path) -> None:
    assert not take_spare(staging, KEY, 0, tmp_path / "taken")
    seal(staging, OLD, 0)
    retire_checkpoint(staging, KEY, OLD)
    assert take_spare(staging, KEY, 0, tmp_path / "taken")
    assert not take_spare(staging, KEY, 0, tmp_path / "again")
    assert (tmp_path / "taken").read_bytes() == b"0 of 10"


def test_spare_never_replaces_what_is_being_written(staging: StagingDir, tmp_path: Path) -> None:
    seal(staging, OLD, 0)
    retire_checkpoint(staging, KEY, OLD)
    (tmp_path / "segment").write_bytes(b"of another flusher")

    assert not take_spare(staging, KEY, 0, tmp_path / "segment")
    assert (tmp_path / "segment").read_bytes() == b"of another flusher"
    assert spare_path(staging, KEY, 0).exists()


def _open(path: Path) -> Callable[[], None]:
    return path.open("rb").close


def _map(path: Path) -> Callable[[], None]:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close


def _link(path: Path) -> Callable[[], None]:
    os.link(path, path.with_name("kept"))
    return path.with_name("kept").unlink


@pytest.mark.parametrize("use", [_open, _map, _link])
def test_file_that_somebody_else_can_see_is_not_ours_alone(
    tmp_path: Path, use: Callable[[Path], Callable[[], None]]
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(b"sealed")
    with path.open("r+b") as own:
        end = use(path)
        assert not is_ours_alone(own.fileno())
        end()
        assert is_ours_alone(own.fileno())
        assert fcntl.fcntl(own.fileno(), fcntl.F_GETLEASE) == fcntl.F_UNLCK


def test_without_leases_nothing_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_F_SETLEASE", 999_999)  # what a file system without them makes of it: EINVAL
    with (tmp_path / "segment").open("w+b") as own:
        assert not is_ours_alone(own.fileno())


def test_old_spares_go_and_young_ones_stay(staging: StagingDir) -> None:
    seal(staging, OLD, 0, 1)
    retire_checkpoint(staging, KEY, OLD)
    became = spare_path(staging, KEY, 0).stat().st_ctime

    assert drop_spares(staging, KEY, unused_since=became - 1.0) == 0
    assert drop_spares(staging, KEY, unused_since=became + 60.0) == 2
    assert drop_spares(staging, KEY) == 0
