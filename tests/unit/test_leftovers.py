"""Temporary files of dead writers in a staging directory."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt.format.ids import CheckpointId
from ckpt.storage.durable import TEMP_PREFIX
from ckpt.storage.leftovers import sweep_leftovers
from ckpt.storage.staging import ARRIVING, RunConfig, StagingDir

KEY = "run-0123456789ab"


def test_old_temporary_files_go_and_young_ones_and_others_stay(tmp_path: Path) -> None:
    staging = StagingDir(tmp_path / "staging").ensure()
    staging.write_run_config(KEY, RunConfig(url="file:///nowhere/run"))
    folders = [staging.path, staging.run_dir(KEY), staging.run_dir(KEY) / "layouts"]
    folders.append(staging.make_checkpoint_dir(KEY, CheckpointId(10, 1)))
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for name, age_s in ((f"{TEMP_PREFIX}old", 200), (f"{TEMP_PREFIX}young", 50), ("other", 200)):
            (folder / name).write_bytes(b"x")
            os.utime(folder / name, (1e9 - age_s, 1e9 - age_s))
    assert sweep_leftovers(staging, before=1e9 - 100) == len(folders)
    for folder in folders:
        names = {path.name for path in folder.iterdir()}
        assert {f"{TEMP_PREFIX}young", "other"} <= names
        assert f"{TEMP_PREFIX}old" not in names
    assert staging.token()
    assert staging.run_keys() == [KEY]


def test_note_of_a_segment_that_is_sealed_goes_and_that_of_one_that_arrives_stays(tmp_path: Path) -> None:
    """A power cut after the seal brings the note back: its removal was not durable."""
    staging = StagingDir(tmp_path / "staging").ensure()
    folder = staging.make_checkpoint_dir(KEY, CheckpointId(10, 1))
    sealed, arriving = (staging.index_path(KEY, CheckpointId(10, 1), rank) for rank in (0, 1))
    sealed.write_bytes(b"x")
    for path in (sealed, arriving):
        path.with_name(path.name + ARRIVING).write_bytes(b"x")
    assert sweep_leftovers(staging, before=0) == 0  # young: its receiver may be about to remove it
    assert sweep_leftovers(staging, before=1e12) == 1
    assert {path.name for path in folder.iterdir()} == {sealed.name, arriving.name + ARRIVING}


def test_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert sweep_leftovers(StagingDir(tmp_path / "none"), before=1e12) == 0
