"""A trainer without torch, run as a program by the crash tests: hands snapshots over and dies as told.

Usage: flusher_trainer.py STAGING RUN_KEY SERVER ROWS FATE, where FATE is

kill      SIGKILL to itself right after the hand-over, before the flusher can be ready
killpg    SIGTERM, SIGINT and SIGHUP to its whole process group, then SIGKILL to itself
unread    as kill, but the flusher is stopped (SIGSTOP), and an event of its was never read
forked    as kill, but a child forked meanwhile lives on and holds every descriptor
wait      prints the events until the flusher has gone, one name per line
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

from ckpt_proto.v1 import flusher_pb2
from ckpt_trainer_hooks.flusher_process import FlusherProcess
from tests.support.snapshots import make_snapshot


def main() -> None:
    staging, run_key, server, rows, fate = sys.argv[1:]

    reading_no_more = threading.Event()

    def show(event: flusher_pb2.FlusherEvent) -> None:
        if fate == "unread":
            reading_no_more.set()
            threading.Event().wait()
        print(flusher_pb2.FlusherEvent.State.Name(event.state), event.id.step, event.error.code, flush=True)

    process = FlusherProcess(
        staging=staging,
        run_key=run_key,
        server=server,
        on_event=show,
        on_death=lambda code: None,
        orphan_timeout_s=1.0,
    )
    print("flusher", process.pid, flush=True)
    if fate == "unread":
        _hand_over(process, step=101)
        reading_no_more.wait()
        _hand_over(process, step=102)
        select.select([process._socket], [], [])
        os.kill(process.pid, signal.SIGSTOP)
    snapshot = make_snapshot(rows=int(rows))
    arena = snapshot.new_arena()
    arena.prefault_all()
    process.send_arena(arena)
    process.flush(snapshot.into(arena))
    if fate == "forked" and os.fork() == 0:
        time.sleep(600)  # ended by the test
        os._exit(0)
    if fate == "killpg":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
            os.killpg(0, number)
    if fate != "wait":
        os.kill(os.getpid(), signal.SIGKILL)
    process.close(wait=True)


def _hand_over(process: FlusherProcess, *, step: int) -> None:
    snapshot = make_snapshot(step=step)
    arena = snapshot.new_arena()
    process.send_arena(arena)
    process.flush(snapshot.into(arena, sequence=step))


if __name__ == "__main__":
    main()
