"""Under load nothing grows: 64 ranks, 500 restoring clients, forks, descriptors of others.

``python -m tests.support.load`` is the long form of the first test; docs/operations.md has its figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from ckpt.repository import Repository
from ckpt.storage.procfs import process_state
from tests.support.load import Ranks, Usage, restore_all_at_once
from tests.support.runs import stop_server
from tests.support.server import Server, eventually

_WARM, _MORE = 3, 5
_CLIENTS = 500


def test_64_ranks_and_500_restoring_clients_leave_the_server_as_it_was(tmp_path: Path) -> None:
    """Case I109."""
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store/run"
    with Server(tmp_path / "staging") as server, Ranks(server, url) as ranks:
        assert server.process is not None
        pid = server.process.pid

        def usage() -> Usage:
            return Usage.of(pid, tmp_path / "staging", tmp_path / "store")

        for _ in range(_WARM):
            ident = ranks.save()
        warm = usage()
        for _ in range(_MORE):
            ident = ranks.save()
        eventually(lambda: usage().temporary == 0, what="no half-written file is left")
        # Retention runs after the commit: a step or two more than is kept may still be there.
        eventually(lambda: usage().staged <= warm.staged + 8, what="the staging directory does not grow")
        eventually(lambda: usage().objects <= warm.objects + 8, what="the store does not grow")
        saved = usage()
        took = restore_all_at_once(server.target, url, ident, clients=_CLIENTS, reads=1, processes=2)
        assert len(took) == _CLIENTS  # each compared all it got
        restored = usage()
        took = restore_all_at_once(server.target, url, ident, clients=_CLIENTS, reads=1, processes=2)
        assert len(took) == _CLIENTS
        eventually(lambda: usage().descriptors <= restored.descriptors + 4, what="channels are given back")
        again = usage()
        log = server.log()
    assert saved.rss_kib - warm.rss_kib < 24 << 10, (warm, saved)
    assert abs(saved.threads - warm.threads) <= 32, (warm, saved)  # pools that fill up as work comes
    assert abs(saved.descriptors - warm.descriptors) <= 8, (warm, saved)
    assert restored.rss_kib - saved.rss_kib < 128 << 10, (saved, restored)
    assert again.rss_kib - restored.rss_kib < 24 << 10, (restored, again)
    assert again.threads <= 400, again  # bounded by the pools, not by the clients
    assert again.descriptors <= saved.descriptors + 8, (saved, again)
    assert "job.failed" not in log


def _trainer(place: Path) -> tuple[list[str], str]:
    (place / "store").mkdir()
    url = f"file://{place}/store/run"
    return [sys.executable, "-m", "tests.support.forking", url, str(place / "staging")], url


def _links(pid: int | str) -> dict[str, str]:
    """What the descriptors of a process are, by number."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[entry.name] = str(entry.readlink())
    return found


def _sockets(pid: int) -> set[str]:
    return {link for link in _links(pid).values() if link.startswith("socket:")}


def _processes_of(staging: Path) -> list[int]:
    """Server and flushers of a staging directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(staging).encode() in command and b"-m" in command:
                found.append(int(entry.name))
    return found


def test_a_trainer_that_forks_with_all_up_neither_hangs_nor_hands_its_lines_on(tmp_path: Path) -> None:
    """Case I121."""
    command, url = _trainer(tmp_path)
    staging = tmp_path / "staging"
    trainer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout is not None
        line = trainer.stdout.readline()
        assert line, trainer.communicate(timeout=30)[1]
        told = json.loads(line)
        helpers = [pid for pid in _processes_of(staging) if pid != trainer.pid and pid != told["child"]]
        assert helpers
        assert trainer.wait(60) == 0
        assert process_state(told["child"]) == "S"
        held = _sockets(told["child"])
        for pid in helpers:
            if process_state(pid):
                assert not held & _sockets(pid), "the child holds a line of the server or a flusher"
        files = _links(told["child"]).values()
        assert not [link for link in files if link.endswith((".lock", "/server.sock"))]
        # The flusher ends although the child lives on: nothing keeps its line to the trainer open.
        flushers = [pid for pid in helpers if b"ckpt.flusher" in _cmdline(pid)]
        eventually(lambda: not any(map(process_state, flushers)), timeout_s=60, what="the flusher has left")
    finally:
        trainer.kill()
        trainer.communicate()  # closes stdin: the child ends
        _end_server(staging)
    assert told["seen"] == 48
    with Repository(url) as run:
        assert [info.ident.step for info in run.checkpoints()] == [told["step"], 9, 3, 1]
        assert bytes(run.load("model.weight")["model.weight"].data).hex() == told["weight"]


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _end_server(staging: Path) -> None:
    stop_server(staging)
    for pid in _processes_of(staging):
        if b"ckpt_server" in _cmdline(pid):
            os.kill(pid, 15)


def test_a_trainer_with_closed_standard_descriptors_and_many_others_open_saves(tmp_path: Path) -> None:
    """A socket that becomes "stdin" does not reach a child whose stdin is another one."""
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store/run"
    script = (
        "import sys, torch\n"
        "from ckpt_trainer_hooks import CheckpointManager\n"
        "model = torch.nn.Linear(4, 4)\n"
        "with CheckpointManager(sys.argv[1], model=model, staging_dir=sys.argv[2]) as manager:\n"
        "    manager.restore()\n"
        "    manager.save(1).upload_completion.result(60)\n"
    )
    readers_writers = [os.pipe() for _ in range(60)]  # as from a launcher that shares its own
    extra = [fd for pair in readers_writers for fd in pair]

    def close() -> None:
        for fd in (0, 1):
            os.close(fd)

    staging = tmp_path / "staging"
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, url, str(staging)], pass_fds=extra, preexec_fn=close
    )
    try:
        assert trainer.wait(90) == 0
        for pid in _processes_of(staging):  # nor do they go on to those that outlive it
            own = _links("self")
            assert not set(_links(pid).values()) & {own[str(fd)] for fd in extra}
    finally:
        trainer.kill()
        trainer.wait()
        for fd in extra:
            os.close(fd)
        _end_server(staging)
    with Repository(url) as run:
        assert [info.ident.step for info in run.checkpoints()] == [1]


def test_a_server_with_closed_standard_descriptors_serves_and_stops(tmp_path: Path) -> None:
    def close() -> None:
        for fd in (0, 1):
            os.close(fd)

    server = Server(tmp_path / "staging")
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_server", "--staging", str(tmp_path / "staging")],
        stderr=log,
        preexec_fn=close,
    )
    try:
        eventually(lambda: server.info().get("pid") == process.pid, what="server is ready")
        with server.client() as client:
            assert not client.status().steps
        process.terminate()
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
        log.close()
