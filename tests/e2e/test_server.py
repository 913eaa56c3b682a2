"""The staging server as a process: register, seal, upload, commit, watch, restore, refuse."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.numpy import load_file

from ckpt.client import CatalogClient, RestoreClient, StagingClient
from ckpt.client.channel import MAX_MESSAGE_NBYTES, open_channel
from ckpt.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    TimeoutExceededError,
)
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.geometry import Box
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack, Rclone
from tests.support.sealing import World, make_world, seal
from tests.support.server import Server, State, eventually

ID = CheckpointId(10, 1)
EMBEDDED = ("--embedded", "--idle-exit", "0.5")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "staging") as running:
        yield running


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store/run"


def save(server: Server, url: str, world: World, ident: CheckpointId = ID, **retain: int) -> str:
    """Register, seal every rank, tell the server; returns the run key."""
    with server.client() as client:
        run_key = client.register(url, staging=server.staging, store_options={}, **retain).run_key
        for rank in range(world.size):
            seal(server.staging, run_key, ident, world, rank)
            client.seal(run_key, ident, rank)
    return run_key


def test_register_tells_about_path_and_store(server: Server, url: str, tmp_path: Path) -> None:
    with server.client() as client:
        shared = client.register(url, staging=server.staging)
        elsewhere = client.register(url, staging=StagingDir(tmp_path / "other").ensure())

    assert shared.shares_path
    assert not elsewhere.shares_path
    assert shared.conditional_put
    assert shared.run_key == keys.run_key(url)
    assert server.staging.read_run_config(shared.run_key).url == url


def test_sealed_segments_become_a_committed_checkpoint(server: Server, url: str) -> None:
    world = make_world()
    run_key = save(server, url, world)

    status = server.wait_for(run_key, ID)

    assert list(status.sealed_ranks) == [0, 1]
    assert status.uploaded_bytes == status.total_bytes > 0
    assert not status.HasField("error")
    assert server.staging.is_committed(run_key, ID)
    store = open_store(url)
    stored = store.get(keys.segment_key(ID, 1))
    assert stored == server.staging.segment_path(run_key, ID, 1).read_bytes()
    assert store.head(keys.manifest_key(ID)).nbytes > 0


def test_uploaded_object_is_a_safetensors_file(server: Server, url: str, tmp_path: Path) -> None:
    world = make_world()
    server.wait_for(save(server, url, world), ID)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(open_store(url).get(keys.segment_key(ID, 0)))

    assert load_file(copy)["weight"].tobytes() == world.tensors["weight"][:32].tobytes()


def test_scan_finds_what_nobody_announced(server: Server, url: str) -> None:
    world = make_world()
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
    for rank in range(world.size):
        seal(server.staging, run_key, ID, world, rank)

    server.wait_for(run_key, ID)


def test_watch_tells_each_state_in_order(server: Server, url: str) -> None:
    world = make_world()
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
        seen: list[int] = []
        watch = client.watch(run_key, timeout_s=30)
        seal(server.staging, run_key, ID, world, 0)
        client.seal(run_key, ID, 0)
        for status in watch:
            if status.state not in seen:
                seen.append(status.state)
            if status.state == State.STATE_SEALING and status.uploaded_bytes:
                seal(server.staging, run_key, ID, world, 1)
                client.seal(run_key, ID, 1)
            if status.state == State.STATE_COMMITTED:
                break

    # A watcher gets every last state, not every one in between.
    assert seen == sorted(seen)
    assert seen[0] == State.STATE_SEALING
    assert seen[-1] == State.STATE_COMMITTED


def test_status_lists_a_half_sealed_step_with_its_age(server: Server, url: str) -> None:
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
        seal(server.staging, run_key, ID, make_world(), 0)
        client.seal(run_key, ID, 0)
        os.utime(server.staging.index_path(run_key, ID, 0), (1_000_000_000, 1_000_000_000))
        status = client.status(run_key)

        assert [step.state for step in status.steps] == [State.STATE_SEALING]
        assert status.oldest_pending_s >= 0
        assert client.status("another-run").steps == []


def test_restart_finds_its_work(tmp_path: Path, url: str) -> None:
    world = make_world()
    with Server(tmp_path / "staging") as first:
        with first.client() as client:
            run_key = client.register(url, staging=first.staging).run_key
        assert first.terminate() == 0
    for rank in range(world.size):
        seal(first.staging, run_key, ID, world, rank)

    with Server(tmp_path / "staging") as second:
        second.wait_for(run_key, ID)


def test_seal_of_an_unknown_run_and_of_an_unsealed_segment_are_told_apart(server: Server, url: str) -> None:
    with server.client() as client:
        with pytest.raises(NotFoundError) as unknown:
            client.seal("no-such-run", ID, 0)
        run_key = client.register(url, staging=server.staging).run_key
        with pytest.raises(InvalidInputError) as unsealed:
            client.seal(run_key, ID, 0)

    assert "Register" in unknown.value.message
    assert unsealed.value.code == "not-sealed"


def test_bad_registrations_are_refused_before_anything_is_written(server: Server) -> None:
    with server.client() as client:
        for url in ("file:///", "no-scheme", "nosuchscheme://bucket/run", "file:///tmp/-bad-name"):
            with pytest.raises(InvalidInputError):
                client.register(url)
        with pytest.raises(InvalidInputError) as secret:
            client.register("s3://bucket/run", store_options={"secret_access_key": "hush"})
        assert secret.value.code == "secret"
        assert "hush" not in str(secret.value)
        assert server.staging.run_keys() == []


def test_a_store_that_is_down_keeps_nobody_from_registering(server: Server) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "region": "us-east-1"}
    with server.client() as client:
        reply = client.register("s3://bucket/run", staging=server.staging, store_options=options)

    assert not reply.conditional_put
    assert server.staging.read_run_config(reply.run_key).store_options == options


def test_damaged_chunk_fails_the_step_by_name_and_later_steps_go_on(server: Server, url: str) -> None:
    world, later = make_world(), CheckpointId(20, 1)
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
    for rank in range(world.size):
        # Out of the scan's sight until it is damaged.
        seal(server.staging, run_key, ID, world, rank) if rank else None
        seal(server.staging, run_key, later, world, rank)
    seal_damaged(server.staging, run_key, world)

    failed = server.wait_for(run_key, ID, State.STATE_FAILED)
    server.wait_for(run_key, later)

    assert failed.error.kind == "CorruptError"
    assert failed.error.context["chunk"] == "0"
    assert "segment-00000" in failed.error.context["where"]
    assert not server.staging.is_committed(run_key, ID)
    # Mended and announced again, it is tried again.
    seal(server.staging, run_key, ID, world, 0)
    with server.client() as client:
        client.seal(run_key, ID, 0)
    server.wait_for(run_key, ID)


def seal_damaged(staging: StagingDir, run_key: str, world: World) -> None:
    """Seal rank 0 with one bit flipped after the digest was taken."""
    scratch = StagingDir(staging.path.with_name("scratch")).ensure()
    seal(scratch, run_key, ID, world, 0)
    image = bytearray(scratch.segment_path(run_key, ID, 0).read_bytes())
    image[-1] ^= 1
    staging.segment_path(run_key, ID, 0).write_bytes(image)
    staging.write_index(run_key, ID, 0, scratch.read_index_bytes(run_key, ID, 0))


def test_two_nodes_commit_once_all_groups_are_there(tmp_path: Path, url: str) -> None:
    world = make_world(groups=((0, 1), (2, 3)))
    run_key = keys.run_key(url)
    with Server(tmp_path / "a") as first, Server(tmp_path / "b") as second:
        for server, ranks in ((second, (2, 3)), (first, (0, 1))):
            with server.client() as client:
                client.register(url, staging=server.staging)
                for rank in ranks:
                    seal(server.staging, run_key, ID, world, rank)
                    client.seal(run_key, ID, rank)
            if server is second:
                second.wait_for(run_key, ID, State.STATE_UPLOADED)
                assert list(open_store(url).list_keys(keys.MANIFESTS)) == []
        first.wait_for(run_key, ID)
        second.wait_for(run_key, ID)


def test_another_node_commits_where_rank_0s_server_died(tmp_path: Path, url: str) -> None:
    world = make_world(groups=((0,), (1,)))
    with Server(tmp_path / "a") as first, Server(tmp_path / "b") as second:
        with first.client() as client:
            run_key = client.register(url, staging=first.staging).run_key
            seal(first.staging, run_key, ID, world, 0)
            client.seal(run_key, ID, 0)
        first.wait_for(run_key, ID, State.STATE_UPLOADED)
        first.kill()
        with second.client() as client:
            client.register(url, staging=second.staging)
            seal(second.staging, run_key, ID, world, 1)
            client.seal(run_key, ID, 1)
        second.wait_for(run_key, ID)


def test_local_retention_keeps_the_newest_committed_steps(server: Server, url: str) -> None:
    world, run_key = make_world(), ""
    for step in (10, 20, 30):
        run_key = save(server, url, world, CheckpointId(step, 1), keep_local=2)
        server.wait_for(run_key, CheckpointId(step, 1))

    expected = [CheckpointId(20, 1), CheckpointId(30, 1)]
    eventually(lambda: server.staging.checkpoints(run_key) == expected, what="oldest step is deleted")
    with server.client() as client:
        # It was committed and cleared away; who asks late still hears that.
        assert client.seal(run_key, CheckpointId(10, 1), 0).result == staging_pb2.SealResponse.RESULT_ACCEPTED
    server.wait_for(run_key, CheckpointId(10, 1))


def test_store_retention_is_applied_by_the_committer(server: Server, url: str) -> None:
    world = make_world()
    for step in (10, 20, 30, 40):
        run_key = save(server, url, world, CheckpointId(step, 1), keep_last=1, keep_every=20)
        server.wait_for(run_key, CheckpointId(step, 1))
    with server.catalog() as catalog:

        def steps() -> list[int]:
            return [row.id.step for row in catalog.list_checkpoints(url) if row.location != "local"]

        eventually(lambda: steps() == [40, 20], what="10 and 30 are pruned")


def test_overtaken_half_sealed_step_is_abandoned_after_its_grace(tmp_path: Path, url: str) -> None:
    world, later = make_world(), CheckpointId(20, 1)
    with Server(tmp_path / "staging", "--abandon-grace", "0.5") as server:
        with server.client() as client:
            run_key = client.register(url, staging=server.staging).run_key
            seal(server.staging, run_key, ID, world, 0)
            client.seal(run_key, ID, 0)
            save(server, url, world, later)
            server.wait_for(run_key, later)
            server.wait_for(run_key, ID, State.STATE_ABANDONED)
        eventually(lambda: server.staging.checkpoints(run_key) == [later], what="its folder is gone")


# --- a client that shares no directory ---


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
    run_key = save(server, url, make_world())
    seal(ours, run_key, ID, make_world(seed=2), 0)
    with server.client() as client, pytest.raises(ConflictError) as caught:
        client.push_segment(ours, run_key, ID, 0)

    assert caught.value.code == "sealed-differently"


# --- restore and catalog ---


def test_read_tensor_gives_the_slice_numpy_gives(server: Server, url: str) -> None:
    world = make_world(rows=301, columns=700)
    server.wait_for(save(server, url, world), ID)
    with server.restore() as client:
        for offsets, sizes in [
            ((0, 0), (301, 700)),
            ((149, 3), (5, 11)),
            ((7, 699), (294, 1)),
            ((5, 5), (0, 3)),
        ]:
            box = Box(offsets, sizes)
            got = client.read_tensor(url, "weight", box=box)
            assert got.ident == ID
            assert got.global_shape == (301, 700)
            assert got.numpy().dtype == np.float32
            assert got.numpy().tobytes() == world.tensors["weight"][box.slices()].tobytes()
            assert got.shape == sizes
        assert (
            client.read_tensor(url, "order", checkpoint="10").numpy().tolist()
            == world.tensors["order"].tolist()
        )


def test_read_chunks_gives_the_segment(server: Server, url: str) -> None:
    world = make_world(rows=CHUNK_NBYTES // 1024)
    run_key = save(server, url, world)
    server.wait_for(run_key, ID)
    image = server.staging.segment_path(run_key, ID, 1).read_bytes()
    with server.restore() as client:
        ident, (index,) = client.segment_indexes(url, [1])
        count = len(index.chunks.digests) // 16
        got = list(client.read_chunks(url, 1, range(count)))

    assert ident == ID
    assert count > 1
    assert b"".join(got) == image


def test_reads_of_what_is_not_there_say_so(server: Server, url: str) -> None:
    with server.restore() as client:
        with pytest.raises(NotFoundError):
            client.read_tensor(url, "weight")
        server.wait_for(save(server, url, make_world()), ID)
        with pytest.raises(NotFoundError) as tensor:
            client.read_tensor(url, "bias")
        with pytest.raises(InvalidInputError) as box:
            client.read_tensor(url, "weight", box=Box((60, 0), (5, 512)))
        with pytest.raises(InvalidInputError):
            list(client.read_chunks(url, 0, [99]))

    assert tensor.value.context["tensor"] == "bias"
    assert box.value.code == "box"


def test_a_damaged_local_copy_is_not_served(server: Server, url: str) -> None:
    world = make_world()
    run_key = save(server, url, world)
    server.wait_for(run_key, ID)
    path = server.staging.segment_path(run_key, ID, 0)
    damaged = bytearray(path.read_bytes())
    damaged[-8:] = bytes(8)
    path.write_bytes(damaged)

    with server.restore() as client:
        assert client.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()


def test_catalog_lists_pins_prunes_and_verifies(server: Server, url: str) -> None:
    world, run_key = make_world(), ""
    for step in (10, 20, 30):
        run_key = save(server, url, world, CheckpointId(step, 1), keep_local=1)
        server.wait_for(run_key, CheckpointId(step, 1))
    seal(server.staging, run_key, CheckpointId(40, 1), world, 0)
    eventually(lambda: len(server.staging.checkpoints(run_key)) == 2, what="local retention")
    with server.catalog() as client:
        rows = [(row.id.step, row.location) for row in client.list_checkpoints(url, page_size=1)]
        assert rows == [(40, "local"), (30, "both"), (20, "remote"), (10, "remote")]
        assert client.list_runs() == [url]
        assert client.list_runs(url.rpartition("/")[0]) == [url]

        found = client.get_manifest(url)
        assert found.manifest.id.step == 30
        assert [tensor.name for tensor in found.layouts.tensors] == ["order", "weight"]
        assert [segment.rank for segment in found.segments] == [0, 1]
        assert [copy.rank for copy in found.local_copies] == [0, 1]

        assert client.pin(url, "10") == CheckpointId(10, 1)
        dry = client.prune(url, keep_last=1, dry_run=True)
        assert [(v.id.step, v.keep, v.reason) for v in dry.verdicts] == [
            (30, True, "latest"),
            (20, False, "no rule keeps it"),
            (10, True, "pinned"),
        ]
        with pytest.raises(RefusedError) as refused:
            client.prune(url, checkpoints=["30"])
        assert refused.value.code == "last-good"
        assert client.prune(url, keep_last=1).deleted_objects == dry.deleted_objects > 0
        assert [row.id.step for row in client.list_checkpoints(url)] == [40, 30, 10]
        with pytest.raises(InvalidInputError):
            client.prune(url)

        *_, done = client.verify(url, deep=True)
        assert done.done
        assert done.checked_bytes == done.total_bytes > 0


def test_verify_names_the_damage(server: Server, url: str) -> None:
    server.wait_for(save(server, url, make_world()), ID)
    path = Path(url.removeprefix("file://")) / keys.segment_key(ID, 1)
    image = bytearray(path.read_bytes())
    image[-3] ^= 4
    path.write_bytes(image)
    with server.catalog() as client:
        assert [problem for step in client.verify(url) for problem in step.problems] == []
        (problem,) = (problem for step in client.verify(url, deep=True) for problem in step.problems)

    assert problem.kind == "CorruptError"
    assert "segment-00001" in str(problem.context)


# --- who may talk to it ---


def test_second_server_on_a_directory_is_refused(server: Server) -> None:
    second = Server(server.staging.path).spawn()
    assert second.wait(20) == 3
    assert "another staging server owns this directory" in server.log()
    quiet = Server(server.staging.path, "--embedded").spawn()
    assert quiet.wait(20) == 0
    with server.client() as client:
        client.status()


def test_socket_is_private_and_server_file_goes_with_the_server(server: Server) -> None:
    assert stat.S_IMODE(server.staging.socket_path().stat().st_mode) == 0o600
    assert server.info()["target"] == server.target
    assert server.terminate() == 0
    assert server.info() == {}


def test_insecure_refuses_other_than_loopback(tmp_path: Path) -> None:
    for arguments in (["--insecure", "--listen", "0.0.0.0:0"], ["--listen", "127.0.0.1:0"]):
        server = Server(tmp_path / "staging", *arguments)
        assert server.spawn().wait(20) == 2
        assert "--insecure" in server.log()


def test_insecure_serves_loopback(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "staging", "--insecure", "--listen", "127.0.0.1:0") as server,
        StagingClient(server.tcp_target) as client,
    ):
        assert client.status().steps == []


def test_tcp_wants_tls_and_the_right_token(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "token").write_text("correct-horse-battery\n")
    arguments = ["--listen", "localhost:0", "--tls-cert", str(cert), "--tls-key", str(key)]
    with Server(tmp_path / "staging", *arguments, "--token-file", str(tmp_path / "token")) as server:
        target = server.tcp_target
        with StagingClient(target, token="correct-horse-battery", ca=cert) as client:
            assert client.status().steps == []
        for token in (None, "wrong-horse-battery!!"):
            with StagingClient(target, token=token, ca=cert) as client, pytest.raises(RefusedError) as caught:
                client.status()
            assert caught.value.code == "unauthenticated"
            with RestoreClient(target, token=token, ca=cert) as restore, pytest.raises(RefusedError):
                restore.read_tensor("file:///x/run", "weight")
        with open_channel(target, ca=cert) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def make_certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return cert, key


def test_health_and_reflection_answer(server: Server) -> None:
    with open_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "ckpt.v1.Staging", "ckpt.v1.Catalog", "ckpt.v1.Restore"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_large_messages_pass(server: Server, url: str, tmp_path: Path) -> None:
    """A layout far above gRPC's default limit of 4 MiB (200,000 tensors of a large model)."""
    ours = StagingDir(tmp_path / "ours").ensure()
    run_key = keys.run_key(url)
    seal(ours, run_key, ID, make_world(), 0)
    with server.client() as client:
        client.register(url, staging=ours)
        with pytest.raises(InvalidInputError):
            client.seal(run_key, ID, 0, index=ours.read_index_bytes(run_key, ID, 0), layout=bytes(32 << 20))
    assert MAX_MESSAGE_NBYTES > 32 << 20


# --- embedded ---


def test_embedded_server_leaves_when_it_is_done(tmp_path: Path, url: str) -> None:
    world = make_world()
    with Server(tmp_path / "staging", *EMBEDDED, "--trainer-pid", str(dead_pid())) as server:
        with server.client() as client:
            run_key = client.register(url, staging=server.staging).run_key
            watch = client.watch(run_key, timeout_s=1.5)
            with pytest.raises(TimeoutExceededError):
                list(watch)  # connected, so it stays beyond its idle time
            assert client.status().embedded
        for rank in range(world.size):
            seal(server.staging, run_key, ID, world, rank)
        assert server.process is not None
        assert server.process.wait(20) == 0
        assert server.staging.is_committed(run_key, ID)


def test_embedded_server_stays_for_its_trainer_and_for_a_later_one(tmp_path: Path) -> None:
    """A trainer is restarted while the server of the one before is still there: it must not leave then."""
    staging = tmp_path / "staging"
    trainers = [subprocess.Popen(["sleep", "120"]) for _ in range(2)]
    try:
        with Server(staging, *EMBEDDED, "--trainer-pid", str(trainers[0].pid)) as server:
            second = Server(staging, *EMBEDDED, "--trainer-pid", str(trainers[1].pid)).spawn()
            assert second.wait(30) == 0
            stop(trainers[0])
            with pytest.raises(subprocess.TimeoutExpired):
                server_process(server).wait(2)
            stop(trainers[1])
            assert server_process(server).wait(20) == 0
    finally:
        for trainer in trainers:
            stop(trainer)


def test_embedded_server_takes_over_from_one_that_is_leaving(tmp_path: Path, s3_server: Ministack) -> None:
    url = f"s3://{s3_server.make_bucket()}/run"
    go, arrived = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> int | str | None:
        if method == "PUT" and "/data/" in path:
            arrived.set()
            go.wait(60)
        return None

    with FaultProxy(s3_server.port) as proxy:
        proxy.fault = hold
        environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        with Server(tmp_path / "staging", environment=environment) as old:
            run_key = save(old, url, make_world())
            assert arrived.wait(30)
            server_process(old).send_signal(signal.SIGTERM)
            eventually(lambda: old.info() == {}, what="the old server is leaving")
            new = Server(tmp_path / "staging", *EMBEDDED, environment=environment)
            process = new.spawn()
            go.set()
            eventually(lambda: new.info().get("pid") == process.pid, timeout_s=60, what="the new one serves")
            new.wait_for(run_key, ID)
            new.terminate()


def server_process(server: Server) -> subprocess.Popen[bytes]:
    assert server.process is not None
    return server.process


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10)


def dead_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait(10)
    return process.pid


def test_term_ends_a_server_with_open_watches_soon(server: Server) -> None:
    with server.client() as client:
        watch = client.watch(timeout_s=60)
        client.status()
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGTERM)
        assert list(watch) == []
        assert server.process.wait(10) == 0


def test_whole_way_over_s3(tmp_path: Path, s3_server: Ministack) -> None:
    world = make_world()
    url = f"s3://{s3_server.make_bucket()}/run"
    with Server(tmp_path / "staging", environment=s3_server.env) as server:
        run_key = save(server, url, world)
        server.wait_for(run_key, ID)
        with server.restore() as client:
            assert client.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()
        with CatalogClient(server.target) as catalog:
            assert [row.location for row in catalog.list_checkpoints(url)] == ["both"]


def test_a_store_that_ignores_conditions_still_gets_its_commit(tmp_path: Path, rclone_server: Rclone) -> None:
    world = make_world()
    url = f"s3://{rclone_server.make_bucket()}/run"
    # rclone answers a ranged request with 200, which obstore refuses.
    options = {"engine": "fsspec"}
    with Server(tmp_path / "staging", environment=rclone_server.env) as server:
        with server.client() as client:
            reply = client.register(url, staging=server.staging, store_options=options)
            for rank in range(world.size):
                seal(server.staging, reply.run_key, ID, world, rank)
                client.seal(reply.run_key, ID, rank)
        assert not reply.conditional_put
        server.wait_for(reply.run_key, ID)
        assert "conditional_put=False" in server.log()
        with server.restore() as restore:
            assert restore.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()
