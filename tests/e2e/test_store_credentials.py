"""Credentials that expire while the server runs: it says so, and goes on as soon as they are renewed.

The proxy refuses every session token but one, as Amazon does (400 ExpiredToken), before a real S3 server.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ckpt.errors import InvalidInputError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import list_checkpoints, load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from ckpt.storage.s3_keys import read_profile_keys
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack
from tests.support.sealing import make_world
from tests.support.server import Server, State, eventually, save

STEPS = [CheckpointId(10, 1), CheckpointId(20, 1)]
HEAD = "[default]\naws_access_key_id = test\naws_secret_access_key = test\naws_session_token = "

Renew = Callable[[str], None]
Source = Callable[[Path], AbstractContextManager[tuple[dict[str, str], Renew]]]


def answer(token: str) -> dict[str, object]:
    return {
        "Version": 1,
        "AccessKeyId": "test",
        "SecretAccessKey": "test",
        "SessionToken": token,
        "Expiration": "2099-01-01T00:00:00Z",
    }


@contextmanager
def of_file(folder: Path) -> Iterator[tuple[dict[str, str], Renew]]:
    """A tool rewrites the credentials file."""
    file = folder / "credentials"
    yield {"AWS_SHARED_CREDENTIALS_FILE": str(file)}, lambda token: bool(file.write_text(HEAD + token))


@contextmanager
def of_process(folder: Path) -> Iterator[tuple[dict[str, str], Renew]]:
    """``credential_process`` hands out what its login gives it now."""
    said = folder / "said.json"
    config = folder / "config"
    program = "import sys, pathlib; print(pathlib.Path(sys.argv[1]).read_text())"
    config.write_text(f"[default]\ncredential_process = {sys.executable} -c '{program}' {said}\n")

    def renew(token: str) -> None:
        said.with_suffix(".new").write_text(json.dumps(answer(token)))
        said.with_suffix(".new").replace(said)

    yield {"AWS_CONFIG_FILE": str(config)}, renew


@contextmanager
def of_container(folder: Path) -> Iterator[tuple[dict[str, str], Renew]]:
    """The agent beside the container, where AWS_CONTAINER_CREDENTIALS_FULL_URI points."""
    now = [""]

    class Agent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = answer(now[0])
            said["Token"] = said.pop("SessionToken")
            body = json.dumps(said | {"Expiration": "2020-01-01T00:00:00Z"}).encode()  # ask again each time
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Agent) as agent:
        threading.Thread(target=agent.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{agent.server_address[1]}/"
        token = folder / "agent-token"
        token.write_text("let me in")
        yield (
            {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": url,
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
            },
            lambda word: now.__setitem__(0, word),
        )
        agent.shutdown()


@pytest.mark.fault(
    "Store",
    "credentials expire while the server runs; {source}",
    "proxy before a real S3 server refuses every session token but the newest",
    "status says denied, nothing fails; once renewed the same process commits, whole",
)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(of_file, id="a tool rewrites the credentials file"),
        pytest.param(of_process, id="credential_process hands out new ones"),
        pytest.param(of_container, id="the container's agent hands out new ones"),
    ],
)
def test_uploads_go_on_when_expired_credentials_are_renewed(
    tmp_path: Path, s3_server: Ministack, source: Source
) -> None:
    """Case I94."""
    world = make_world()
    url = f"s3://{s3_server.make_bucket()}/run"
    with (
        source(tmp_path) as (environment, renew),
        FaultProxy(s3_server.port) as proxy,
    ):
        renew("first")
        proxy.session_token = "first"
        environment["AWS_ENDPOINT_URL"] = proxy.endpoint
        with Server(tmp_path / "staging", environment=environment) as server:
            run_key = save(server, url, world, STEPS[0])
            server.wait_for(run_key, STEPS[0], timeout_s=60)
            proxy.session_token = "second"
            save(server, url, world, STEPS[1])

            def code() -> str:
                with server.client() as client:
                    step = next(s for s in client.status(run_key).steps if s.id.step == STEPS[1].step)
                assert step.state not in (State.STATE_COMMITTED, State.STATE_FAILED)
                return step.error.code

            eventually(lambda: code() == "denied", what="the reason is shown", timeout_s=60)
            renew("second")
            server.wait_for(run_key, STEPS[1], timeout_s=90)
            pid = server.process.pid if server.process else None
            assert server.info()["pid"] == pid, "the same process"
            log = server.log()
    assert "second" not in log
    store = open_store(url, s3_server.options)
    assert [info.ident for info in list_checkpoints(store)] == STEPS[::-1]
    assert all(verify_deep(load_checkpoint(store, ident)) == [] for ident in STEPS)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/such/program --login", "No such file"),
        ("false", "exit status 1"),
        ("echo {}", "JSON"),
        ("echo not-json-but-a-secret", "JSON"),
    ],
)
def test_a_process_that_gives_no_keys_is_named_and_its_output_is_not_quoted(
    tmp_path: Path, command: str, reason: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    with pytest.raises(UnavailableError) as caught:
        read_profile_keys(
            {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no")}
        )
    assert caught.value.code == "denied"
    assert command.split()[0] in str(caught.value)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_unknown_upload_checksum_is_refused(s3_server: Ministack) -> None:
    with pytest.raises(InvalidInputError, match="none or sha256"):
        open_store("s3://bucket/run", s3_server.options | {"upload_checksum": "crc32"})
