"""The kernel refuses what a real flusher asks of the disk: the verdict names the file and the reason.

strace makes system calls of the running flusher fail. After each: the save has failed with the path and the
errno, nothing of it is sealed or left, the step before it is still sealed byte for byte, and once the disk
works again the next save is sealed.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from ckpt.format import keys
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import flusher_pb2
from tests.crash.test_flusher import check_sealed
from tests.support.flushing import Watched
from tests.support.snapshots import RUN_URL, make_snapshot

State = flusher_pb2.FlusherEvent
RUN_KEY = keys.run_key(RUN_URL)

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="failing disk: strace cannot be had here"
)


@contextlib.contextmanager
def injected(pid: int, call: str, what: str) -> Iterator[None]:
    """Inside the block ``call`` of the process, in any thread, does ``what``."""
    argv = [
        "strace",
        "-f",
        "-p",
        str(pid),
        "-o",
        "/dev/null",
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:{what}",
    ]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        assert "attached" in line, line
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)  # lets the process go
            tracer.communicate()


@pytest.mark.fault(
    "Disk",
    "{errno} from {call}",
    "strace -e inject on a running flusher",
    "the save fails and names file and errno; the step before it stays; the next save is sealed",
)
@pytest.mark.parametrize(
    ("call", "errno", "code"),
    [
        ("pwrite64", "EIO", "unavailable"),
        ("fdatasync", "EIO", "unavailable"),
        ("fsync", "EIO", "unavailable"),
        ("rename", "EIO", "unavailable"),
        ("fallocate", "ENOSPC", "no-space"),
        ("pwrite64", "EDQUOT", "no-space"),
        ("mkdir", "EROFS", "denied"),
    ],
)
def test_refusal_is_named_and_harms_nothing(
    staging: StagingDir, watched: Watched, call: str, errno: str, code: str
) -> None:
    """Cases I125, I38."""
    good = make_snapshot(step=1, rows=10)
    assert watched.seal(good, 1).state == State.STATE_SEALED
    with injected(watched.process.pid, call, f"error={errno}"):
        failed = watched.seal(make_snapshot(step=2, rows=10), 2)
    assert (failed.state, failed.sequence) == (State.STATE_FAILED, 2)
    assert (failed.error.kind, failed.error.code) == ("UnavailableError", code)
    assert failed.error.context["errno"] == errno
    assert failed.error.context["path"].startswith(str(staging.path))
    folder = staging.checkpoint_dir(RUN_KEY, make_snapshot(step=2, rows=10).ident)
    assert not folder.exists() or not [
        path for path in folder.iterdir() if path.name.endswith((".tmp", ".index"))
    ]
    assert errno in (staging.path / "flusher.log").read_text()
    check_sealed(staging, good)
    after = make_snapshot(step=3, rows=10)
    assert watched.seal(after, 3).state == State.STATE_SEALED
    check_sealed(staging, after)


@pytest.mark.fault("Disk", "slow: 0.1 s per sync", "strace -e inject on a running flusher", "sealed, later")
def test_slow_disk_only_takes_longer(staging: StagingDir, watched: Watched) -> None:
    snapshot = make_snapshot(step=1, rows=10)
    with injected(watched.process.pid, "fsync,fdatasync", "delay_enter=100000"):
        assert watched.seal(snapshot, 1).state == State.STATE_SEALED
    check_sealed(staging, snapshot)
