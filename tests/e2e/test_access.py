"""Tokens with scopes and runs, TLS and client certificates, against a real server over TCP."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ckpt.client import CatalogClient, PeerClient, RestoreClient, StagingClient
from ckpt.errors import CkptError, NotFoundError, RefusedError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.rpc.channel import open_channel
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import catalog_pb2, catalog_pb2_grpc, peer_pb2, restore_pb2, staging_pb2
from tests.support.authority import Authority, Pair
from tests.support.cli import REFUSED, Cli
from tests.support.sealing import make_world, seal
from tests.support.server import Server, eventually, save

ID = CheckpointId(10, 1)
READER, WRITER, ADMIN, PEER = (f"the-token-of-the-{name}" for name in ("reader", "writer", "admin", "peer"))
ALL = "the-token-that-may-do-anything"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def tokens_text(url: str) -> str:
    text = ""
    for name, scope, token in (
        ("reader", "read", READER),
        ("writer", "write", WRITER),
        ("admin", "admin", ADMIN),
        ("peer", "peer", PEER),
    ):
        digest = hashlib.sha256(token.encode()).hexdigest()
        text += f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\nscopes = ["{scope}"]\nruns = ["{url}"]\n'
    return text


@pytest.fixture
def guarded(tmp_path: Path, url: str, pair: Pair) -> Iterator[Server]:
    (tmp_path / "tokens.toml").write_text(tokens_text(url))
    (tmp_path / "tokens.toml").chmod(0o600)
    (tmp_path / "token").write_text(ALL + "\n")
    arguments = ["--listen", "localhost:0", *pair.server_arguments()]
    arguments += ["--tokens-file", str(tmp_path / "tokens.toml"), "--token-file", str(tmp_path / "token")]
    with Server(tmp_path / "staging", *arguments) as server:
        yield server


@contextlib.contextmanager
def denied(run: str | None = None) -> Iterator[None]:
    with pytest.raises(RefusedError) as caught:
        yield
    assert caught.value.code == "permission-denied"
    if run is not None:
        assert caught.value.context["run"] == run


def test_each_scope_allows_what_it_says(
    guarded: Server, url: str, authority: Authority, tmp_path: Path
) -> None:
    run_key = save(guarded, url, make_world(), ID)
    guarded.wait_for(run_key, ID)
    target, ca = guarded.tcp_target, authority.path
    with RestoreClient(target, token=READER, ca=ca) as restore:
        assert restore.read_tensor(url, "weight").shape == (64, 512)
        assert list(restore.read_chunks(url, 0, [0]))
        restore.segment_indexes(url, [0])
    with CatalogClient(target, token=READER, ca=ca) as catalog:
        catalog.get_manifest(url)
        assert list(catalog.verify(url, "latest"))[-1].done
        catalog.prune(url, keep_last=1, dry_run=True)
        with denied():
            catalog.prune(url, keep_last=1)
        with denied():
            catalog.pin(url, str(ID))
    with StagingClient(target, token=READER, ca=ca) as staging, denied():
        staging.register(url)
    with PeerClient(target, token=READER, ca=ca) as peer:
        assert peer.have(run_key)
    with CatalogClient(target, token=WRITER, ca=ca) as catalog:
        catalog.pin(url, str(ID))
        with denied():
            catalog.pin(url, str(ID), pinned=False)
    with StagingClient(target, token=WRITER, ca=ca) as staging:
        staging.register(url)
        with denied():  # where the server's credentials go is not the writer's to say
            staging.register(url, store_options={"endpoint_url": "http://elsewhere:1"})
    with CatalogClient(target, token=ADMIN, ca=ca) as catalog:
        catalog.pin(url, str(ID), pinned=False)
        catalog.prune(url, keep_last=1)
    with PeerClient(target, token=PEER, ca=ca) as peer:
        assert peer.have(run_key)
        assert peer.segment(run_key, ID, 0).rank == 0
    with CatalogClient(target, token=PEER, ca=ca) as catalog, denied():
        catalog.get_manifest(url)


def test_a_token_reaches_its_runs_only(
    guarded: Server, url: str, authority: Authority, tmp_path: Path
) -> None:
    other = f"file://{tmp_path}/store/other"
    key = save(guarded, other, make_world(), ID)
    guarded.wait_for(key, ID)
    target, ca = guarded.tcp_target, authority.path
    ours = StagingDir(tmp_path / "ours").ensure()
    seal(ours, key, ID, make_world(), 0)
    with CatalogClient(target, token=ADMIN, ca=ca) as catalog:
        with denied(other):
            catalog.prune(other, keep_last=1)
        with denied(f"{url}/../other"):
            catalog.get_manifest(f"{url}/../other")
        with denied("all runs"):
            catalog.list_runs()
    with StagingClient(target, token=WRITER, ca=ca) as staging:
        with denied("all runs"):
            staging.status()
        with denied(other):
            staging.status(key)
        with denied(other):
            list(staging.watch(key, timeout_s=5))
        with denied(other):
            staging.push_segment(ours, key, ID, 0)
        with denied("one that is not known here"):
            staging.status("nobody-000000000000")
    with PeerClient(target, token=PEER, ca=ca) as peer:
        with denied(other):
            peer.have(key)
        assert peer.have("nobody-000000000000") == []
    raw_streams_are_checked(target, key, other, ca)
    with StagingClient(target, token=ALL, ca=ca) as staging:
        assert staging.status().steps


def raw_streams_are_checked(target: str, key: str, other: str, ca: Path) -> None:
    header = staging_pb2.PutChunksHeader(run_key=key, id=ID.to_proto(), rank=0, chunks=[0])
    segment = peer_pb2.ReadSegmentRequest(run_key=key, id=ID.to_proto(), nbytes=1)
    tensor = restore_pb2.ReadTensorRequest(url=other, checkpoint="latest", name="weight")
    chunks = restore_pb2.ReadChunksRequest(url=other, checkpoint="latest", chunks=[0])
    with open_channel(target, ca=ca) as channel:
        for token, method, request in (
            (WRITER, "PutChunks", iter([header.SerializeToString(), bytes(100)])),
            (PEER, "ReadSegment", segment.SerializeToString()),
            (READER, "ReadTensor", tensor.SerializeToString()),
            (READER, "ReadChunks", chunks.SerializeToString()),
        ):
            make = channel.stream_unary if method == "PutChunks" else channel.unary_stream
            call = make(f"/ckpt.v1.Bulk/{method}")
            metadata = (("authorization", f"Bearer {token}"),)
            with pytest.raises(grpc.RpcError) as caught:
                list(call(request, timeout=10, metadata=metadata))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, method
            assert caught.value.details()


def test_tokens_are_never_logged(guarded: Server, url: str, authority: Authority) -> None:
    wrong = "a-token-that-nobody-has-issued"
    for token in (READER, WRITER, ADMIN, PEER, ALL, wrong):
        with CatalogClient(guarded.tcp_target, token=token, ca=authority.path) as catalog:
            with contextlib.suppress(CkptError):
                catalog.list_runs()
            with contextlib.suppress(CkptError):
                catalog.prune(url, keep_last=1)
    log = guarded.log()
    assert "access.denied" in log
    assert "token=reader" in log
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in (READER, WRITER, ADMIN, PEER)]
    for secret in (READER, WRITER, ADMIN, PEER, ALL, wrong, *digests):
        assert secret not in log


def test_tokens_change_without_a_restart(
    guarded: Server, url: str, authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.toml"
    with StagingClient(guarded.tcp_target, token=WRITER, ca=authority.path) as client:
        client.register(url)
        fresh = tmp_path / "fresh"
        fresh.write_text(path.read_text().replace(hashlib.sha256(WRITER.encode()).hexdigest(), "0" * 64))
        fresh.chmod(0o600)
        fresh.replace(path)

        def is_refused() -> bool:
            try:
                client.register(url)
            except RefusedError as error:
                return error.code == "unauthenticated"
            return False

        eventually(is_refused, what="the token is withdrawn")


def test_the_command_line_uses_tokens(
    guarded: Server, url: str, authority: Authority, tmp_path: Path
) -> None:
    run_key = save(guarded, url, make_world(), ID)
    guarded.wait_for(run_key, ID)
    (tmp_path / "reader").write_text(READER)
    where = ["--server", guarded.tcp_target, "--ca", str(authority.path)]
    where += ["--token-file", str(tmp_path / "reader")]
    cli = Cli(tmp_path / "elsewhere")
    cli.run("show", url, *where)
    refused = cli.run("pin", url, str(ID), *where, code=REFUSED)
    assert "needed: write" in refused.stderr
    assert READER not in refused.stderr


def test_wrong_certificates_are_refused(tmp_path: Path, authority: Authority, url: str, pair: Pair) -> None:
    stranger = Authority(tmp_path / "stranger", "stranger")
    cases = [
        (authority.issue("expired", days=(-3, -1)), authority.path),
        (authority.issue("early", days=(1, 3)), authority.path),
        (authority.issue("elsewhere", host="elsewhere.example"), authority.path),
        (pair, stranger.path),
    ]
    for number, (shown, trusted) in enumerate(cases):
        arguments = [
            "--listen",
            "localhost:0",
            *shown.server_arguments(),
            "--token-file",
            str(tmp_path / "t"),
        ]
        (tmp_path / "t").write_text(ALL)
        with (
            Server(tmp_path / f"staging{number}", *arguments) as server,
            StagingClient(server.tcp_target, token=ALL, ca=trusted, timeout_s=3) as client,
            pytest.raises(UnavailableError),
        ):
            client.status()


def test_client_certificates(
    tmp_path: Path, authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Authority(tmp_path / "clients", "clients")
    arguments = ["--listen", "localhost:0", *pair.server_arguments(), "--tls-client-ca", str(clients.path)]
    with Server(tmp_path / "staging", *arguments) as server:

        def status() -> None:
            with StagingClient(server.tcp_target, ca=authority.path, timeout_s=5) as client:
                client.status()

        with pytest.raises(UnavailableError):  # none
            status()
        for name, value in authority.issue("wrong").client_environment().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UnavailableError):  # of another authority
            status()
        for name, value in clients.issue("client").client_environment().items():
            monkeypatch.setenv(name, value)
        status()


def test_certificates_are_renewed_without_a_restart(tmp_path: Path) -> None:
    old, new = (Authority(tmp_path / name, name) for name in ("old", "new"))
    pair = old.issue("server")
    (tmp_path / "token").write_text(ALL)
    arguments = ["--listen", "localhost:0", *pair.server_arguments(), "--token-file", str(tmp_path / "token")]

    def answers(ca: Path) -> bool:
        try:
            with StagingClient(server.tcp_target, token=ALL, ca=ca, timeout_s=5) as client:
                client.status()
        except UnavailableError:
            return False
        return True

    with Server(tmp_path / "staging", *arguments) as server:
        assert answers(old.path)
        fresh = new.issue("fresh")
        fresh.key.replace(pair.key)  # between the two renames the pair does not fit together
        assert answers(old.path)
        fresh.cert.replace(pair.cert)
        assert answers(new.path)
        assert not answers(old.path)
        assert "tls.unreadable" in server.log()


def test_mismatched_files_are_refused_at_the_start(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    (tmp_path / "token").write_text(ALL)
    other = authority.issue("other")
    arguments = ["--listen", "localhost:0", "--tls-cert", str(pair.cert), "--tls-key", str(other.key)]
    server = Server(tmp_path / "staging", *arguments, "--token-file", str(tmp_path / "token"))
    assert server.spawn().wait(20) == 1
    assert "TLS files" in server.log()


@pytest.mark.parametrize("option", ["--listen", "--peer-listen"])
def test_a_port_for_the_network_needs_tls(tmp_path: Path, option: str) -> None:
    (tmp_path / "token").write_text(ALL)
    for arguments in ([], ["--token-file", str(tmp_path / "token")], ["--insecure"]):
        server = Server(tmp_path / "staging", option, "0.0.0.0:0", *arguments)
        assert server.spawn().wait(20) == 2
        assert "TCP" in server.log() or "--insecure" in server.log()


def test_an_unknown_method_and_a_large_request_of_a_stranger(guarded: Server, authority: Authority) -> None:
    """A stranger's request is refused before it is read: 60 MiB of it never leave the client's window."""
    with open_channel(guarded.tcp_target, ca=authority.path) as channel:
        stub = catalog_pb2_grpc.CatalogStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListRuns(catalog_pb2.ListRunsRequest(root="x" * (60 << 20)), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/ckpt.v1.Catalog/Nothing")(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_missing_run_is_said_to_who_may_know(guarded: Server, url: str, authority: Authority) -> None:
    with (
        CatalogClient(guarded.tcp_target, token=READER, ca=authority.path) as catalog,
        pytest.raises(NotFoundError),
    ):
        catalog.get_manifest(url)
