"""The flusher and real staging servers: late, restarted, and on another machine's directory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import flusher_pb2
from tests.support.flushing import WAIT_S, Watched, stop, wait_for
from tests.support.sealing import make_world, seal, segment_bytes
from tests.support.snapshots import Snapshot, make_snapshot

State = flusher_pb2.FlusherEvent
ROOT = Path(__file__).parents[2]


class Run:
    """A staging directory and the URL of a run that nothing was saved of yet."""

    def __init__(self, folder: Path) -> None:
        (folder / "store").mkdir()
        self.url = f"file://{folder}/store/run"
        self.key = keys.run_key(self.url)
        self.staging = StagingDir(folder / "staging").ensure()
        self.staging.write_run_config(self.key, RunConfig(url=self.url))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@contextlib.contextmanager
def serving(staging: StagingDir) -> Iterator[subprocess.Popen[bytes]]:
    """Run a staging server on ``staging``; killed at the end, wherever it is."""
    roots = [str(ROOT / name) for name in ("", "proto", "server", "trainer_hooks")]
    with (staging.path / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_server", "--staging", staging.path],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def flushing(run: Run, server: StagingDir) -> Iterator[Watched]:
    watched = Watched(run.staging, run.key, server=server.socket_target())
    try:
        yield watched
    finally:
        stop(watched.process.pid)
        watched.process.close(wait=True, timeout_s=WAIT_S)


def test_snapshot_sealed_before_the_server_is_up_is_committed_and_close_waits_for_it(run: Run) -> None:
    """Case I123."""
    with flushing(run, run.staging) as watched:
        assert watched.seal(make_snapshot(step=3, rows=3000)).state == State.STATE_SEALED
        assert watched.next(State.STATE_WARNING).error.kind == "UnavailableError"
        with serving(run.staging):
            assert watched.process.close(wait=True, timeout_s=WAIT_S) == 0
        committed = watched.next(State.STATE_COMMITTED, State.STATE_FAILED)
    assert (committed.state, committed.sequence, committed.id.step) == (State.STATE_COMMITTED, 1, 3)
    assert watched.deaths.empty()


@pytest.mark.fault(
    "Death of a process",
    "server while a trainer waits for outcomes",
    "SIGKILL",
    "replaced; every outcome arrives",
)
def test_outcomes_arrive_although_the_server_is_killed_and_replaced(run: Run) -> None:
    """Case I123."""
    with flushing(run, run.staging) as watched:
        with serving(run.staging) as first:
            watched.seal(make_snapshot(step=1, rows=100), 1)
            assert watched.next(State.STATE_COMMITTED, State.STATE_FAILED).sequence == 1
            first.send_signal(signal.SIGKILL)
            first.wait()
        watched.seal(make_snapshot(step=2, rows=100), 2)
        with serving(run.staging):
            ended = watched.next(State.STATE_COMMITTED, State.STATE_FAILED)
            assert (ended.state, ended.sequence) == (State.STATE_COMMITTED, 2)


def test_server_that_cannot_see_the_directory_gets_the_bytes(run: Run, tmp_path: Path) -> None:
    elsewhere = StagingDir(tmp_path / "elsewhere").ensure()
    snapshot = make_snapshot(step=1, rows=9000)
    assert len(snapshot.image) > 4 * CHUNK_NBYTES
    with serving(elsewhere), flushing(run, elsewhere) as watched:
        watched.seal(snapshot)
        ended = watched.next(State.STATE_COMMITTED, State.STATE_FAILED)
        assert ended.state == State.STATE_COMMITTED
        assert elsewhere.segment_path(run.key, snapshot.ident, 0).read_bytes() == snapshot.image
        assert elsewhere.read_index(run.key, snapshot.ident, 0) == run.staging.read_index(
            run.key, snapshot.ident, 0
        )


@pytest.mark.fault(
    "Death of a process",
    "server that gets the bytes by gRPC, in mid-stream",
    "SIGKILL",
    "goes on where it was; committed",
)
def test_bytes_go_on_where_a_killed_server_left_off(run: Run, tmp_path: Path) -> None:
    """Cases I122, I123."""
    elsewhere = StagingDir(tmp_path / "elsewhere").ensure()
    snapshot = make_snapshot(step=1, rows=30_000)
    arriving = elsewhere.segment_path(run.key, snapshot.ident, 0)
    arriving = arriving.with_name(arriving.name + ".incoming")
    with flushing(run, elsewhere) as watched:
        with serving(elsewhere) as first:
            watched.seal(snapshot)
            wait_for(arriving.exists, "the bytes are on their way")
            first.kill()
            first.wait()
        with serving(elsewhere):
            ended = watched.next(State.STATE_COMMITTED, State.STATE_FAILED)
        assert ended.state == State.STATE_COMMITTED
        assert elsewhere.segment_path(run.key, snapshot.ident, 0).read_bytes() == snapshot.image


def test_what_the_commit_found_odd_reaches_the_trainer_of_one_rank(run: Run, tmp_path: Path) -> None:
    world, ident = make_world(), CheckpointId(1, 1)
    elsewhere = StagingDir(tmp_path / "elsewhere").ensure()
    seal(elsewhere, run.key, ident, world, 0, state={"epoch": 1})
    index = elsewhere.read_index(run.key, ident, 0)
    index.ClearField("chunks")
    snapshot = Snapshot(
        image=segment_bytes(world, 0)[0],
        index=index,
        layout=world.layouts.encode(),
        layout_digest=world.layouts.digest,
    )
    seal(run.staging, run.key, ident, world, 1, state={"epoch": 2})
    with serving(run.staging), flushing(run, run.staging) as watched:
        watched.seal(snapshot)
        seen = []
        while not seen or seen[-1].state not in (State.STATE_COMMITTED, State.STATE_FAILED):
            seen.append(watched.next(State.STATE_WARNING, State.STATE_COMMITTED, State.STATE_FAILED))
    warning, committed = seen[-2:]
    assert committed.state == State.STATE_COMMITTED
    assert (warning.error.code, warning.error.context["ranks"]) == ("state-differs", "1")
    assert warning.error.context["checkpoint"] == str(ident)
