"""A staging server that cannot see its client's directory gets the bytes streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from ckpt.client import StagingClient
from ckpt.errors import (
    ConflictError,
    InvalidInputError,
)
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.rpc.channel import MAX_MESSAGE_NBYTES
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2
from tests.support.sealing import make_world, seal
from tests.support.server import Server, save

ID = CheckpointId(10, 1)


def test_chunks_stream_to_a_server_elsewhere_and_resume(tmp_path: Path, url: str) -> None:
    world = make_world(rows=2 * CHUNK_NBYTES // 2048 + 64)  # three chunks
    ours = StagingDir(tmp_path / "ours").ensure()
    run_key = keys.run_key(url)
    for rank in range(world.size):
        seal(ours, run_key, ID, world, rank)
    count = len(ours.read_index(run_key, ID, 0).chunks.digests) // 16
    assert count > 1
    with Server(tmp_path / "theirs") as server, server.client() as client:
        assert not client.register(url, staging=ours).shares_path
        first = offer(client, ours, run_key, 0)
        assert list(first.wanted_chunks) == list(range(count))
        send(server, ours, run_key, 0, [0])
        server.kill()
    with Server(tmp_path / "theirs") as server, server.client() as client:
        assert list(offer(client, ours, run_key, 0).wanted_chunks) == list(range(1, count))
        sent = client.push_segment(ours, run_key, ID, 0)
        assert sent == ours.read_index(run_key, ID, 0).nbytes - CHUNK_NBYTES
        assert client.push_segment(ours, run_key, ID, 0) == 0
        client.push_segment(ours, run_key, ID, 1)
        server.wait_for(run_key, ID)
        assert server.staging.read_index_bytes(run_key, ID, 0) == ours.read_index_bytes(run_key, ID, 0)
        with server.restore() as restore:
            assert restore.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()


def offer(client: StagingClient, ours: StagingDir, run_key: str, rank: int) -> staging_pb2.SealResponse:
    index = ours.read_index_bytes(run_key, ID, rank)
    layout = ours.layout(run_key, ours.read_index(run_key, ID, rank).layout_digest)
    return client.seal(run_key, ID, rank, index=index, layout=layout)


def send(
    server: Server, ours: StagingDir, run_key: str, rank: int, chunks: list[int], *, flip: bool = False
) -> staging_pb2.SealResponse:
    """Stream ``chunks`` by hand, as a client without our library would."""
    header = staging_pb2.PutChunksHeader(run_key=run_key, id=ID.to_proto(), rank=rank, chunks=chunks)
    image = bytearray(ours.segment_path(run_key, ID, rank).read_bytes())
    image[0] ^= flip
    parts = [bytes(image[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]) for chunk in chunks]
    frames = [part[i : i + 65536] for part in parts for i in range(0, len(part), 65536)]
    with grpc.insecure_channel(server.target) as channel:
        call: Callable[..., bytes] = channel.stream_unary("/ckpt.v1.Bulk/PutChunks")
        reply = call(iter([header.SerializeToString(), *frames]), timeout=30)
    return staging_pb2.SealResponse.FromString(reply)


def test_damage_in_transit_is_refused_and_asked_for_again(tmp_path: Path, url: str, server: Server) -> None:
    """Case I124."""
    world = make_world()
    ours = StagingDir(tmp_path / "ours").ensure()
    run_key = keys.run_key(url)
    seal(ours, run_key, ID, world, 0)
    with server.client() as client:
        client.register(url, staging=ours)
        offer(client, ours, run_key, 0)
        with pytest.raises(grpc.RpcError) as caught:
            send(server, ours, run_key, 0, [0], flip=True)
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        assert list(offer(client, ours, run_key, 0).wanted_chunks) == [0]


def test_other_bytes_under_a_sealed_name_are_a_conflict(tmp_path: Path, url: str, server: Server) -> None:
    ours = StagingDir(tmp_path / "ours").ensure()
    run_key = save(server, url, make_world(), ID)
    seal(ours, run_key, ID, make_world(seed=2), 0)
    with server.client() as client, pytest.raises(ConflictError) as caught:
        client.push_segment(ours, run_key, ID, 0)

    assert caught.value.code == "sealed-differently"


def test_large_messages_pass(server: Server, url: str, tmp_path: Path) -> None:
    """A layout far above gRPC's default limit of 4 MiB (200,000 tensors of a large model) (I120)."""
    ours = StagingDir(tmp_path / "ours").ensure()
    run_key = keys.run_key(url)
    seal(ours, run_key, ID, make_world(), 0)
    with server.client() as client:
        client.register(url, staging=ours)
        with pytest.raises(InvalidInputError):
            client.seal(run_key, ID, 0, index=ours.read_index_bytes(run_key, ID, 0), layout=bytes(32 << 20))
    assert MAX_MESSAGE_NBYTES > 32 << 20
