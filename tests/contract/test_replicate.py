"""What a server owes who sends it replicas: only right bytes, nothing twice, nothing outside their folder.

RP1 The reply to Offer says exactly what is lacking, also after a crash of either side.
RP2 A chunk that does not match its digest is refused and stays wanted; those before it stay.
RP3 Sending again what is there changes nothing; other bytes under a sealed name are a conflict.
RP4 A replica counts as sealed only when every chunk, the layout and the owner's note are durable.
RP5 A sender writes only into the folder of the run that its URL names, and only below replicas/.
RP6 Sizes are checked before memory or disk is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from ckpt.client.replica import ReplicaClient
from ckpt.clock import SystemClock
from ckpt.errors import ConflictError, CorruptError, InvalidInputError, RefusedError, UnavailableError
from ckpt.format import keys
from ckpt.format.envelope import Kind, seal_message
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.rpc.throttle import Throttle
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import replica_pb2, replica_pb2_grpc
from tests.support.sealing import make_world, seal
from tests.support.server import Server
from tests.support.tls import make_certificate

ID = CheckpointId(10, 1)
URL = "file:///nowhere/run"
RUN_KEY = keys.run_key(URL)
OWNER = PeerNode(node_id="0" * 16, target="127.0.0.1:9", domain="rack-a", host="owner", ranks=(0,))
THREE_CHUNKS = make_world(rows=2 * CHUNK_NBYTES // 2048 + 64, groups=((0,),))
LISTENING = ("--insecure", "--peer-listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> StagingDir:
    staging = StagingDir(tmp_path_factory.mktemp("owner")).ensure()
    seal(staging, RUN_KEY, ID, THREE_CHUNKS, 0)
    return staging


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "theirs", *LISTENING) as running:
        yield running


def offer(server: Server, ours: StagingDir, **changes: object) -> list[int]:
    """Offer rank 0's segment by hand; the chunks that are wanted."""
    request = replica_pb2.OfferRequest(
        config=RunConfig(url=URL).to_proto(),
        owner=OWNER.to_proto(),
        id=ID.to_proto(),
        rank=0,
        index=ours.read_index_bytes(RUN_KEY, ID, 0),
        layout=ours.layout(RUN_KEY, ours.read_index(RUN_KEY, ID, 0).layout_digest),
    )
    for name, value in changes.items():
        field = getattr(request, name)
        if hasattr(field, "CopyFrom"):
            field.CopyFrom(value)
        else:
            setattr(request, name, value)
    with ReplicaClient(server.tcp_target) as client:
        stub = replica_pb2_grpc.ReplicaStub(client._connection.channel)  # type: ignore[no-untyped-call]
        return list(client._connection.call(stub.Offer, request).wanted_chunks)


def replicate(
    server: Server,
    ours: StagingDir,
    chunks: list[int],
    *,
    flip: int = -1,
    cut: int = 0,
    run_key: str = RUN_KEY,
) -> list[int]:
    """Stream ``chunks`` by hand: with a bit flipped in chunk ``flip``, or the last ``cut`` bytes missing."""
    image = bytearray(ours.segment_path(RUN_KEY, ID, 0).read_bytes())
    if flip >= 0:
        image[flip * CHUNK_NBYTES + 99] ^= 4
    parts = [bytes(image[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]) for chunk in chunks]
    if cut:
        parts[-1] = parts[-1][:-cut]
    frames = [part[i : i + (1 << 20)] for part in parts for i in range(0, len(part), 1 << 20)]
    header = replica_pb2.ReplicateHeader(run_key=run_key, id=ID.to_proto(), rank=0, chunks=chunks)
    with ReplicaClient(server.tcp_target) as client:
        call: Callable[..., bytes] = client._connection.channel.stream_unary("/ckpt.v1.Bulk/Replicate")
        reply = client._connection.call(call, iter([header.SerializeToString(), *frames]))
    return list(replica_pb2.OfferResponse.FromString(reply).wanted_chunks)


def send(server: Server, ours: StagingDir) -> int:
    with ReplicaClient(server.tcp_target) as client:
        return client.send_segment(
            ours,
            RUN_KEY,
            ID,
            0,
            config=RunConfig(url=URL),
            owner=OWNER,
            throttle=Throttle(0, largest=1, clock=SystemClock()),
        )


def test_RP1_RP4_it_goes_on_where_it_was_after_a_crash_of_the_receiver(
    tmp_path: Path, ours: StagingDir
) -> None:
    nbytes = ours.read_index(RUN_KEY, ID, 0).nbytes
    with Server(tmp_path / "theirs", *LISTENING) as first:
        assert offer(first, ours) == [0, 1, 2]
        assert replicate(first, ours, [1]) == [0, 2]
        first.kill()
    theirs = replicas_dir(first.staging)
    assert theirs.sealed_ranks(RUN_KEY, ID) == []
    with Server(tmp_path / "theirs", *LISTENING) as second:
        assert offer(second, ours) == [0, 2]
        assert send(second, ours) == nbytes - CHUNK_NBYTES
        assert offer(second, ours) == []
        assert send(second, ours) == 0
    assert theirs.sealed_ranks(RUN_KEY, ID) == [0]
    assert theirs.segment_path(RUN_KEY, ID, 0).read_bytes() == ours.segment_path(RUN_KEY, ID, 0).read_bytes()
    assert theirs.read_index_bytes(RUN_KEY, ID, 0) == ours.read_index_bytes(RUN_KEY, ID, 0)
    assert theirs.layout(RUN_KEY, theirs.read_index(RUN_KEY, ID, 0).layout_digest)
    assert first.staging.run_keys() == []  # RP5: no run of this node's own came of it


def test_RP2_damage_on_the_wire_is_refused_and_what_came_before_it_stays(
    server: Server, ours: StagingDir
) -> None:
    offer(server, ours)
    with pytest.raises(CorruptError) as caught:
        replicate(server, ours, [0, 1, 2], flip=1)
    assert caught.value.code == "digest"
    assert offer(server, ours) == [1, 2]
    assert replicas_dir(server.staging).sealed_ranks(RUN_KEY, ID) == []
    assert send(server, ours) < ours.read_index(RUN_KEY, ID, 0).nbytes
    assert replicas_dir(server.staging).sealed_ranks(RUN_KEY, ID) == [0]


def test_RP2_stream_that_is_cut_short_keeps_its_whole_chunks(server: Server, ours: StagingDir) -> None:
    offer(server, ours)
    with pytest.raises(UnavailableError) as caught:
        replicate(server, ours, [0, 1], cut=5)
    assert caught.value.code == "cut"
    assert offer(server, ours) == [1, 2]


def test_RP3_duplicates_change_nothing_and_other_bytes_are_a_conflict(
    server: Server, ours: StagingDir, tmp_path: Path
) -> None:
    offer(server, ours)
    with pytest.raises(InvalidInputError):  # twice in one stream
        replicate(server, ours, [0, 0, 2])
    assert replicate(server, ours, [0, 2]) == [1]
    assert replicate(server, ours, [2]) == [1]
    assert replicate(server, ours, [1]) == []
    sealed = replicas_dir(server.staging).segment_path(RUN_KEY, ID, 0)
    before = sealed.stat().st_ino
    assert replicate(server, ours, [0, 1, 2]) == []
    assert sealed.stat().st_ino == before
    other = StagingDir(tmp_path / "other").ensure()
    seal(other, RUN_KEY, ID, make_world(groups=((0,),), seed=7), 0)
    with pytest.raises(ConflictError) as caught:
        send(server, other)
    assert caught.value.code == "sealed-differently"


def test_damage_on_the_senders_disk_is_named_and_never_sealed(server: Server, tmp_path: Path) -> None:
    own = StagingDir(tmp_path / "own").ensure()
    seal(own, RUN_KEY, ID, THREE_CHUNKS, 0)
    path = own.segment_path(RUN_KEY, ID, 0)
    data = bytearray(path.read_bytes())
    data[CHUNK_NBYTES + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        send(server, own)
    path.write_bytes(data[:-7])
    with pytest.raises(CorruptError):
        send(server, own)
    assert replicas_dir(server.staging).sealed_ranks(RUN_KEY, ID) == []


def test_RP5_sender_reaches_no_folder_but_that_of_its_run(server: Server, ours: StagingDir) -> None:
    offer(server, ours)
    for run_key in ("../../runs/x", "..", "/tmp/x", ""):
        with pytest.raises(InvalidInputError):
            replicate(server, ours, [0], run_key=run_key)
    elsewhere = RunConfig(url="file:///nowhere/another").to_proto()
    with pytest.raises(InvalidInputError):
        offer(server, ours, config=elsewhere)
    secret = RunConfig(url=URL, store_options={"secret_access_key": "x"}).to_proto()
    with pytest.raises(InvalidInputError) as caught:
        offer(server, ours, config=secret)
    assert caught.value.code == "secret"
    with pytest.raises(InvalidInputError):
        offer(server, ours, rank=1)


def test_RP6_sizes_that_cannot_be_are_refused_before_anything_is_taken(
    server: Server, ours: StagingDir
) -> None:
    for changes in ({"chunk_nbytes": 1 << 40}, {"nbytes": 1 << 50}):
        index = ours.read_index(RUN_KEY, ID, 0)
        index.chunks.chunk_nbytes = changes.get("chunk_nbytes", index.chunks.chunk_nbytes)
        index.nbytes = changes.get("nbytes", index.nbytes)
        if "chunk_nbytes" in changes:
            index.chunks.digests = index.chunks.digests[:16]
        with pytest.raises((InvalidInputError, UnavailableError)):
            offer(server, ours, index=seal_message(Kind.SEGMENT_INDEX, index))
    assert list(replicas_dir(server.staging).path.rglob("*.incoming")) == []


def test_quota_refuses_what_does_not_fit(tmp_path: Path, ours: StagingDir) -> None:
    with Server(tmp_path / "theirs", *LISTENING, "--replica-quota-mib", "20") as server:
        send(server, ours)
        seal(ours, RUN_KEY, CheckpointId(20, 1), THREE_CHUNKS, 0)
        with ReplicaClient(server.tcp_target) as client, pytest.raises(UnavailableError) as caught:
            client.send_segment(
                ours,
                RUN_KEY,
                CheckpointId(20, 1),
                0,
                config=RunConfig(url=URL),
                owner=OWNER,
                throttle=Throttle(0, largest=1, clock=SystemClock()),
            )
        assert caught.value.code == "no-space"


def test_who_does_not_say_who_it_is_is_refused(server: Server, ours: StagingDir) -> None:
    nobody = PeerNode(node_id="../x", target=None, domain="d", host="h").to_proto()
    with pytest.raises(InvalidInputError):
        offer(server, ours, owner=nobody)


def test_server_that_does_not_listen_for_peers_takes_no_replicas(tmp_path: Path, ours: StagingDir) -> None:
    with (
        Server(tmp_path / "theirs", "--insecure", "--listen", "127.0.0.1:0") as server,
        pytest.raises(RefusedError) as caught,
    ):
        offer(server, ours)
    assert caught.value.code == "no-peers"


def test_no_header_is_an_error_and_no_hang(server: Server) -> None:
    with ReplicaClient(server.tcp_target) as client:
        call: Callable[..., bytes] = client._connection.channel.stream_unary("/ckpt.v1.Bulk/Replicate")
        for messages in ([], [b"\xff" * 40]):
            with pytest.raises(InvalidInputError):
                client._connection.call(call, iter(messages))


def test_peers_need_the_token(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    token = "correct-horse-battery"
    (tmp_path / "token").write_text(token)
    secured = ("--peer-listen", "localhost:0", "--tls-cert", str(cert), "--tls-key", str(key))
    with Server(tmp_path / "theirs", *secured, "--token-file", str(tmp_path / "token")) as server:
        for wrong in (None, "wrong-horse-battery!!"):
            with ReplicaClient(server.tcp_target, token=wrong, ca=cert) as client:
                with pytest.raises(RefusedError) as caught:
                    client.greet(RUN_KEY, OWNER)
                assert caught.value.code == "unauthenticated"
                call: Callable[..., bytes] = client._connection.channel.stream_unary(
                    "/ckpt.v1.Bulk/Replicate"
                )
                with pytest.raises(grpc.RpcError) as refused:
                    call(iter([b""]), timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with ReplicaClient(server.tcp_target, token=token, ca=cert) as client:
            assert client.greet(RUN_KEY, OWNER).node.domain.startswith("machine:")
