"""A real server against a real S3 server that fails in every way the proxy knows, until it works again.

Each time: the step is committed once, whole, bit by bit, and nothing is there twice.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import MANIFESTS
from ckpt.ops.catalog import candidates, latest, list_checkpoints, load_checkpoint
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.groups import list_groups
from ckpt.ops.verify import verify_deep
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from tests.e2e.test_server_metrics import scrape
from tests.support.builders import claim
from tests.support.faultproxy import Fault, FaultProxy
from tests.support.s3 import Ministack
from tests.support.sealing import World, make_world
from tests.support.server import Server, State, eventually, save

ID, SECOND = CheckpointId(10, 1), CheckpointId(20, 1)
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


def pass_on(_method: str, _path: str) -> None:
    """No fault."""


@dataclass
class Site:
    """A run in the S3 server, with a world to save; ``proxy`` stands before the server.

    Attributes:
        world: what is saved; a test may put another.
    """

    url: str
    folder: Path
    s3_server: Ministack
    proxy: FaultProxy
    world: World = field(default_factory=make_world)

    def serve(self, *arguments: str, name: str = "staging") -> Server:
        """Return a staging server that knows the store by the proxy only."""
        environment = self.s3_server.env | {"AWS_ENDPOINT_URL": self.proxy.endpoint}
        return Server(self.folder / name, *arguments, environment=environment)

    def save(
        self, server: Server, ident: CheckpointId = ID, *, keep_last: int = 0, **store_options: str
    ) -> str:
        return save(server, self.url, self.world, ident, store_options=store_options, keep_last=keep_last)

    def through_proxy(self) -> Store:
        return open_store(self.url, self.s3_server.options | {"endpoint_url": self.proxy.endpoint})

    def past_proxy(self) -> Store:
        return open_store(self.url, self.s3_server.options)

    def check_whole(self, store: Store, ident: CheckpointId = ID) -> None:
        checkpoint = load_checkpoint(store, ident)
        assert verify_deep(checkpoint) == []
        self.check_tensors(checkpoint)

    def check_tensors(self, checkpoint: Checkpoint) -> None:
        for name, tensor in self.world.tensors.items():
            assert fetch_tensor(checkpoint, name)[2] == tensor.tobytes()

    def check_once(self) -> None:
        store = self.past_proxy()
        assert latest(store) == ID
        assert [info.ident for info in list_checkpoints(store)] == [ID]
        self.check_whole(store)
        assert len(list(store.list_keys("data/"))) == self.world.size
        store.close()


@pytest.fixture
def site(tmp_path: Path, s3_server: Ministack, proxy: FaultProxy) -> Site:
    return Site(f"s3://{s3_server.make_bucket()}/run", tmp_path, s3_server, proxy)


def retries(server: Server) -> float:
    """How often a job was tried again, as Prometheus sees it."""
    return scrape(server).get(
        ("ckpt_events_total", frozenset([("event", "job.retry"), ("level", "warning")])), 0.0
    )


@pytest.mark.fault(
    "Store", "{name}", "proxy before a real S3 server", "committed once, whole; retries bounded"
)
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
    site: Site, proxy: FaultProxy, name: str, fault: Fault
) -> None:
    """Cases I60, I96."""
    proxy.fault = fault
    with site.serve() as server:
        run_key = site.save(server)
        server.wait_for(run_key, ID, timeout_s=90)
    site.check_once()
    tries = Counter(request for request in proxy.requests if request[0] == "PUT")
    assert max(tries.values()) <= MOST_TRIES


@pytest.mark.fault(
    "Store",
    "403 to every upload until the credentials are good again",
    "proxy before a real S3 server",
    "status says denied, nothing is committed; afterwards committed once, whole",
)
def test_refused_credentials_are_shown_and_work_goes_on_when_they_are_good_again(
    site: Site, proxy: FaultProxy
) -> None:
    """Case I94."""
    proxy.fault = lambda method, path: 403 if "/data/" in path else None
    with site.serve() as server:
        run_key = site.save(server)

        def code() -> str:
            with server.client() as client:
                (step,) = client.status(run_key).steps
            assert step.state not in (State.STATE_COMMITTED, State.STATE_UPLOADED)
            return step.error.code

        eventually(lambda: code() == "denied", what="the reason is shown", timeout_s=60)
        proxy.fault = pass_on
        server.wait_for(run_key, ID, timeout_s=90)
    site.check_once()


@pytest.mark.fault(
    "Store",
    "1 MB/s, up and down",
    "proxy before a real S3 server",
    "committed once, whole, restored; no request is repeated, the server answers meanwhile",
)
def test_slow_link_takes_time_and_nothing_else(site: Site, proxy: FaultProxy) -> None:
    site.world = make_world(rows=512)
    nbytes = sum(tensor.nbytes for tensor in site.world.tensors.values())
    with site.serve() as server:
        proxy.rate = 1e6
        began = time.monotonic()
        run_key = site.save(server)
        with server.client() as client:
            asked = time.monotonic()
            assert [step.state for step in client.status(run_key).steps] != [State.STATE_COMMITTED]
            assert time.monotonic() - asked < nbytes / proxy.rate, "status waits for the upload"
        server.wait_for(run_key, ID, timeout_s=90)
        assert time.monotonic() - began >= nbytes / proxy.rate
    puts = Counter(path for method, path in proxy.requests if method == "PUT" and "/probe/" not in path)
    assert max(puts.values()) == 1
    slow = site.through_proxy()
    began = time.monotonic()
    site.check_whole(slow)
    assert time.monotonic() - began >= 2 * nbytes / proxy.rate
    site.check_once()


def asked(proxy: FaultProxy, prefix: str) -> int:
    wanted = prefix.replace("/", "%2F")
    return sum("list-type=" in path and wanted in path for _, path in proxy.requests)


@pytest.mark.fault(
    "Store",
    "old listings: of group indexes, of manifests, of what was pruned meanwhile",
    "proxy before a real S3 server repeats the first answer to each listing",
    "commit waits, then once; nothing newer is deleted; a restore gets a whole step or a named error",
    times=3,
)
def test_old_listings_delay_a_commit_and_delete_nothing(site: Site, proxy: FaultProxy) -> None:
    """Case I91."""
    reader = site.through_proxy()
    fresh = site.past_proxy()
    claim(fresh)
    with site.serve() as server:
        run_key = site.save(server, keep_last=1)
        server.wait_for(run_key, ID)
        proxy.first_answers.clear()
        assert list_groups(reader, SECOND).count is None
        assert latest(reader) == ID
        proxy.fault = lambda method, path: "stale" if "list-type=" in path else None
        site.save(server, SECOND, keep_last=1)
        index = f"index/{SECOND}/"
        eventually(lambda: asked(proxy, index) >= 2, what="it looks for the groups, in vain", timeout_s=60)
        assert [info.ident for info in list_checkpoints(fresh)] == [ID]
        site.check_whole(reader, next(candidates(reader)))
        proxy.fault = lambda method, path: "stale" if "list-type=" in path and "manifests" in path else None
        server.wait_for(run_key, SECOND, timeout_s=60)
        assert latest(reader) == ID, "the proxy still shows the old listing"
        site.check_whole(reader)
        proxy.fault = pass_on
        third = CheckpointId(30, 1)
        site.save(server, third, keep_last=1)
        server.wait_for(run_key, third, timeout_s=60)
        eventually(
            lambda: [info.ident for info in list_checkpoints(fresh)] == [third],
            what="retention has caught up",
        )
    proxy.fault = lambda method, path: "stale" if "list-type=" in path else None
    assert latest(reader) == ID
    with pytest.raises(UnavailableError) as caught:  # neither an older one nor a fresh start
        list(candidates(reader))
    assert caught.value.code == "stale-listing"
    proxy.fault = pass_on
    assert list(candidates(reader)) == [third]
    site.check_whole(reader, third)


@pytest.mark.fault(
    "Store",
    "a bit of every object flips on its way up, at the first try",
    "proxy before a real S3 server; `upload_checksum=sha256`",
    "the store refuses it, it is sent again; committed once, whole",
)
def test_upload_damaged_on_its_way_is_refused_and_sent_again(site: Site, proxy: FaultProxy) -> None:
    """Case I96."""
    damage = first_of_each("damage")
    proxy.fault = lambda method, path: (
        damage(method, path) if method == "PUT" and "/probe/" not in path else None
    )
    with site.serve("--metrics-listen", "127.0.0.1:0") as server:
        run_key = site.save(server, upload_checksum="sha256")
        server.wait_for(run_key, ID, timeout_s=90)
        assert retries(server) >= site.world.size
        assert "damaged on the way" in server.log()
    site.check_once()


@pytest.mark.fault(
    "Store",
    "a bit of an object flips on its way up, over plain HTTP without upload_checksum",
    "proxy before a real S3 server",
    "`verify --deep` and every reader name object and chunk; no damaged byte is given out",
)
def test_upload_damaged_unseen_is_found_by_name(site: Site, proxy: FaultProxy) -> None:
    """Case I124."""
    damage = first_of_each("damage")
    is_hit = "segment-00001"
    proxy.fault = lambda method, path: damage(method, path) if is_hit in path else None
    with site.serve() as server:
        server.wait_for(site.save(server), ID, timeout_s=90)
    checkpoint = load_checkpoint(site.past_proxy(), ID)
    (problem,) = verify_deep(checkpoint)
    assert (problem.code, is_hit in str(problem)) == ("digest", True)
    with pytest.raises(CorruptError) as caught:
        fetch_tensor(checkpoint, "weight")
    assert (caught.value.code, is_hit in str(caught.value)) == ("digest", True)


@pytest.mark.fault(
    "Store",
    "a bit flips on its way down: of manifest, layout, group index, chunk; once, then always",
    "proxy before a real S3 server",
    "once: read again, whole; always: CorruptError with the object's name, no damaged byte given out",
    times=8,
)
def test_download_damaged_on_its_way_is_read_again(site: Site, proxy: FaultProxy) -> None:
    """Cases I96, I124."""
    with site.serve() as server:
        server.wait_for(site.save(server), ID)
    kinds = {"manifest": "/manifests/", "layout": "/layouts/", "group index": "/index/", "chunk": "/data/"}
    for kind, where in kinds.items():
        left = [2 if kind == "group index" else 1]

        def once(method: str, path: str, where: str = where, left: list[int] = left) -> str | None:
            if method != "GET" or where not in path or "list-type=" in path or not left[0]:
                return None
            left[0] -= 1
            return "damage"

        proxy.fault = once
        checkpoint = load_checkpoint(site.through_proxy(), ID)
        site.check_tensors(checkpoint)
        proxy.fault = lambda method, path, where=where: "damage" if where in path else None  # type: ignore[misc]
        with pytest.raises(CorruptError) as caught:
            fetch_tensor(load_checkpoint(site.through_proxy(), ID), "weight")
        assert where.strip("/") in str(caught.value)


@pytest.mark.fault(
    "Store",
    "503 to every upload for as long as it takes the server to try again three times",
    "proxy before a real S3 server",
    "pauses double from 0.5 s, each with jitter; status, log and metrics show it; then committed once",
)
def test_retries_are_bounded_jittered_and_visible(site: Site, proxy: FaultProxy) -> None:
    """Case I98."""
    site.world = make_world(groups=[[0]])
    proxy.fault = lambda method, path: 503 if "/data/" in path else None
    tries = 3
    with site.serve("--metrics-listen", "127.0.0.1:0") as server:
        run_key = site.save(server, retries="1")
        eventually(lambda: retries(server) >= tries, what="retries in the metrics", timeout_s=60)
        with server.client() as client:
            (step,) = client.status(run_key).steps
        assert step.error.code == "unavailable"
        log = server.log()
        proxy.fault = pass_on
        server.wait_for(run_key, ID, timeout_s=60)
    site.check_once()
    pauses = [float(text) for text in re.findall(r"job\.retry .*delay_s=([0-9.]+)", log)][:tries]
    for number, pause_s in enumerate(pauses):
        assert 0.75 * 0.5 * 2**number - 0.001 <= pause_s <= 1.25 * 0.5 * 2**number + 0.001
    assert len({round(pause_s / 2**number, 3) for number, pause_s in enumerate(pauses)}) > 1, "no jitter"
    sent = sum(method == "PUT" and "/data/" in path for method, path in proxy.requests)
    assert sent <= 2 * (tries + 2) + 1  # each try of the job: the request and one repeat


@pytest.mark.fault(
    "Races",
    "two servers put one step's manifest at one moment, and the replies to both are lost",
    "two real servers, proxy before a real S3 server",
    "committed once; one knows that it won, the other that it lost; both report committed",
)
def test_racing_committers_who_both_lose_the_reply_commit_once(site: Site, proxy: FaultProxy) -> None:
    """Two servers have all of the step (a node and who took it over), and put its manifest at once (I07)."""
    meet = threading.Barrier(2)
    left = [2]
    lock = threading.Lock()

    def fault(method: str, path: str) -> str | None:
        if method != "PUT" or f"/{MANIFESTS}" not in path:
            return None
        with lock:
            if not left[0]:
                return None
            left[0] -= 1
        meet.wait(60)
        return "lose-reply"

    proxy.fault = fault
    with (
        site.serve(name="one") as one,
        site.serve(name="two") as two,
    ):
        run_key = site.save(one)
        site.save(two)
        for server in (one, two):
            server.wait_for(run_key, ID, timeout_s=90)
        won = re.findall(r"step\.committed .*won=(\w+)", one.log() + two.log())
    assert not meet.broken
    assert left == [0]
    assert sorted(won) == ["False", "True"]
    site.check_once()
