"""The flusher against real processes: deaths, signals, full disks, refused O_DIRECT, absent servers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors

from ckpt.digest import digest
from ckpt.errors import UnavailableError
from ckpt.format import keys
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import flusher_pb2
from tests.support.flushing import WAIT_S, Watched, stop, wait_for
from tests.support.snapshots import RUN_URL, Snapshot, make_snapshot

State = flusher_pb2.FlusherEvent
ROOT = Path(__file__).parents[2]
RUN_KEY = keys.run_key(RUN_URL)
NOBODY = "unix:/nonexistent/server.sock"


def check_sealed(staging: StagingDir, snapshot: Snapshot) -> None:
    """Assert that the segment is sealed, byte for byte, with right digests, and nothing else is there."""
    ident, rank = snapshot.ident, snapshot.index.rank
    path = staging.segment_path(RUN_KEY, ident, rank)
    data = path.read_bytes()
    assert data == snapshot.image
    index = staging.read_index(RUN_KEY, ident, rank)
    chunks = [data[i : i + CHUNK_NBYTES] for i in range(0, len(data), CHUNK_NBYTES)]
    assert index.chunks.chunk_nbytes == CHUNK_NBYTES
    assert index.chunks.digests == b"".join(map(digest, chunks))
    assert staging.layout(RUN_KEY, index.layout_digest) == snapshot.layout
    entries = {entry.name: entry for entry in index.tensors}
    with safetensors.safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(entries)
        for name, entry in entries.items():
            assert file.get_tensor(name).tobytes() == data[entry.start : entry.start + entry.nbytes]
    assert sorted(item.name for item in path.parent.iterdir()) == [
        keys.local_index_name(rank),
        keys.local_segment_name(rank),
    ]


def start_trainer(staging: StagingDir, fate: str, rows: int = 9000) -> subprocess.Popen[str]:
    roots = [str(ROOT / name) for name in ("", "proto", "server", "trainer_hooks")]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.flusher_trainer",
            staging.path,
            RUN_KEY,
            NOBODY,
            str(rows),
            fate,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.fault(
    "Death of a process",
    "trainer right after the copy: {fate}",
    "SIGKILL; flusher in a session of its own",
    "the snapshot is sealed, byte for byte",
)
@pytest.mark.parametrize("fate", ["kill", "killpg", "forked", "unread"])
def test_snapshot_is_sealed_though_trainer_is_killed(staging: StagingDir, fate: str) -> None:
    trainer = start_trainer(staging, fate)
    try:
        assert trainer.stdout is not None
        flusher = int(trainer.stdout.readline().split()[1])
        assert trainer.wait(WAIT_S) == -signal.SIGKILL
        snapshot = make_snapshot(rows=9000)
        if fate == "unread":  # the death shows as a reset connection, said before what was handed over
            os.kill(flusher, signal.SIGCONT)
        wait_for(lambda: bool(staging.sealed_ranks(RUN_KEY, snapshot.ident)), "sealed")
        snapshot.index.captured_at = staging.read_index(RUN_KEY, snapshot.ident, 0).captured_at
        check_sealed(staging, snapshot)
        if fate != "forked":
            assert trainer.stdout.read() == ""  # the flusher does not hold the launcher's pipe
    finally:
        trainer.kill()
        if fate == "forked":
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
        stop(flusher)


def test_flusher_leaves_when_its_trainer_died_and_all_is_sealed(staging: StagingDir) -> None:
    trainer = start_trainer(staging, "kill", rows=10)
    with trainer:
        assert trainer.stdout is not None
        flusher = int(trainer.stdout.readline().split()[1])
    wait_for(lambda: not Path(f"/proc/{flusher}").exists() or _is_zombie(flusher), "flusher left")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_flusher_is_deaf_to_the_signals_of_launchers(staging: StagingDir, watched: Watched) -> None:
    assert watched.seal(make_snapshot(step=1, rows=10)).state == State.STATE_SEALED
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        os.kill(watched.process.pid, getattr(signal, name))
    snapshot = make_snapshot(step=2, rows=10)
    assert watched.seal(snapshot, 2).state == State.STATE_SEALED
    check_sealed(staging, snapshot)
    assert os.getsid(watched.process.pid) == watched.process.pid


def test_flusher_holds_only_its_own_descriptors(watched: Watched) -> None:
    """Case I64."""
    watched.seal(make_snapshot(rows=10))

    def foreign() -> list[str]:
        found = []
        for link in Path(f"/proc/{watched.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(link.readlink()))
        return [link for link in found if not link.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:"))]

    def only_its_own() -> bool:  # while its hand-over thread imports gRPC, it has files of packages open
        found = foreign()
        log = [link for link in found if link.endswith("/flusher.log")]
        return len(log) == 2 and sorted(set(found) - set(log)) == ["/dev/null"]

    wait_for(only_its_own, "only its own descriptors")


def test_flusher_never_loads_torch_or_numpy(watched: Watched) -> None:
    """Case I116."""
    watched.seal(make_snapshot(rows=10))
    maps = Path(f"/proc/{watched.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


@pytest.mark.fault(
    "Disk",
    "a file may not grow any more (EFBIG)",
    "RLIMIT_FSIZE of a running flusher",
    "the save fails with code no-space and leaves nothing; the next one is sealed",
)
def test_too_large_segment_fails_leaves_nothing_and_the_next_is_sealed(staging: StagingDir) -> None:
    watched = Watched(staging, RUN_KEY)
    try:
        assert watched.seal(make_snapshot(step=1, rows=10)).state == State.STATE_SEALED
        resource.prlimit(watched.process.pid, resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
        large = make_snapshot(step=2, rows=9000)
        failed = watched.seal(large, 2)
        assert (failed.state, failed.sequence) == (State.STATE_FAILED, 2)
        assert (failed.error.kind, failed.error.code) == ("UnavailableError", "no-space")
        assert list(staging.checkpoint_dir(RUN_KEY, large.ident).iterdir()) == []
        small = make_snapshot(step=3, rows=20)
        assert watched.seal(small, 3).state == State.STATE_SEALED
        check_sealed(staging, small)
    finally:
        stop(watched.process.pid)


@pytest.mark.fault(
    "Disk",
    "full while a segment is written",
    "a tmpfs of 16 MiB",
    "the save fails with code no-space and leaves nothing; the next one is sealed",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_fails_leaves_nothing_and_the_next_is_sealed(tmp_path: Path) -> None:
    """Case I125."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    try:
        staging = StagingDir(folder / "staging").ensure()
        watched = Watched(staging, RUN_KEY)
        large = make_snapshot(step=1, rows=9000)
        failed = watched.seal(large)
        assert (failed.state, failed.error.code) == (State.STATE_FAILED, "no-space")
        assert list(staging.checkpoint_dir(RUN_KEY, large.ident).iterdir()) == []
        small = make_snapshot(step=2, rows=20)
        assert watched.seal(small, 2).state == State.STATE_SEALED
        check_sealed(staging, small)
        stop(watched.process.pid)
        watched.deaths.get(timeout=WAIT_S)
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.fault(
    "Death of a process",
    "flusher while it writes a segment",
    "SIGKILL",
    "nothing is sealed, the trainer is told; a new flusher seals",
)
def test_killed_flusher_is_reported_seals_nothing_and_can_be_replaced(staging: StagingDir) -> None:
    first = Watched(staging, RUN_KEY)
    snapshot = make_snapshot(step=5, rows=20_000)
    with snapshot.new_arena() as arena:
        first.process.send_arena(arena)
        flush = snapshot.into(arena)
        first.process.flush(flush)
        tmp = staging.segment_tmp_path(RUN_KEY, snapshot.ident, 0)
        wait_for(tmp.exists, "the segment is being written")
        os.kill(first.process.pid, signal.SIGKILL)
        assert first.deaths.get(timeout=WAIT_S) == -signal.SIGKILL
        assert staging.sealed_ranks(RUN_KEY, snapshot.ident) == []
        with pytest.raises(UnavailableError) as caught:
            first.process.flush(flush)
        assert caught.value.code == "flusher-dead"

        second = Watched(staging, RUN_KEY)  # the snapshot is still in the arena
        try:
            second.process.send_arena(arena)
            second.process.flush(flush)
            assert second.next(State.STATE_SEALED, State.STATE_FAILED).state == State.STATE_SEALED
        finally:
            stop(second.process.pid)
    check_sealed(staging, snapshot)


def test_debris_of_a_killed_flusher_is_swept_by_the_next(staging: StagingDir) -> None:
    """Case I04."""
    old = make_snapshot(step=1)
    staging.make_checkpoint_dir(RUN_KEY, old.ident)
    debris = staging.segment_tmp_path(RUN_KEY, old.ident, 3)
    debris.write_bytes(b"half")
    watched = Watched(staging, RUN_KEY)
    try:
        watched.seal(make_snapshot(step=2, rows=10))
        assert not debris.exists()
    finally:
        stop(watched.process.pid)


def test_same_snapshot_flushed_twice_is_sealed_once_and_another_is_refused(
    staging: StagingDir, watched: Watched
) -> None:
    snapshot = make_snapshot(rows=50)
    assert watched.seal(snapshot, 1).state == State.STATE_SEALED
    assert watched.seal(snapshot, 2).state == State.STATE_SEALED
    other = make_snapshot(rows=50, seed=8)
    failed = watched.seal(other, 3)
    assert (failed.error.kind, failed.error.code) == ("RefusedError", "already-sealed")
    check_sealed(staging, snapshot)


def test_flushes_are_sealed_in_order_from_arenas_that_change(staging: StagingDir, watched: Watched) -> None:
    snapshots = [make_snapshot(step=step, rows=3000 * step, seed=step) for step in range(1, 5)]
    arenas = [snapshot.new_arena() for snapshot in snapshots]
    for number, (snapshot, arena) in enumerate(zip(snapshots, arenas, strict=True), 1):
        watched.process.send_arena(arena)
        watched.process.flush(snapshot.into(arena, sequence=number))
        arena.close()  # the flusher has its own mapping
    sealed = [watched.next(State.STATE_SEALED, State.STATE_FAILED) for _ in snapshots]
    assert [(item.state, item.sequence) for item in sealed] == [(State.STATE_SEALED, n) for n in range(1, 5)]
    for snapshot in snapshots:
        check_sealed(staging, snapshot)


def test_bad_messages_are_answered_and_survived(staging: StagingDir, watched: Watched) -> None:
    snapshot = make_snapshot(rows=10)
    with snapshot.new_arena() as arena:
        flush = snapshot.into(arena)
        watched.process.flush(flush)  # no arena was announced
        assert watched.next(State.STATE_FAILED).error.kind == "InvalidInputError"
        watched.process.send_arena(arena)
        for change in ({"rank": 9}, {"segment_nbytes": arena.nbytes + 1}, {"layout_digest": bytes(16)}):
            wrong = flusher_pb2.Flush()
            wrong.CopyFrom(flush)
            for name, value in change.items():
                setattr(wrong, name, value)
            watched.process.flush(wrong)
            assert watched.next(State.STATE_FAILED).error.kind == "InvalidInputError"
        watched.process.flush(flush)
        assert watched.next(State.STATE_SEALED).sequence == 1
    check_sealed(staging, snapshot)


def test_close_without_waiting_seals_what_was_handed_over(staging: StagingDir) -> None:
    watched = Watched(staging, RUN_KEY)
    snapshot = make_snapshot(rows=9000)
    with snapshot.new_arena() as arena:
        watched.process.send_arena(arena)
        watched.process.flush(snapshot.into(arena))
        watched.process.close(wait=False)
        assert watched.next(State.STATE_SEALED, State.STATE_FAILED).state == State.STATE_SEALED
    check_sealed(staging, snapshot)
    stop(watched.process.pid)
    assert watched.deaths.empty()


def test_arena_is_given_back_as_soon_as_no_more_flushes_can_come(staging: StagingDir) -> None:
    """The trainer that comes next on this node makes an arena of its own, and two might not fit."""
    watched = Watched(staging, RUN_KEY, orphan_timeout_s=WAIT_S)
    try:
        maps = Path(f"/proc/{watched.process.pid}/maps")
        assert watched.seal(make_snapshot(rows=10)).state == State.STATE_SEALED
        assert "ckpt-arena" in maps.read_text()
        watched.process.close(wait=False)
        wait_for(lambda: "ckpt-arena" not in maps.read_text(), "the arena is unmapped")
        assert not _is_zombie(watched.process.pid)  # it goes on trying the server
    finally:
        stop(watched.process.pid)


def test_absent_server_is_a_warning_and_no_failure(staging: StagingDir, watched: Watched) -> None:
    """Case I62."""
    assert watched.seal(make_snapshot(rows=10)).state == State.STATE_SEALED
    assert watched.next(State.STATE_WARNING).error.kind == "UnavailableError"


def test_log_of_the_flusher_is_in_the_staging_directory(staging: StagingDir, watched: Watched) -> None:
    watched.seal(make_snapshot(rows=10))
    assert "flusher.sealed" in (staging.path / "flusher.log").read_text()
    assert json.loads((staging.path / "runs" / RUN_KEY / "run.json").read_text())["url"] == RUN_URL
