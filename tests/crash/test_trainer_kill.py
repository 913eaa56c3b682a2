"""A real trainer killed after the copy, with or without its helpers: what was copied becomes a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import latest, list_checkpoints, load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from tests.support.chain import FLUSHER, SERVER, Life, Plan, Zygote, end_node, kill_all, poll, processes
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack

LARGE = 24 << 20  # bytes of a tensor: with its moments 72 MiB, nine chunks, which take a while to seal


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


class Run:
    """One run below ``root``; its lives share the staging directory unless told otherwise."""

    def __init__(self, zygote: Zygote, root: Path) -> None:
        self._zygote = zygote
        self._root = root
        self._lives = 0
        self._stagings: set[str] = set()
        self.url = f"file://{root}/store/run"
        self.staging = root / "staging"
        (root / "store").mkdir()

    def live(self, **more: object) -> Life:
        self._lives += 1
        usual = {
            "url": self.url,
            "staging": str(self.staging),
            "report": str(self._root / f"life-{self._lives}"),
            "references": str(self._root / "references"),
        }
        plan = Plan(**{**usual, **more})  # type: ignore[arg-type]
        self._stagings.add(plan.staging)
        return self._zygote.fork(plan)

    def committed(self) -> set[int]:
        """Steps that are in the store."""
        store = open_store(self.url)
        try:
            return {info.ident.step for info in list_checkpoints(store)}
        finally:
            store.close()

    def sealed(self, step: int) -> bool:
        staging, key = StagingDir(self.staging), keys.run_key(self.url)
        return any(staging.sealed_ranks(key, i) for i in staging.checkpoints(key) if i.step == step)

    def restored_step(self, **more: object) -> int:
        """Start again, compare bit by bit with what was written before the kill, and end."""
        life = self.live(last_step=0, **more)
        step = life.wait_for("restored")["step"]
        life.kill()
        life.wait()
        return int(step)

    def end(self) -> None:
        for staging in self._stagings:
            end_node(staging)


@pytest.fixture
def run(zygote: Zygote, tmp_path: Path) -> Iterator[Run]:
    made = Run(zygote, tmp_path)
    yield made
    made.end()


def resume_flushers(run: Run) -> None:
    for pid in processes(FLUSHER, run.staging):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.fault(
    "Death of a process", "trainer right after the copy, {mode} mode", "SIGKILL", "committed all the same"
)
@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_trainer_killed_after_the_copy_leaves_a_committed_checkpoint(run: Run, mode: str) -> None:
    """Case I59."""
    life = run.live(mode=mode, last_step=4, dies_after_copy_of=3, freezes_flusher_at=3)
    assert life.wait() == -signal.SIGKILL
    assert life.events("saved")[-1]["step"] == 2
    assert not run.sealed(3)  # so far it exists in the arena only, which the dead trainer has made

    resume_flushers(run)

    poll(lambda: 3 in run.committed(), what=lambda: f"step 3 is committed{life.logs()}")
    poll(lambda: not processes(FLUSHER, run.staging), what="the flusher has left")
    assert run.restored_step() == 3
    assert run.restored_step(staging=f"{run.staging}-of-another-node") == 3


def test_large_snapshot_is_finished_by_the_flusher_alone(run: Run) -> None:
    """As above with several chunks, and nobody delays the flusher."""
    life = run.live(last_step=2, dies_after_copy_of=2, nbytes=LARGE)
    assert life.wait() == -signal.SIGKILL
    poll(lambda: 2 in run.committed(), what=lambda: f"step 2 is committed{life.logs()}")
    assert run.restored_step(nbytes=LARGE) == 2


@pytest.mark.fault(
    "Death of a process",
    "trainer; restarted while its flusher still writes",
    "SIGKILL",
    "the restart resumes from what the dead one had copied",
)
def test_restart_at_once_waits_for_the_flusher_of_the_dead_trainer(run: Run) -> None:
    """Nothing is sealed when the trainer dies, and nobody waits before the next one starts."""
    life = run.live(last_step=2, dies_after_copy_of=2, nbytes=LARGE)
    assert life.wait() == -signal.SIGKILL
    assert run.restored_step(nbytes=LARGE) == 2


def test_restart_goes_on_from_what_the_dead_trainer_has_sealed(run: Run) -> None:
    """The server is gone too, so that nobody has committed it: the next life reads it from NVMe."""
    life = run.live(last_step=2)
    life.wait_for("committed", step=2)
    for pid in (server := processes(SERVER, run.staging)):
        os.kill(pid, signal.SIGSTOP)
    life.kill()
    life.wait()
    second = run.live(last_step=3, dies_after_copy_of=3, pending_wait_s=0.0)
    assert second.wait() == -signal.SIGKILL
    poll(lambda: run.sealed(3), what=lambda: f"step 3 is sealed{second.logs()}")
    assert run.committed() == {1, 2}
    assert server
    kill_all(SERVER, run.staging)

    assert run.restored_step() == 3


@pytest.mark.fault(
    "Death of a process", "trainer and flusher together", "SIGKILL", "the checkpoint before it is restored"
)
def test_trainer_and_flusher_killed_leave_the_checkpoint_before(run: Run) -> None:
    """Case I04."""
    life = run.live(last_step=3, freezes_flusher_at=3)
    life.wait_for("saved", step=3)
    poll(lambda: run.committed() == {1, 2}, what=lambda: f"two steps are committed{life.logs()}")
    kill_all(FLUSHER, run.staging)
    life.kill()
    life.wait()

    assert run.restored_step() == 2
    assert run.committed() == {1, 2}
    third = run.live(last_step=4)  # the step that was lost is made again
    third.wait_for("committed", step=3)
    third.wait_for("committed", step=4)


@pytest.mark.fault(
    "Death of a process",
    "flusher under a living trainer",
    "SIGKILL",
    "one save fails, by name; the next one is committed",
)
def test_flusher_killed_under_a_living_trainer_costs_one_save(run: Run) -> None:
    life = run.live(last_step=3, freezes_flusher_at=3)
    life.wait_for("saved", step=3)
    kill_all(FLUSHER, run.staging)
    assert "flusher" in life.wait_for("failed", step=3)["error"]
    life.kill()
    life.wait()

    second = run.live(last_step=3)  # also shows that the half-written segment stands in nobody's way
    second.wait_for("committed", step=3)


def _the_only_server(run: Run) -> list[int]:
    servers = processes(SERVER, run.staging)
    return servers if len(servers) == 1 else []


@pytest.mark.fault(
    "Death of a process",
    "the launcher's signal {number} to the trainer's whole process group",
    "kill of the group",
    "what was copied is committed",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_the_whole_group_of_the_trainer_loses_nothing(run: Run, number: int) -> None:
    """Case I59."""
    # Blocking: the copy is over when step() returns; an overlapped one may lose the race with the signal.
    life = run.live(
        mode="blocking",
        last_step=2,
        freezes_flusher_at=2,
        environment={
            "CKPT_STOP_SIGNALS": ""
        },  # a trainer that dies of it at once; of others see test_stop.py
    )
    life.wait_for("idle")
    # A first server that is slow to answer brings a second, which sees that and leaves.
    servers = poll(lambda: _the_only_server(run), what=lambda: f"there is one server{life.logs()}")

    life.kill(number, group=True)

    assert life.wait() == (128 + number if number == signal.SIGINT else -number)
    assert not run.sealed(2)
    resume_flushers(run)
    poll(lambda: 2 in run.committed(), what=lambda: f"step 2 is committed{life.logs()}")
    assert set(servers) <= set(processes(SERVER, run.staging))
    assert run.restored_step() == 2


class Gate:
    """Lets one segment through; holds the other requests that would finish a checkpoint until opened."""

    def __init__(self) -> None:
        self._first = threading.Lock()
        self._open = threading.Event()
        self.held: list[str] = []

    def __call__(self, method: str, path: str) -> int | str | None:
        if method != "PUT" or self._open.is_set():
            return None
        if "/data/" in path and self._first.acquire(blocking=False):
            return None
        if "/data/" in path or "/index/" in path:
            self.held.append(path)
            self._open.wait(60)
            return "reset"  # who asked is dead by now; its bytes never arrive
        return None

    def open(self) -> None:
        self._open.set()


@pytest.mark.fault(
    "Death of a process",
    "embedded server in mid-upload",
    "SIGKILL, S3 behind a proxy",
    "replaced by itself; committed; nothing that was complete is sent twice",
)
def test_server_killed_in_mid_upload_is_replaced_and_sends_nothing_twice(
    run: Run, s3_server: Ministack
) -> None:
    """Cases I99, I123."""
    run.url = f"s3://{s3_server.make_bucket()}/run"
    with FaultProxy(s3_server.port) as proxy:
        proxy.fault = gate = Gate()
        environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        life = run.live(last_step=2, environment=environment)
        life.wait_for("idle")
        staging, key = StagingDir(run.staging), keys.run_key(run.url)

        def complete() -> list[int]:
            return [s for s in (1, 2) if staging.read_uploaded(key, CheckpointId(s, 1), 0) is not None]

        # Two segments are sent at once, so either may be the first.
        poll(lambda: len(gate.held) >= 2 and complete(), what=lambda: f"one is complete{life.logs()}")
        (whole,) = complete()
        killed = kill_all(SERVER, run.staging)
        before = data_puts(proxy)
        gate.open()

        life.wait_for("committed", step=1)
        life.wait_for("committed", step=2)
        assert life.events("failed") == []
        now = processes(SERVER, run.staging)
        assert now
        assert not set(now) & set(killed)
        after = data_puts(proxy)
    for step, times in ((whole, 1), (3 - whole, 2)):
        key = f"/{keys.segment_key(CheckpointId(step, 1), 0)}"
        assert [count for path, count in before.items() if path.endswith(key)] == [1]
        assert [count for path, count in after.items() if path.endswith(key)] == [times]
    life.kill()
    life.wait()
    run.end()
    store = open_store(run.url, s3_server.options)
    assert latest(store) == CheckpointId(2, 1)
    for step in (1, 2):
        assert verify_deep(load_checkpoint(store, CheckpointId(step, 1))) == []
    store.close()
    assert run.restored_step(staging=f"{run.staging}-of-another-node", environment=s3_server.env) == 2


def data_puts(proxy: FaultProxy) -> Counter[str]:
    """How often each segment's object was begun."""
    return Counter(path for method, path in proxy.requests if method == "PUT" and "/data/" in path)
