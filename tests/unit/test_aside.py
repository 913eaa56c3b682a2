"""Setting segments of another life of a run aside: nothing is lost, wherever it is cut off."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import InvalidInputError, NotFoundError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.holdings import node_holdings, segment_headers
from ckpt.ops.tiers import LocalTier, tier_index
from ckpt.storage.aside import aside_nbytes, set_aside, set_aside_others
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2
from tests.support.sealing import make_world, seal, segment_bytes

A, B = "a" * 32, "b" * 32
KEY = keys.run_key("s3://bucket/run")
ID = CheckpointId(3, 1)
WORLD = make_world()


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    return StagingDir(tmp_path / "staging").ensure()


def sealed(place: StagingDir, rank: int, run_id: str, ident: CheckpointId = ID) -> None:
    seal(place, KEY, ident, WORLD, rank, run_id=run_id)


def kept(staging: StagingDir, run_id: str = A, ident: CheckpointId = ID) -> Path:
    return staging.path / "aside" / KEY / run_id / str(ident)


def test_other_lives_go_and_this_one_stays(staging: StagingDir, caplog: pytest.LogCaptureFixture) -> None:
    replicas = replicas_dir(staging).ensure()
    newer = CheckpointId(9, 2)
    sealed(staging, 0, A)
    sealed(staging, 1, B)
    sealed(staging, 0, A, newer)
    sealed(replicas, 1, A, newer)
    (replicas.checkpoint_dir(KEY, newer) / "owner-00001.json").write_text("{}")
    staging.mark_committed(KEY, ID)
    staging.mark_uploaded(KEY, ID, 0, disk_pb2.UploadRecord(nbytes=1))
    before = staging.segment_path(KEY, ID, 0).read_bytes()

    found = set_aside_others(staging, KEY, B, is_new=False)

    assert [(one.ident, one.ranks) for one in found] == [(ID, (0,)), (newer, (0,)), (newer, (1,))]
    assert staging.sealed_ranks(KEY, ID) == [1]
    assert staging.checkpoints(KEY) == [ID]
    assert replicas.checkpoints(KEY) == []
    assert not staging.is_committed(KEY, ID)  # it was said of the other life
    names = {path.name for path in kept(staging).iterdir()}
    assert names == {
        "committed",
        "segment-00000.index",
        "segment-00000.safetensors",
        "segment-00000.uploaded",
    }
    assert (kept(staging) / keys.local_segment_name(0)).read_bytes() == before
    assert (kept(replicas_dir(staging), A, newer) / keys.local_index_name(1)).is_file()
    assert [r.levelno for r in caplog.records if getattr(r, "event", "") == "staging.set_aside"] == [
        logging.WARNING
    ] * 3
    assert set_aside_others(staging, KEY, B, is_new=False) == []
    assert aside_nbytes(staging) > 3 * len(before)


@pytest.mark.parametrize(("is_new", "stays"), [(False, [0]), (True, [])])
def test_what_an_older_version_sealed_is_of_a_life_that_goes_on(
    staging: StagingDir, is_new: bool, stays: list[int]
) -> None:
    sealed(staging, 0, "")
    set_aside_others(staging, KEY, B, is_new=is_new)
    assert staging.sealed_ranks(KEY, ID) == stays
    assert kept(staging, "unknown").exists() == is_new


def test_a_folder_moved_back_counts_again(staging: StagingDir) -> None:
    sealed(staging, 0, A)
    set_aside_others(staging, KEY, B, is_new=False)
    assert node_holdings(staging, KEY) == []
    kept(staging).rename(staging.checkpoint_dir(KEY, ID))
    assert [(held.own, held.run_id) for held in node_holdings(staging, KEY)] == [((0,), A)]


@pytest.mark.parametrize("hostile", ["../../../elsewhere", "/tmp/elsewhere", "x" * 5000, "a/b", "unknown"])
def test_a_run_id_that_is_none_leads_nowhere(staging: StagingDir, hostile: str) -> None:
    sealed(staging, 0, hostile)
    (found,) = set_aside_others(staging, KEY, B, is_new=False)
    assert found.path.parent.parent == staging.path / "aside" / KEY
    assert len(found.path.parent.name) == 32
    assert (found.path / keys.local_index_name(0)).is_file()


class _Cut(Exception):
    """The process dies here."""


def test_cut_off_at_any_call_it_loses_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of the file system that it makes is a place to die at."""
    expected = segment_bytes(WORLD, 0)[0]
    for number in itertools.count():
        place = StagingDir(tmp_path / f"staging-{number}").ensure()
        sealed(place, 0, A)
        calls = itertools.count()

        def counted(original: Any, calls: Any = calls, number: int = number) -> Any:
            def call(*args: Any, **more: Any) -> Any:
                if next(calls) == number:
                    raise _Cut
                return original(*args, **more)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "link", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                set_aside(place, KEY, ID, [0], of=A)
            except _Cut:
                was_cut = True
            else:
                was_cut = False
        here = place.sealed_ranks(KEY, ID) == [0]
        there = (kept(place) / keys.local_index_name(0)).is_file()
        assert here != there, number
        folder = place.checkpoint_dir(KEY, ID) if here else kept(place)
        assert (folder / keys.local_segment_name(0)).read_bytes() == expected, number
        set_aside(place, KEY, ID, [0], of=A)
        assert place.sealed_ranks(KEY, ID) == []
        assert (kept(place) / keys.local_segment_name(0)).read_bytes() == expected
        if not was_cut:
            break
    assert number > 6


def test_a_directory_that_refuses_is_an_error(staging: StagingDir) -> None:
    sealed(staging, 0, A)
    (staging.path / "aside").write_bytes(b"")
    with pytest.raises(InvalidInputError) as caught:
        set_aside_others(staging, KEY, B, is_new=False)
    assert str(caught.value.context["path"]) == str(staging.path / "aside")
    assert staging.sealed_ranks(KEY, ID) == [0]


# --- reading ---


def test_holdings_of_two_lives_are_told_apart(staging: StagingDir) -> None:
    replicas = replicas_dir(staging).ensure()
    sealed(staging, 0, A)
    sealed(replicas, 1, B)
    held = node_holdings(staging, KEY)
    assert [(one.run_id, one.own, one.replicas) for one in held] == [(A, (0,), ()), (B, (), (1,))]
    assert {header.run_id for header in segment_headers(staging, KEY, ID)} == {A, B}
    sealed(replicas, 1, A)
    assert [(one.run_id, one.own, one.replicas) for one in node_holdings(staging, KEY)] == [(A, (0,), (1,))]


@pytest.mark.parametrize(
    ("of", "wanted", "is_read"), [(A, A, True), (A, B, False), ("", B, True), (A, "", True)]
)
def test_a_tier_gives_segments_of_this_life_only(
    staging: StagingDir, caplog: pytest.LogCaptureFixture, of: str, wanted: str, is_read: bool
) -> None:
    sealed(staging, 0, of)
    tier = LocalTier(staging, KEY)
    assert (tier_index(tier, ID, 0, wanted) is not None) == is_read
    assert tier_index(tier, ID, 1, wanted) is None
    said = [r for r in caplog.records if getattr(r, "event", "") == "tier.other_run"]
    assert len(said) == (0 if is_read else 1)
    with pytest.raises(NotFoundError):
        staging.read_index(KEY, ID, 1)
