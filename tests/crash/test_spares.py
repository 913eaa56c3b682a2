"""A real flusher that overwrites spares: exact bytes, readers of the old step undisturbed, sudden deaths."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.storage.spares import retire_checkpoint, spare_path
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import flusher_pb2
from tests.crash.test_flusher import check_sealed
from tests.support.flushing import WAIT_S, Watched, stop, wait_for
from tests.support.snapshots import RUN_URL, Snapshot, make_snapshot

State = flusher_pb2.FlusherEvent
RUN_KEY = keys.run_key(RUN_URL)


def segment(staging: StagingDir, snapshot: Snapshot) -> Path:
    return staging.segment_path(RUN_KEY, snapshot.ident, 0)


@pytest.mark.parametrize("rows", [2000, 3000, 4500])
def test_spare_is_overwritten_whatever_its_size(staging: StagingDir, watched: Watched, rows: int) -> None:
    old, new = make_snapshot(step=1, rows=3000), make_snapshot(step=2, rows=rows, seed=8)
    watched.seal(old, 1)
    file = segment(staging, old).stat().st_ino
    retire_checkpoint(staging, RUN_KEY, old.ident)

    assert watched.seal(new, 2).state == State.STATE_SEALED
    assert segment(staging, new).stat().st_ino == file
    check_sealed(staging, new)
    assert not spare_path(staging, RUN_KEY, 0).exists()


def test_reader_of_a_retired_step_goes_on_seeing_it(staging: StagingDir, watched: Watched) -> None:
    old, new = make_snapshot(step=1, rows=3000), make_snapshot(step=2, rows=3000, seed=8)
    watched.seal(old, 1)
    with segment(staging, old).open("rb") as file:
        kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    retire_checkpoint(staging, RUN_KEY, old.ident)

    assert watched.seal(new, 2).state == State.STATE_SEALED
    check_sealed(staging, new)
    assert kept[:] == old.image


@pytest.mark.fault(
    "Death of a process",
    "flusher while it overwrites a spare segment",
    "SIGKILL",
    "neither step is taken for sealed; nothing is left",
)
def test_flusher_killed_while_it_overwrites_leaves_neither_step_sealed_and_no_spare(
    staging: StagingDir,
) -> None:
    """Case I05."""
    old, new = make_snapshot(step=1, rows=30_000), make_snapshot(step=2, rows=30_000, seed=8)
    first = Watched(staging, RUN_KEY)
    first.seal(old, 1)
    retire_checkpoint(staging, RUN_KEY, old.ident)
    with new.new_arena() as arena:
        flush = new.into(arena)
        first.process.send_arena(arena)
        first.process.flush(flush)
        wait_for(staging.segment_tmp_path(RUN_KEY, new.ident, 0).exists, "the spare is being overwritten")
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.deaths.get(timeout=WAIT_S) == -signal.SIGKILL
        assert staging.sealed_checkpoints(RUN_KEY) == set()
        assert not spare_path(staging, RUN_KEY, 0).exists()

        second = Watched(staging, RUN_KEY)
        try:
            second.process.send_arena(arena)
            second.process.flush(flush)
            assert second.next(State.STATE_SEALED, State.STATE_FAILED).state == State.STATE_SEALED
        finally:
            stop(second.process.pid)
    check_sealed(staging, new)
