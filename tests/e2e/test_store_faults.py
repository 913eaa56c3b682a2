"""A real server against a real S3 server that fails in every way the proxy knows, until it works again.

Each time: the step is committed once, whole, bit by bit, and nothing is there twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import latest, list_checkpoints, load_checkpoint
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from tests.support.faultproxy import Fault, FaultProxy
from tests.support.reliability import Recorder
from tests.support.s3 import Ministack
from tests.support.sealing import World, make_world
from tests.support.server import Server, State, eventually, save

ID = CheckpointId(10, 1)
MOST_TRIES = 12  # of one request: by the client itself, and by the server's retries while a fault lasts


@pytest.fixture
def proxy(s3_server: Ministack) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as running:
        yield running


def first_of_each(what: int | str) -> Fault:
    """The first try of every request fails, whatever it asks for; later ones pass."""
    seen: set[tuple[str, str]] = set()
    lock = threading.Lock()

    def fault(method: str, path: str) -> int | str | None:
        with lock:
            if (method, path) in seen:
                return None
            seen.add((method, path))
        return what

    return fault


def late(_method: str, _path: str) -> None:
    """100 ms of latency."""
    time.sleep(0.1)


def check_once(url: str, s3_server: Ministack, world: World) -> None:
    store = open_store(url, s3_server.options)
    assert latest(store) == ID
    assert [info.ident for info in list_checkpoints(store)] == [ID]
    checkpoint = load_checkpoint(store, ID)
    assert verify_deep(checkpoint) == []
    for name, tensor in world.tensors.items():
        assert fetch_tensor(checkpoint, name)[2] == tensor.tobytes()
    assert len(list(store.list_keys("data/"))) == world.size
    store.close()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("500 to the first try of every request", first_of_each(500)),
        ("503 SlowDown to the first try of every request", first_of_each(503)),
        ("connection reset at the first try of every request", first_of_each("reset")),
        ("reply lost after success, at the first try of every request", first_of_each("lose-reply")),
        ("body cut short at the first try of every request", first_of_each("truncate")),
        ("100 ms latency", late),
    ],
)
def test_step_is_committed_once_through_a_faulty_store(
    tmp_path: Path,
    s3_server: Ministack,
    proxy: FaultProxy,
    record_fault: Recorder,
    name: str,
    fault: Fault,
) -> None:
    """Cases I60, I96."""
    world = make_world()
    url = f"s3://{s3_server.make_bucket()}/run"
    proxy.fault = fault
    with Server(
        tmp_path / "staging", environment=s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
    ) as server:
        run_key = save(server, url, world, ID)
        server.wait_for(run_key, ID, timeout_s=90)
    check_once(url, s3_server, world)
    tries = Counter(request for request in proxy.requests if request[0] == "PUT")
    assert max(tries.values()) <= MOST_TRIES
    record_fault("Store", name, "proxy before a real S3 server", "committed once, whole; retries bounded")


def test_refused_credentials_are_shown_and_work_goes_on_when_they_are_good_again(
    tmp_path: Path, s3_server: Ministack, proxy: FaultProxy, record_fault: Recorder
) -> None:
    """Case I94."""
    world = make_world()
    url = f"s3://{s3_server.make_bucket()}/run"
    proxy.fault = lambda method, path: 403 if "/data/" in path else None
    with Server(
        tmp_path / "staging", environment=s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
    ) as server:
        run_key = save(server, url, world, ID)

        def code() -> str:
            with server.client() as client:
                (step,) = client.status(run_key).steps
            assert step.state not in (State.STATE_COMMITTED, State.STATE_UPLOADED)
            return step.error.code

        eventually(lambda: code() == "denied", what="the reason is shown", timeout_s=60)
        proxy.fault = lambda _method, _path: None
        server.wait_for(run_key, ID, timeout_s=90)
    check_once(url, s3_server, world)
    record_fault(
        "Store",
        "403 to every upload until the credentials are good again",
        "proxy before a real S3 server",
        "status says denied, nothing is committed; afterwards committed once, whole",
    )
