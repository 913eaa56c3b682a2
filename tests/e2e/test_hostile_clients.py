"""Slow, silent and greedy clients on real sockets: the server keeps its memory, threads and descriptors."""

from __future__ import annotations

import itertools
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from ckpt.client import StagingClient
from ckpt.errors import BusyError, InvalidInputError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.rpc.channel import MAX_REQUEST_NBYTES, open_channel
from ckpt.rpc.status import error_from_rpc
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import peer_pb2, restore_pb2, staging_pb2
from ckpt_server.guard import MAX_UPLOADS
from tests.support.sealing import make_world, seal
from tests.support.server import Server, eventually, save

ID = CheckpointId(10, 1)
NEXT = CheckpointId(20, 1)
MIB = 1 << 20


class Meter:
    """What the server's process uses, by /proc."""

    def __init__(self, server: Server) -> None:
        assert server.process is not None
        self._proc = Path(f"/proc/{server.process.pid}")

    @property
    def threads(self) -> int:
        return len(list((self._proc / "task").iterdir()))

    @property
    def descriptors(self) -> int:
        return len(list((self._proc / "fd").iterdir()))

    @property
    def rss_mib(self) -> float:
        return int((self._proc / "statm").read_text().split()[1]) * resource.getpagesize() / MIB


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def url(place: Path) -> str:
    (place / "store").mkdir()
    return f"file://{place}/store/run"


@pytest.fixture(scope="module")
def server(place: Path, url: str) -> Iterator[Server]:
    """One run with a committed checkpoint of 64 MiB."""
    arguments = ["--insecure", "--listen", "127.0.0.1:0", "--client-stall", "1"]
    with Server(place / "staging", *arguments) as running:
        key = save(running, url, make_world(rows=64 * MIB // 2048), ID)
        running.wait_for(key, ID)
        yield running


def is_served(server: Server) -> None:
    """Another client of the network, and a trainer of this node."""
    for target in (server.tcp_target, server.target):
        with StagingClient(target, timeout_s=20) as client:
            assert client.status().steps


@pytest.mark.fault(
    "Hostile clients",
    "700 connections that say nothing",
    "TCP",
    "others are served; descriptors are given back",
    times=700,
)
def test_silent_connections(server: Server) -> None:
    meter = Meter(server)
    before = meter.descriptors
    host, _, port = server.tcp_target.rpartition(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    sockets: list[socket.socket] = []
    try:
        sockets += (socket.create_connection((host, int(port)), timeout=10) for _ in range(700))
        is_served(server)
        assert meter.descriptors < before + 1100
    finally:
        for each in sockets:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    eventually(lambda: meter.descriptors < before + 20, what="descriptors are given back")


@pytest.mark.fault(
    "Hostile clients",
    "1000 streams that stop sending",
    "gRPC",
    "cut off; others are served; memory and threads bounded",
    times=1000,
)
def test_a_thousand_streams_that_send_nothing_more(server: Server, url: str) -> None:
    meter = Meter(server)
    key = keys.run_key(url)
    header = staging_pb2.PutChunksHeader(run_key=key, id=NEXT.to_proto(), rank=0, chunks=[0])
    rss, stop = meter.rss_mib, threading.Event()

    def messages() -> Iterator[bytes]:
        yield header.SerializeToString()
        stop.wait(60)

    requests = {
        "/ckpt.v1.Bulk/PutChunks": messages,
        "/ckpt.v1.Staging/Status": lambda: iter(()),
    }
    with open_channel(server.tcp_target) as channel:
        calls = []
        for number in range(1000):
            method = list(requests)[number % 2]
            calls.append(channel.stream_unary(method).future(held(stop, requests[method]), timeout=60))
        is_served(server)
        assert meter.threads < 900
        eventually(lambda: "rpc.stalled" in server.log(), what="calls are cut off")
        is_served(server)
        stop.set()
        for call in calls:
            call.cancel()
    assert meter.rss_mib < rss + 150


def held(stop: threading.Event, make: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    yield from make()
    stop.wait(60)


@pytest.mark.fault(
    "Hostile clients",
    "64 MiB asked for 40 times and never read",
    "gRPC",
    "cut off; others are served; memory bounded",
    times=40,
)
def test_streams_that_are_never_read(server: Server, url: str) -> None:
    """64 MiB asked for 40 times, and not one byte taken."""
    meter = Meter(server)
    rss = meter.rss_mib
    seen = server.log().count("rpc.stalled")
    tensor = restore_pb2.ReadTensorRequest(url=url, checkpoint="latest", name="weight").SerializeToString()
    segment = peer_pb2.ReadSegmentRequest(run_key=keys.run_key(url), id=ID.to_proto(), nbytes=32 * MIB)
    # Else the core of the client may take all of it, read or not: it enlarges its window as it measures.
    with grpc.insecure_channel(server.tcp_target, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        calls = []
        for method, request in (("ReadTensor", tensor), ("ReadSegment", segment.SerializeToString())):
            read = channel.unary_stream(f"/ckpt.v1.Bulk/{method}")
            calls += [read(request, timeout=150) for _ in range(20)]
        is_served(server)
        eventually(
            lambda: server.log().count("rpc.stalled") >= seen + 40, timeout_s=120, what="all are cut off"
        )
        for call in calls:
            call.cancel()
    eventually(lambda: meter.rss_mib < rss + 700, what="memory is bounded")
    is_served(server)


@pytest.mark.fault(
    "Hostile clients", "streams of wrong, doubled or endless chunks", "gRPC", "refused by name"
)
@pytest.mark.parametrize(
    ("chunks", "frames"),
    [
        ([0, 0], [bytes(MIB)]),
        ([1, 0], [bytes(MIB)]),
        ([0], itertools.repeat(b"", 100_000)),
        ([0], [bytes(2 * MIB)]),
        ([2**31], [bytes(MIB)]),
    ],
)
def test_streams_that_would_never_end(
    server: Server, place: Path, url: str, chunks: list[int], frames: Iterator[bytes]
) -> None:
    offer(server, place, url)
    header = staging_pb2.PutChunksHeader(run_key=keys.run_key(url), id=NEXT.to_proto(), rank=0, chunks=chunks)
    with open_channel(server.tcp_target) as channel:
        put = channel.stream_unary("/ckpt.v1.Bulk/PutChunks")
        with pytest.raises(grpc.RpcError) as caught:
            put(itertools.chain([header.SerializeToString()], frames), timeout=30)
    assert isinstance(error_from_rpc(caught.value), InvalidInputError)


def offer(server: Server, place: Path, url: str) -> None:
    """Let the server wait for the first rank of the next step."""
    ours = StagingDir(place / "ours").ensure()
    key = keys.run_key(url)
    if not ours.sealed_ranks(key, NEXT):
        seal(ours, key, NEXT, make_world(rows=2 * CHUNK_NBYTES // 2048 + 64), 0)
    index = ours.read_index(key, NEXT, 0)
    with StagingClient(server.tcp_target) as client:
        client.seal(
            key,
            NEXT,
            0,
            index=ours.read_index_bytes(key, NEXT, 0),
            layout=ours.layout(key, index.layout_digest),
        )


@pytest.mark.fault(
    "Hostile clients",
    "more uploads at once than are allowed",
    "gRPC",
    "one too many is told that the server is busy; others are served",
)
def test_uploads_at_once_are_bounded(server: Server, place: Path, url: str) -> None:
    """Each may hold a chunk in memory: one too many is told so, and comes again."""
    offer(server, place, url)
    header = staging_pb2.PutChunksHeader(run_key=keys.run_key(url), id=NEXT.to_proto(), rank=0, chunks=[0])
    stop = threading.Event()

    def messages() -> Iterator[bytes]:
        yield header.SerializeToString()
        stop.wait(20)

    with open_channel(server.tcp_target) as channel:
        put = channel.stream_unary("/ckpt.v1.Bulk/PutChunks")
        ended: queue.Queue[grpc.Future] = queue.Queue()
        calls = [put.future(messages(), timeout=30) for _ in range(MAX_UPLOADS + 8)]
        for call in calls:
            call.add_done_callback(ended.put)
        first = ended.get(timeout=30).exception()
        assert isinstance(first, grpc.RpcError)
        assert isinstance(error_from_rpc(first), BusyError)
        is_served(server)
        stop.set()
        for call in calls:
            call.cancel()


@pytest.mark.fault("Hostile clients", "requests larger than any needed", "gRPC", "refused; memory bounded")
def test_requests_larger_than_any_that_is_needed(server: Server) -> None:
    meter = Meter(server)
    rss = meter.rss_mib
    with open_channel(server.tcp_target) as channel:
        seal_call = channel.unary_unary("/ckpt.v1.Staging/Seal")
        with pytest.raises(grpc.RpcError) as caught:
            seal_call(bytes(MAX_REQUEST_NBYTES + 1), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert meter.rss_mib < rss + 100
