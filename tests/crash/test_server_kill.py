"""The staging server killed at every point of its work: nothing lost, nothing torn, nothing sent twice."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import latest, load_checkpoint
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack
from tests.support.sealing import World, make_world, seal
from tests.support.server import Server, State, eventually

ID = CheckpointId(10, 1)
EIGHT = tuple(range(8))


@pytest.fixture
def proxy(s3_server: Ministack) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as running:
        yield running


def seal_all(server: Server, url: str, world: World, ident: CheckpointId = ID) -> str:
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
        for rank in range(world.size):
            seal(server.staging, run_key, ident, world, rank)
            client.seal(run_key, ident, rank)
    return run_key


def data_puts(proxy: FaultProxy) -> Counter[str]:
    """How often each segment's object was begun."""
    return Counter(path for method, path in proxy.requests if method == "PUT" and "/data/" in path)


class Gate:
    """A fault that lets the first puts of segments through and holds the others until it is opened."""

    def __init__(self, passes: int) -> None:
        self._passes = threading.Semaphore(passes)
        self.held = threading.Event()
        self._open = threading.Event()

    def __call__(self, method: str, path: str) -> int | str | None:
        if method == "PUT" and "/data/" in path and not self._open.is_set():
            if self._passes.acquire(blocking=False):
                return None
            self.held.set()
            self._open.wait(60)
            return "reset"  # the one that asked is dead by now; its bytes never arrive
        return None

    def open(self) -> None:
        self._open.set()


@pytest.mark.fault(
    "Death of a process",
    "server in mid-upload of the fourth of eight segments",
    "SIGKILL, S3 behind a proxy",
    "committed, whole; complete objects are not sent again",
)
def test_kill_in_mid_upload_sends_nothing_twice_that_was_complete(
    tmp_path: Path, s3_server: Ministack, proxy: FaultProxy
) -> None:
    """Case I99."""
    world = make_world(rows=128, groups=(EIGHT,))
    url = f"s3://{s3_server.make_bucket()}/run"
    environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.fault = gate = Gate(passes=3)
    with Server(tmp_path / "staging", environment=environment) as first:
        run_key = seal_all(first, url, world)
        assert gate.held.wait(30)

        def marked() -> list[int]:
            return [r for r in EIGHT if first.staging.read_uploaded(run_key, ID, r) is not None]

        eventually(lambda: len(marked()) == 3, what="three segments are uploaded")
        first.kill()
    complete = marked()
    before = data_puts(proxy)
    gate.open()

    with Server(tmp_path / "staging", environment=environment) as second:
        second.wait_for(run_key, ID)

    after = data_puts(proxy)
    for rank in complete:
        (path,) = (p for p in after if p.endswith(keys.segment_key(ID, rank)))
        assert (before[path], after[path]) == (1, 1)
    assert len(after) == len(EIGHT)
    check_whole(url, s3_server, world)


def check_whole(url: str, s3_server: Ministack | None, world: World) -> None:
    store = open_store(url, s3_server.options if s3_server else None)
    ident = latest(store)
    assert ident is not None
    checkpoint = load_checkpoint(store, ident)
    assert verify_deep(checkpoint) == []
    for name, tensor in world.tensors.items():
        assert fetch_tensor(checkpoint, name)[2] == tensor.tobytes()
    store.close()


@pytest.mark.fault(
    "Death of a process",
    "server between an object's last byte and its note",
    "SIGKILL; note and manifest removed",
    "committed, whole; nothing sent again",
)
def test_object_complete_but_its_note_lost_is_not_sent_again(tmp_path: Path) -> None:
    """Case I99."""
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store/run"
    world = make_world()
    with Server(tmp_path / "staging") as first:
        run_key = seal_all(first, url, world)
        first.wait_for(run_key, ID)
        first.kill()
    objects = [tmp_path / "store/run" / keys.segment_key(ID, rank) for rank in range(2)]
    inodes = [path.stat().st_ino for path in objects]
    # The moment between the last byte of an object and the note of it.
    folder = first.staging.checkpoint_dir(run_key, ID)
    for path in [
        folder / "committed",
        *(first.staging.uploaded_path(run_key, ID, rank) for rank in range(2)),
    ]:
        path.unlink()
    (tmp_path / "store/run" / keys.manifest_key(ID)).unlink()

    with Server(tmp_path / "staging") as second:
        second.wait_for(run_key, ID)

    assert [path.stat().st_ino for path in objects] == inodes
    check_whole(url, None, world)


@pytest.mark.fault("Death of a process", "server at a random instant", "SIGKILL", "committed, whole")
@pytest.mark.parametrize("seed", range(6))
def test_kill_at_a_random_instant_loses_nothing(tmp_path: Path, seed: int) -> None:
    """Case I123."""
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store/run"
    world = make_world(rows=16_384, groups=((0, 1, 2, 3),))  # 32 MiB: long enough to be hit
    root = tmp_path / "store/run"
    dice = random.Random(seed)
    with Server(tmp_path / "staging") as server:
        run_key = seal_all(server, url, world)
        # Kill after a random number of files have appeared in the store, then again in the next life.
        wanted = dice.randrange(0, 8)
        eventually(lambda: count_files(root) >= wanted, what=f"{wanted} objects")
        server.kill()
    survived = {path: path.stat().st_ino for path in root.rglob("*.safetensors")}
    noted = {rank for rank in range(4) if server.staging.read_uploaded(run_key, ID, rank) is not None}

    with Server(tmp_path / "staging") as server:
        server.wait_for(run_key, ID)

    assert {path: path.stat().st_ino for path in survived} == survived
    assert len(survived) >= len(noted)
    check_whole(url, None, world)


def count_files(root: Path) -> int:
    """Finished objects; those being written are hidden or gone again."""
    try:
        return sum(1 for path in root.rglob("*") if path.suffix in (".safetensors", ".pb"))
    except FileNotFoundError:
        return 0


@pytest.mark.fault(
    "Store",
    "away, then back",
    "the store's place taken by a file",
    "status and log say so; then committed, whole",
)
def test_store_outage_is_waited_out_and_visible_meanwhile(tmp_path: Path) -> None:
    """Case I60."""
    world = make_world()
    store = Ministack(tmp_path / "ministack")
    store.start()
    try:
        url = f"s3://{store.make_bucket()}/run"
        with Server(tmp_path / "staging", environment=store.env) as server:
            with server.client() as client:
                run_key = client.register(url, staging=server.staging).run_key
            store.kill()
            seal_all(server, url, world)

            def reason() -> str:
                with server.client() as client:
                    (step,) = client.status(run_key).steps
                assert step.state == State.STATE_UPLOADING
                return step.error.kind

            eventually(lambda: reason() == "UnavailableError", what="the reason is shown", timeout_s=60)
            store.restart()
            status = server.wait_for(run_key, ID, timeout_s=90)
            assert not status.HasField("error")
    finally:
        store.kill()


@pytest.mark.fault(
    "Store",
    "hangs while the server is told to stop",
    "proxy that does not answer",
    "ends within the grace time; the next one commits",
)
def test_term_with_a_store_that_hangs_ends_within_the_grace(
    tmp_path: Path, s3_server: Ministack, proxy: FaultProxy
) -> None:
    world = make_world()
    url = f"s3://{s3_server.make_bucket()}/run"
    environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.fault = gate = Gate(passes=0)
    with Server(tmp_path / "staging", "--stop-grace", "1", environment=environment) as server:
        run_key = seal_all(server, url, world)
        assert gate.held.wait(30)
        assert server.terminate(timeout_s=15) == 0
    gate.open()
    with Server(tmp_path / "staging", environment=environment) as server:
        server.wait_for(run_key, ID)
    check_whole(url, s3_server, world)


def test_term_finishes_the_object_on_its_way(tmp_path: Path, s3_server: Ministack, proxy: FaultProxy) -> None:
    world = make_world(groups=((0,),))
    url = f"s3://{s3_server.make_bucket()}/run"
    environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
    arrived, go = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> int | str | None:
        if method == "PUT" and "/data/" in path:
            arrived.set()
            go.wait(60)
        return None

    proxy.fault = hold
    with Server(tmp_path / "staging", environment=environment) as server:
        run_key = seal_all(server, url, world)
        assert arrived.wait(30)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.info() == {}, what="the server is stopping")
        go.set()
        assert server.process.wait(20) == 0
        assert server.staging.read_uploaded(run_key, ID, 0) is not None


@pytest.mark.fault(
    "Hangs and stops",
    "server stopped",
    "SIGSTOP",
    "training goes on; the reason is shown; committed once it goes on",
)
def test_hanging_server_blocks_nobody_and_hides_nothing(tmp_path: Path) -> None:
    """I62: the server stopped dead; what was sealed is all there when it goes on."""
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store/run"
    world = make_world()
    with Server(tmp_path / "staging") as server:
        with server.client() as client:
            run_key = client.register(url, staging=server.staging).run_key
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        for step in (10, 20, 30):
            for rank in range(world.size):
                seal(server.staging, run_key, CheckpointId(step, 1), world, rank)
        server.process.send_signal(signal.SIGCONT)
        server.wait_for(run_key, CheckpointId(30, 1))
        with server.catalog() as catalog:
            eventually(lambda: len(list(catalog.list_checkpoints(url))) == 3, what="all three are committed")
