"""Parts of the staging server that need no process: the step table, the work queue, blocks, retention."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.clock import SystemClock
from ckpt.errors import CkptError, InvalidInputError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.geometry import Box
from ckpt.storage.spares import spare_path
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import common_pb2, staging_pb2
from ckpt_server.restore_service import row_blocks
from ckpt_server.retention import overtaken, retain_local
from ckpt_server.runs import Run, Runs
from ckpt_server.settings import Settings
from ckpt_server.steps import StepRecord, StepTable
from ckpt_server.trainers import announce, living
from ckpt_server.work import WorkQueue

State = staging_pb2.StepStatus
ID = CheckpointId(10, 1)
GROUP = common_pb2.NodeGroup(index=0, count=1, ranks=[0, 1])


def seen(*ranks: int, uploaded: tuple[int, ...] = ()) -> StepRecord:
    return StepRecord(
        run_key="run",
        url="file:///x/run",
        ident=ID,
        group=GROUP,
        sealed=frozenset(ranks),
        uploaded=frozenset(uploaded),
        nbytes=dict.fromkeys(ranks, 100),
    )


# --- step table ---


def test_looks_in_any_order_add_up() -> None:
    table = StepTable()
    table.observe(seen(0, 1, uploaded=(0,)))
    late = table.observe(seen(0))

    assert late.sealed == {0, 1}
    assert late.uploaded == {0}
    assert late.state == State.STATE_UPLOADING


def test_a_committed_step_never_goes_back() -> None:
    table = StepTable()
    table.observe(seen(0, 1))
    table.update("run", ID, state=State.STATE_COMMITTED)

    assert table.observe(seen(0, 1), again=True).state == State.STATE_COMMITTED


def test_a_failed_step_is_tried_again_only_when_asked() -> None:
    table = StepTable()
    table.observe(seen(0, 1))
    table.update("run", ID, state=State.STATE_FAILED, error=CkptError("no"))

    assert table.observe(seen(0, 1)).state == State.STATE_FAILED
    again = table.observe(seen(0, 1), again=True)
    assert (again.state, again.error) == (State.STATE_UPLOADING, None)


def test_the_same_error_again_wakes_no_watcher() -> None:
    table = StepTable()
    table.observe(seen(0, 1))
    table.update("run", ID, error=UnavailableError("store is down", attempt=1))
    _, version, _ = table.changes("", 0, 0.0)
    table.update("run", ID, error=UnavailableError("store is down", attempt=1))

    assert table.changes("", version, 0.0) == ([], version, False)
    table.update("run", ID, error=UnavailableError("store is down", attempt=2))
    assert len(table.changes("", version, 0.0)[0]) == 1


def test_a_watcher_is_woken_by_a_change_and_by_the_end() -> None:
    table = StepTable()
    threading.Timer(0.05, lambda: table.observe(seen(0))).start()
    records, version, closed = table.changes("run", 0, 10.0)
    assert ([record.ident for record in records], closed) == ([ID], False)

    threading.Timer(0.05, table.close).start()
    assert table.changes("run", version, 10.0) == ([], version, True)


def test_a_watcher_of_one_run_hears_nothing_of_another() -> None:
    table = StepTable()
    table.observe(seen(0))

    assert table.changes("other", 0, 0.0)[0] == []


# --- work queue ---


def drain(queue: WorkQueue) -> None:
    deadline = time.monotonic() + 10
    while len(queue):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_due_jobs_run_in_order_of_priority() -> None:
    """Case I65."""
    queue = WorkQueue("test", workers=1, clock=SystemClock())
    order: list[int] = []
    gate = threading.Event()
    queue.add("gate", lambda: gate.wait(10) and None, priority=(0,))
    for number in (3, 1, 2):
        queue.add(number, lambda number=number: order.append(number), priority=(number,))  # type: ignore[misc]
    gate.set()
    drain(queue)

    assert order == [1, 2, 3]
    assert queue.close(time.monotonic() + 5)


def test_a_job_that_asks_for_it_runs_again_and_a_failing_one_does_not_stop_the_others() -> None:
    queue = WorkQueue("test", workers=2, clock=SystemClock())
    calls: list[str] = []

    def thrice() -> float | None:
        calls.append("thrice")
        return 0.01 if calls.count("thrice") < 3 else None

    def broken() -> float | None:
        raise ZeroDivisionError

    queue.add("broken", broken)
    queue.add("thrice", thrice)
    deadline = time.monotonic() + 10
    while "thrice" in queue:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    assert calls == ["thrice"] * 3
    assert "broken" in queue  # waits for its next turn
    assert queue.close(time.monotonic() + 5)


def test_a_pause_is_kept_however_often_the_job_is_added() -> None:
    queue = WorkQueue("test", workers=2, clock=SystemClock())
    calls: list[int] = []
    started, go = threading.Event(), threading.Event()

    def retried() -> float:
        calls.append(1)
        started.set()
        go.wait(10)
        return 3600.0

    queue.add("job", retried)
    assert started.wait(10)
    queue.add("job", retried)  # while it runs
    go.set()
    after = threading.Event()
    while not after.is_set():  # until it pauses: the queue is free for others then
        queue.add("job", retried)
        queue.add("other", lambda: after.set())
        after.wait(0.05)
    queue.add("job", retried)
    assert calls == [1]
    assert queue.close(time.monotonic() + 5)


def test_a_key_is_queued_once_and_runs_again_if_added_while_it_runs() -> None:
    queue = WorkQueue("test", workers=2, clock=SystemClock())
    runs: list[int] = []
    started, go = threading.Event(), threading.Event()

    def job() -> None:
        runs.append(1)
        started.set()
        go.wait(10)

    queue.add("key", job)
    assert started.wait(10)
    for _ in range(5):
        queue.add("key", job)
    go.set()
    drain(queue)

    assert len(runs) == 2
    assert queue.close(time.monotonic() + 5)


def test_close_says_whether_a_job_outlasted_it() -> None:
    queue = WorkQueue("test", workers=1, clock=SystemClock())
    started, go = threading.Event(), threading.Event()

    def long() -> None:
        started.set()
        go.wait(10)

    queue.add("long", long)
    assert started.wait(10)

    assert not queue.close(time.monotonic() + 0.05)
    go.set()
    assert queue.close(time.monotonic() + 5)


# --- the rest ---


@pytest.mark.parametrize(
    ("shape", "most"),
    [((7, 5, 3), 4), ((7, 5, 3), 15), ((7, 5, 3), 40), ((1, 1, 9), 2), ((), 1), ((0, 3), 5)],
)
def test_row_blocks_are_the_row_major_order_in_pieces(shape: tuple[int, ...], most: int) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    blocks = list(row_blocks(Box((0,) * len(shape), shape), most))

    assert all(block.nelements <= most for block in blocks)
    assert [n for block in blocks for n in array[block.slices()].reshape(-1)] == list(range(array.size))


def test_only_the_newer_of_this_or_a_newer_attempt_overtakes() -> None:
    committed = [CheckpointId(20, 2)]

    assert overtaken(CheckpointId(10, 2), committed)
    assert overtaken(CheckpointId(30, 1), committed)
    assert not overtaken(CheckpointId(30, 2), committed)
    assert not overtaken(CheckpointId(10, 3), committed)
    assert not overtaken(CheckpointId(10, 1), [])


def committed_run(tmp_path: Path, steps: tuple[int, ...]) -> tuple[StagingDir, Run, StepTable]:
    """A run whose steps are all committed, 100 bytes each."""
    staging = StagingDir(tmp_path).ensure()
    run = Runs(staging, workers=1, clock=SystemClock()).register(
        RunConfig(url="memory://x/run", keep_local=3)
    )
    table = StepTable()
    for step in steps:
        ident = CheckpointId(step, 1)
        staging.make_checkpoint_dir(run.key, ident)
        staging.mark_committed(run.key, ident)
        table.observe(replace(seen(0), run_key=run.key, ident=ident, nbytes={0: 1 << 30}))
    return staging, run, table


def test_local_retention_gives_way_when_the_next_save_would_not_fit(tmp_path: Path) -> None:
    """Case I125."""
    staging, run, table = committed_run(tmp_path, (10, 20, 30, 40))
    roomy = retain_local(staging, run, table, now=0.0, grace_s=0.0, free_nbytes=2 << 30)
    tight = retain_local(staging, run, table, now=0.0, grace_s=0.0, free_nbytes=1 << 30)

    assert roomy == [CheckpointId(10, 1)]
    assert tight == [CheckpointId(30, 1), CheckpointId(20, 1)]
    assert staging.checkpoints(run.key) == [CheckpointId(40, 1)]


def with_segments(staging: StagingDir, run: Run) -> None:
    for ident in staging.checkpoints(run.key):
        staging.segment_path(run.key, ident, 0).write_bytes(b"%d" % ident.step)
        staging.index_path(run.key, ident, 0).write_bytes(b"sealed")


def test_segment_of_a_retired_step_is_kept_to_be_overwritten_where_there_is_room(tmp_path: Path) -> None:
    staging, run, table = committed_run(tmp_path, (10, 20, 30, 40))
    with_segments(staging, run)
    spare = spare_path(staging, run.key, 0)
    retain_local(staging, run, table, now=time.time(), grace_s=0.0, free_nbytes=2 << 30)
    assert spare.read_bytes() == b"10"

    retain_local(staging, run, table, now=time.time() + 7200.0, grace_s=0.0, free_nbytes=2 << 30)
    assert not spare.exists()  # of a run that has ended


def test_spare_counts_as_room_and_goes_first_where_there_is_none(tmp_path: Path) -> None:
    staging, run, table = committed_run(tmp_path, (20, 30, 40))
    with_segments(staging, run)
    spare = spare_path(staging, run.key, 0)
    spare.parent.mkdir()
    os.truncate(os.open(spare, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC), 1 << 30)

    assert retain_local(staging, run, table, now=0.0, grace_s=0.0, free_nbytes=100 << 20) == []
    assert spare.exists()
    retain_local(staging, run, table, now=0.0, grace_s=0.0, free_nbytes=10 << 20)
    assert not spare.exists()


def test_what_is_not_committed_stays_however_tight_it_is(tmp_path: Path) -> None:
    """Case I65."""
    staging, run, table = committed_run(tmp_path, (30,))
    for ident in (CheckpointId(10, 1), CheckpointId(20, 1)):
        staging.make_checkpoint_dir(run.key, ident)
        (staging.index_path(run.key, ident, 0)).write_bytes(b"sealed")
        table.observe(replace(seen(0, 1), run_key=run.key, ident=ident, sealed_at=5.0))
    table.update(run.key, CheckpointId(20, 1), state=State.STATE_UPLOADED)

    assert retain_local(staging, run, table, now=100.0, grace_s=96.0, free_nbytes=0) == []
    # All this node owed 20 is in the store; 10 is still on its way.
    assert retain_local(staging, run, table, now=100.0, grace_s=10.0, free_nbytes=0) == [CheckpointId(20, 1)]
    assert CheckpointId(10, 1) in staging.checkpoints(run.key)


def test_trainers_count_while_they_live(tmp_path: Path) -> None:
    staging = StagingDir(tmp_path).ensure()
    child = subprocess.Popen(["sleep", "60"])
    announce(staging, child.pid)
    announce(staging, os.getpid())
    announce(staging, 1)
    assert living(staging) == sorted([child.pid, os.getpid()])

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped yet
    assert living(staging) == [os.getpid()]
    child.wait()
    # A later process that got the number of one that ended is no trainer.
    (tmp_path / "trainers" / str(os.getpid())).write_text("1")
    assert living(staging) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"listen": ("10.0.0.1:1",), "insecure": True}, "insecure"),
        ({"listen": ("127.0.0.1:1",)}, "insecure"),
        ({"listen": ("0.0.0.0:1",), "token": "x" * 16}, "insecure"),
        ({"listen": ("nonsense",)}, "invalid-input"),
        ({"listen": ("h:1",), "tls_cert": Path("c"), "tls_key": Path("k"), "token": "short"}, "token"),
        ({"tls_cert": Path("c")}, "invalid-input"),
        ({"upload_concurrency": 0}, "invalid-input"),
    ],
)
def test_settings_that_are_unsafe_or_senseless_are_refused(changes: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Settings(staging=Path("/x"), **changes)  # type: ignore[arg-type]

    assert caught.value.code == code
