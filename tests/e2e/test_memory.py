"""Memory of trainer, flusher and server: one copy of the state, then nothing more, save after save."""

from __future__ import annotations

import json
import os
import resource
import threading
from pathlib import Path
from types import TracebackType

import pytest
import torch
from torch import nn

from ckpt.errors import UnavailableError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import bits_of
from tests.support.runs import Place
from tests.support.server import eventually

MIB = 1 << 20
ROWS, COLUMNS = 5 * MIB, 8  # 160 MiB
STATE_NBYTES = ROWS * COLUMNS * 4
WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("one_thread")


def memory_of(pid: int) -> tuple[int, int]:
    """Anonymous and shared resident memory of a process, in bytes. Of files' pages there is no account."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
    return int(found["RssAnon"].split()[0]) << 10, int(found["RssShmem"].split()[0]) << 10


class Peak:
    """The most that processes take within a ``with`` block beyond what they had before, in bytes, by pid."""

    def __init__(self, *pids: int) -> None:
        self._before = {pid: memory_of(pid) for pid in pids}
        self.anonymous = dict.fromkeys(pids, 0)
        self.shared = dict.fromkeys(pids, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while True:
            over = self._over.wait(0.002)
            for pid, (anonymous, shared) in self._before.items():
                now = memory_of(pid)
                self.anonymous[pid] = max(self.anonymous[pid], now[0] - anonymous)
                self.shared[pid] = max(self.shared[pid], now[1] - shared)
            if over:
                return

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()


def helpers(manager: CheckpointManager, place: Place) -> tuple[int, int]:
    """Process ids of the flusher and of the server."""
    path = place.staging / "server.json"
    eventually(path.exists, what="the server is up")
    server = int(json.loads(path.read_text())["pid"])
    return manager._pipeline._flusher.pid, server


def test_a_save_takes_one_copy_and_a_restore_a_fraction(place: Place) -> None:
    """Cases I108, I110, I112."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    me = os.getpid()
    with CheckpointManager(place.url, model=model, staging_dir=place.staging, compression="off") as manager:
        manager.restore()
        assert manager._pipeline._prefault is not None
        manager._pipeline._prefault.result(WAIT_S)
        flusher, server = helpers(manager, place)
        with Peak(me, flusher, server) as peak:
            manager.save(1).upload_completion.result(WAIT_S)
        assert peak.shared[me] < 8 * MIB  # the arena was there, and no step pays for it
        assert max(peak.anonymous.values()) < STATE_NBYTES, peak.anonymous
        assert peak.anonymous[me] < 32 * MIB
        assert peak.anonymous[flusher] < 64 * MIB
        arena = manager._pipeline._arena
        assert arena is not None
        assert arena.nbytes < 1.05 * STATE_NBYTES
        expected = bits_of(model.weight)
        with torch.no_grad():
            model.weight.zero_()
        with Peak(me) as peak:
            manager.restore()
        assert peak.anonymous[me] + peak.shared[me] < STATE_NBYTES / 4
        assert bits_of(model.weight) == expected


def test_memory_is_flat_from_save_to_save(place: Place) -> None:
    """Case I109."""
    state = {"t": torch.zeros(2 * MIB)}  # 8 MiB
    pids: tuple[int, ...] = ()
    sums: list[int] = []
    with CheckpointManager(
        place.url, state={"state": state}, staging_dir=place.staging, keep_last=1, keep_local=1
    ) as manager:
        manager.restore()
        for step in range(1, 61):
            state["t"].add_(1.0)
            manager.save(step).upload_completion.result(WAIT_S)
            if step % 20 == 0:
                manager.restore()
                pids = (os.getpid(), *helpers(manager, place))
                sums.append(sum(sum(memory_of(pid)) for pid in pids))
    assert sums[2] - sums[1] < 24 * MIB, sums  # three of twenty saves' bytes


def test_memory_that_does_not_suffice_is_said_at_the_first_save(place: Place) -> None:
    """Case I108."""
    model = nn.Linear(COLUMNS, ROWS // 2, bias=False)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with CheckpointManager(place.url, model=model, staging_dir=place.staging) as manager:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (size + 48 * MIB, limits[1]))
            manager.restore()
            with pytest.raises(UnavailableError) as caught:
                manager.save(1)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert caught.value.code == "no-memory"
        assert int(str(caught.value.context["nbytes"])) >= STATE_NBYTES // 2
        manager.save(2).upload_completion.result(WAIT_S)
        assert manager.all_steps() == [2]
