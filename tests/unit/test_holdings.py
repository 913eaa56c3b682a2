"""What a node says it holds: whole segments, its own before replicas; and what is still being written."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from ckpt.errors import CorruptError, NotFoundError
from ckpt.flusher.write import being_written
from ckpt.format.ids import CheckpointId
from ckpt.ops.holdings import node_holdings, read_held_index, segment_headers
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from tests.support.sealing import make_world, seal

RUN = "run-0123456789abcdef"
STEP = CheckpointId(30, 1)
WORLD = make_world(rows=8, columns=4, groups=((0, 1), (2, 3)))


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    """A node that sealed ranks 0 and 1 and keeps replicas of 2 and, needlessly, 1."""
    found = StagingDir(tmp_path / "staging").ensure()
    for rank in (0, 1):
        seal(found, RUN, STEP, WORLD, rank)
    for rank in (1, 2):
        seal(replicas_dir(found), RUN, STEP, WORLD, rank)
    return found


def test_a_segment_that_is_held_twice_counts_as_own(staging: StagingDir) -> None:
    (held,) = node_holdings(staging, RUN)
    assert (held.ident, held.world_size, held.own, held.replicas) == (STEP, 4, (0, 1), (2,))
    assert not held.is_committed
    staging.mark_committed(RUN, STEP)
    assert node_holdings(staging, RUN)[0].is_committed
    assert node_holdings(staging, RUN, CheckpointId(31, 1)) == []
    assert node_holdings(staging, "other-0123456789abcdef") == []


def test_a_marker_without_its_segment_is_not_held(staging: StagingDir) -> None:
    staging.segment_path(RUN, STEP, 0).unlink()
    assert node_holdings(staging, RUN)[0].own == (1,)


def test_a_damaged_index_has_no_header_unless_there_is_a_replica(
    staging: StagingDir, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        path = staging.index_path(RUN, STEP, rank)
        path.write_bytes(path.read_bytes()[:-1])
    assert [header.segments[0].rank for header in segment_headers(staging, RUN, STEP)] == [1, 2]
    reported = [record for record in caplog.records if getattr(record, "event", "") == "holdings.bad_index"]
    assert reported
    with pytest.raises(CorruptError):
        read_held_index(staging, RUN, STEP, 0)
    with pytest.raises(NotFoundError):
        read_held_index(staging, RUN, STEP, 3)


def test_what_a_living_flusher_writes_is_told_from_debris(staging: StagingDir) -> None:
    live, debris = (staging.segment_tmp_path(RUN, STEP, rank) for rank in (2, 3))
    debris.write_bytes(b"left by a flusher that was killed")
    with live.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert being_written(staging, RUN) == [live]
    assert being_written(staging, RUN) == []
