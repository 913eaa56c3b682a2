"""Who may talk to a staging server, who may start one, and when it leaves."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ckpt.client import RestoreClient, StagingClient
from ckpt.errors import (
    RefusedError,
    TimeoutExceededError,
)
from ckpt.format.ids import CheckpointId
from ckpt.rpc.channel import open_channel
from ckpt.storage.spares import spare_path
from ckpt_proto.v1 import staging_pb2, staging_pb2_grpc
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack
from tests.support.sealing import make_world, seal
from tests.support.server import Server, dead_pid, eventually, save
from tests.support.tls import make_certificate

ID = CheckpointId(10, 1)
EMBEDDED = ("--embedded", "--idle-exit", "0.5")


def test_second_server_on_a_directory_is_refused(server: Server) -> None:
    """Cases I07, I123."""
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


def test_a_quiet_call_survives_a_client_that_pings(tmp_path: Path) -> None:
    """Case I122."""
    options = [
        ("grpc.keepalive_time_ms", 100),  # gRPC makes it a second,
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    with Server(tmp_path / "staging", "--listen", "127.0.0.1:0", "--insecure") as server:
        with server.client() as client:
            run_key = client.register(url, staging=server.staging).run_key
        with grpc.insecure_channel(server.tcp_target, options=options) as channel:
            stub = staging_pb2_grpc.StagingStub(channel)  # type: ignore[no-untyped-call]
            quiet = stub.Watch(staging_pb2.StatusRequest(run_key=run_key), timeout=30)
            ended = threading.Event()
            quiet.add_callback(ended.set)
            assert not ended.wait(4.5), (
                quiet.code()
            )  # a server with gRPC's defaults ends it after three pings
            quiet.cancel()


def test_health_and_reflection_answer(server: Server) -> None:
    with open_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "ckpt.v1.Staging", "ckpt.v1.Catalog", "ckpt.v1.Restore"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


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
        spare = spare_path(server.staging, run_key, 0)
        spare.parent.mkdir()
        spare.write_bytes(b"of a step that was retired")
        assert server.process is not None
        assert server.process.wait(20) == 0
        assert server.staging.is_committed(run_key, ID)
        assert not spare.exists()  # nobody is left to overwrite it, or to remove it later


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
            run_key = save(old, url, make_world(), ID)
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


def test_term_ends_a_server_with_open_watches_soon(server: Server) -> None:
    with server.client() as client:
        watch = client.watch(timeout_s=60)
        client.status()
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGTERM)
        assert list(watch) == []
        assert server.process.wait(10) == 0
