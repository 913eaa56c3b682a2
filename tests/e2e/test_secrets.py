"""A real training process saves through a daemon that it reaches by TLS; no secret is to be found afterwards.

The store's secret key, the token of the daemon and the encryption key are drawn for the run, and looked for:
on the wire, in the command lines of all processes, in logs, metrics, staging directories, the store, and what
commands show.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import list_checkpoints
from ckpt.storage.open import open_store
from tests.support.authority import Authority
from tests.support.cli import Cli
from tests.support.s3 import Ministack
from tests.support.server import Server

PROGRAM = """
import sys
import torch
from ckpt_trainer_hooks import CheckpointManager
torch.manual_seed(1)
model = torch.nn.Linear(512, 512)
url, staging = sys.argv[1:]
manager = CheckpointManager(url, model=model, staging_dir=staging, mode="blocking", timeout_s=60.0)
manager.restore()
for step in (1, 2):
    manager.save(step).upload_completion.result(60)
    with torch.no_grad():
        model.bias += 1
print(model.weight[3].detach().numpy().tobytes().hex(), flush=True)
sys.stdin.readline()
manager.close()
"""


@dataclass
class Relay:
    """Passes TCP connections on to ``port`` of localhost and keeps what goes through."""

    port: int
    seen: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self._sockets = [self._listener]
        self.target = f"localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("localhost", self.port))
            self._sockets += (client, server)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@dataclass
class Secrets:
    store: str = field(default_factory=lambda: secrets.token_hex(20))
    token: str = field(default_factory=lambda: secrets.token_hex(20))
    key: str = field(default_factory=lambda: secrets.token_hex(32))

    def among(self, data: bytes) -> list[str]:
        """Names of those that ``data`` shows, as text or as bytes."""
        forms = {
            "store": [self.store.encode()],
            "token": [self.token.encode()],
            "key": [self.key.encode(), bytes.fromhex(self.key)],
        }
        return [name for name, found in forms.items() if any(form in data for form in found)]


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


@pytest.mark.fault(
    "Hostile clients",
    "somebody reads the wire, command lines, logs, metrics, disks and the store of a run",
    "a relay that records, and a search for three drawn secrets and a row of weights",
    "no secret anywhere; weights neither on the wire nor in the store",
)
@pytest.mark.timeout(150)
def test_a_real_save_by_tls_shows_no_secret(tmp_path: Path, s3_server: Ministack) -> None:
    hidden = Secrets()
    (tmp_path / "token").write_text(hidden.token)
    (tmp_path / "keys").write_text(f"prod {hidden.key}\n")
    for name in ("token", "keys"):
        (tmp_path / name).chmod(0o600)
    authority = Authority(tmp_path / "authority")
    arguments = ["--listen", "localhost:0", *authority.issue("server").server_arguments()]
    arguments += ["--token-file", str(tmp_path / "token"), "--metrics-listen", "127.0.0.1:0"]
    url = f"s3://{s3_server.make_bucket()}/run"
    encryption = {"CKPT_ENCRYPTION_KEYS": str(tmp_path / "keys")}
    environment = s3_server.env | encryption | {"AWS_SECRET_ACCESS_KEY": hidden.store}
    sealing = environment | {"CKPT_ENCRYPTION_KEY": "prod"}
    daemon = Server(tmp_path / "daemon", *arguments, environment=sealing)
    seen: dict[str, bytes] = {}
    with daemon:
        relay = Relay(int(daemon.tcp_target.rpartition(":")[2]))
        access = {"CKPT_SERVER_TOKEN": hidden.token, "CKPT_SERVER_CA": str(authority.path)}
        cli = Cli(tmp_path / "elsewhere")
        log = tmp_path / "trainer.log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, url, str(tmp_path / "node")],
                env=cli.env | environment | access | {"CKPT_SERVER": relay.target},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as trainer,
        ):
            assert trainer.stdout is not None
            row = bytes.fromhex(trainer.stdout.readline())
            assert row, log.read_text()
            seen |= {f"argv {number}": line for number, line in enumerate(command_lines())}
            metrics = f"https://{daemon.info()['metrics']}/metrics".replace("127.0.0.1", "localhost")
            seen["metrics"] = fetch(metrics, authority)
            trainer.communicate("\n", timeout=60)
        assert trainer.returncode == 0
        relay.close()
        # The bytes did go to the daemon over this wire, and nobody on it can read them.
        staged = daemon.staging.segment_path(keys.run_key(url), CheckpointId(2, 1), 0)
        assert row in staged.read_bytes()
        assert len(relay.seen) > 2 * 512 * 512 * 4
        assert row not in relay.seen
        seen["wire"] = bytes(relay.seen)
        where = ["--server", daemon.tcp_target, "--token-file", str(tmp_path / "token")]
        shown = cli.run("status", *where, "--ca", str(authority.path), "--json")
        seen["status"] = (shown.stdout + shown.stderr).encode()
    seen["log"] = daemon.log().encode()
    places = [tmp_path / "daemon", tmp_path / "node", log]
    files = [path for place in places for path in (place, *place.rglob("*")) if path.is_file()]
    assert any(path.name == "flusher.log" for path in files)
    seen |= {str(path): path.read_bytes() for path in files if path.name != "token"}
    store = open_store(url, s3_server.options)
    assert [info.ident.step for info in list_checkpoints(store)] == [2, 1]
    objects = {info.key: store.get(info.key) for info in store.list_keys("")}
    assert all(row not in data for data in objects.values())
    seen |= objects
    assert {place: found for place, data in seen.items() if (found := hidden.among(data))} == {}


def fetch(url: str, authority: Authority) -> bytes:
    context = ssl.create_default_context(cafile=str(authority.path))
    with urllib.request.urlopen(url, timeout=10, context=context) as reply:
        body: bytes = reply.read()
    assert b"ckpt_events_total" in body
    return body
