"""A flusher under test, its events in queues."""

from __future__ import annotations

import os
import queue
import select
import signal
import time
from collections.abc import Callable

from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import flusher_pb2
from ckpt_trainer_hooks.flusher_process import FlusherProcess
from tests.support.snapshots import Snapshot

NOBODY = "unix:/nonexistent/server.sock"
WAIT_S = 60.0
State = flusher_pb2.FlusherEvent


class Watched:
    """A FlusherProcess whose events and death wait in queues."""

    def __init__(
        self, staging: StagingDir, run_key: str, *, server: str = NOBODY, orphan_timeout_s: float = 1.0
    ) -> None:
        self.events: queue.Queue[flusher_pb2.FlusherEvent] = queue.Queue()
        self.deaths: queue.Queue[int] = queue.Queue()
        self.process = FlusherProcess(
            staging=staging.path,
            run_key=run_key,
            server=server,
            on_event=self.events.put,
            on_death=self.deaths.put,
            close_timeout_s=30.0,
            orphan_timeout_s=orphan_timeout_s,
        )

    def next(self, *states: int) -> flusher_pb2.FlusherEvent:
        """Return the next event of one of ``states``; others are passed over."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if found.state in states:
                return found

    def seal(self, snapshot: Snapshot, sequence: int = 1) -> flusher_pb2.FlusherEvent:
        with snapshot.new_arena() as arena:
            self.process.send_arena(arena)
            self.process.flush(snapshot.into(arena, sequence=sequence))
            return self.next(State.STATE_SEALED, State.STATE_FAILED)


def stop(pid: int) -> None:
    """End a flusher that a test started, unless it has left."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        select.select([], [], [], 0.01)
