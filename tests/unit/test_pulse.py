"""The pulse in shared memory: what one process writes another reads, also where it is cut off midway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckpt.errors import InvalidInputError
from ckpt.storage.procfs import catches_signal, kernel_view, process_started_at, process_state
from ckpt.storage.pulse import PULSE_NBYTES, STACKS_SIGNAL, PulseReader, PulseWriter
from ckpt_proto.v1 import staging_pb2
from ckpt_trainer_hooks.liveness import Pulse
from tests.support.chain import poll


def reader_of(writer: PulseWriter) -> PulseReader:
    return PulseReader(os.dup(writer.fd))


def test_what_is_written_is_read() -> None:
    writer = PulseWriter()
    reader = reader_of(writer)
    assert (reader.progress().moves, reader.details()[1]) == (0, 0)

    writer.progress(7, 3, 12345, b"optimizer")
    writer.details(staging_pb2.RankPulse(rank=2, where="here"), 99)

    found = reader.progress()
    assert (found.step, found.moves, found.moved_ns, found.phase) == (7, 3, 12345, "optimizer")
    details, at = reader.details()
    assert (details.rank, details.where, at) == (2, "here", 99)
    writer.close()
    assert reader.progress() == found  # what is mapped stays


def test_half_written_record_leaves_the_last_good_one() -> None:
    writer = PulseWriter()
    reader = reader_of(writer)
    writer.progress(7, 3, 1, b"train")
    reader.progress()
    os.pwrite(writer.fd, (3).to_bytes(4, "little"), 0)  # odd: stopped while writing
    os.pwrite(writer.fd, (8).to_bytes(8, "little"), 8)
    assert reader.progress().step == 7


def test_reader_never_sees_a_mixture() -> None:
    writer = PulseWriter()
    reader = reader_of(writer)
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            writer.progress(count, count, count, b"%d" % count)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3000):
            found = reader.progress()
            assert found.step == found.moves == found.moved_ns
            assert found.phase in ("", str(found.step))
    finally:
        stop.set()
        thread.join()


def test_file_of_another_size_is_no_pulse(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InvalidInputError):
        PulseReader(os.open(tmp_path / "file", os.O_RDONLY))


def test_details_that_do_not_fit_are_refused_and_the_old_ones_stay() -> None:
    writer = PulseWriter()
    reader = reader_of(writer)
    writer.details(staging_pb2.RankPulse(where="old"), 1)
    with pytest.raises(InvalidInputError):
        writer.details(staging_pb2.RankPulse(where="x" * PULSE_NBYTES), 2)
    assert reader.details()[0].where == "old"


def test_trainer_measures_steps_and_phases_and_is_seen_at_its_place() -> None:
    pulse = Pulse(run_key="run", rank=1, world_size=2)
    reader = PulseReader(os.dup(pulse.fds[0]))
    pulse.begin(3, 10, (0, 1))
    for step in range(11, 15):
        with pulse.phase("data"):
            time.sleep(0.02)
        pulse.completed(step, "save")
        pulse.enter("train")
    pulse.tick()

    details, _ = reader.details()
    assert (details.attempt, details.rank, details.run_key) == (3, 1, "run")
    assert reader.progress().step == 14
    assert reader.progress().phase == "train"
    assert details.phase_s["data"] >= 0.02
    assert details.step_s >= details.phase_s["data"]
    assert details.where.startswith("tick (liveness.py:")
    assert not details.waits
    pulse.close()
    pulse.enter("train")  # after the end it is nobody's business, and no error


@pytest.mark.parametrize("name", ["", "x" * 25])
def test_phase_without_a_short_name_is_refused(name: str) -> None:
    pulse = Pulse(run_key="run", rank=0, world_size=1)
    with pytest.raises(InvalidInputError):
        pulse.enter(name)
    pulse.close()


def test_kernel_knows_a_stopped_process_from_a_running_and_a_dead_one() -> None:
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started_at = process_started_at(process.pid)
        assert started_at is not None
        assert abs(started_at - began) < 1.0
        os.kill(process.pid, signal.SIGSTOP)
        poll(lambda: process_state(process.pid) == "T", what="it is stopped")
        assert kernel_view(process.pid).startswith("state T (stopped by a signal)")
        assert not catches_signal(process.pid, STACKS_SIGNAL)
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == ""
    assert kernel_view(process.pid) == ""
    assert process_started_at(process.pid) is None
