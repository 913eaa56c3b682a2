"""What both S3 engines make of a service that fails, and how many requests they send."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from ckpt.storage.base import Store
from ckpt.storage.conditional import commit_put
from ckpt.storage.open import open_store
from tests.support.faultproxy import Fault, FaultProxy
from tests.support.s3 import Ministack, free_port

MIB = 1 << 20
FAST = {"retries": "1"}
ENGINES = pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])


@pytest.fixture
def proxy(s3_server: Ministack) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.port) as running:
        yield running


@pytest.fixture
def bucket(s3_server: Ministack) -> str:
    return s3_server.make_bucket()


def through(proxy: FaultProxy, server: Ministack, scheme: str, bucket: str, *, retries: int = 1) -> Store:
    options = server.options | {"endpoint_url": proxy.endpoint, "retries": str(retries)}
    return open_store(f"{scheme}://{bucket}/root/run", options)


@ENGINES
@pytest.mark.parametrize(("status", "code"), [(500, "unavailable"), (503, "unavailable"), (403, "denied")])
def test_a_refusal_is_never_absence(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str, status: int, code: str
) -> None:
    """Case I102."""
    store = through(proxy, s3_server, scheme, bucket)
    assert store.probe_conditional()
    store.put("k", b"value")
    proxy.fault = lambda _method, _path: status
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("k"),
        "get_range": lambda: store.get_range("k", 0, 2),
        "head": lambda: store.head("k"),
        "list": lambda: list(store.list_keys("")),
        "put": lambda: store.put("k", b"x"),
        "put_new": lambda: store.put_new("new", b"x"),
        "delete": lambda: store.delete(["k"]),
    }
    for name, call in calls.items():
        with pytest.raises(UnavailableError) as caught:
            call()
        assert caught.value.code == code, name
    proxy.fault = lambda _method, _path: None
    assert store.get("k") == b"value"


@ENGINES
def test_a_dead_port_is_unavailable_soon(scheme: str) -> None:
    store = open_store(
        f"{scheme}://bucket/run",
        {
            "endpoint_url": f"http://127.0.0.1:{free_port()}",
            "access_key_id": "a",
            "secret_access_key": "b",
            "retries": "2",
        },
    )
    begin = time.monotonic()
    for call in (lambda: store.get("k"), lambda: list(store.list_keys("")), lambda: store.put_new("k", b"")):
        with pytest.raises(UnavailableError):
            call()
    assert time.monotonic() - begin < 20
    store.close()


@ENGINES
def test_a_missing_bucket_is_named(s3_server: Ministack, scheme: str) -> None:
    store = open_store(f"{scheme}://no-such-bucket/run", s3_server.options | FAST)
    for call in (lambda: store.put("k", b""), lambda: store.get("k"), lambda: list(store.list_keys(""))):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert caught.value.code == "no-bucket"


@ENGINES
def test_wrong_keys_are_denied(s3_server: Ministack, bucket: str, scheme: str) -> None:
    store = open_store(f"{scheme}://{bucket}/run", s3_server.options | FAST | {"access_key_id": "wrong"})
    for call in (lambda: store.put("k", b""), lambda: store.get("k"), lambda: list(store.list_keys(""))):
        with pytest.raises(UnavailableError) as caught:
            call()
        assert caught.value.code == "denied"


@ENGINES
def test_hiccups_are_ridden_out(s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str) -> None:
    """Cases I96, I98, I99."""
    store = through(proxy, s3_server, scheme, bucket, retries=4)
    data = bytes(range(256)) * 4096 * 11  # 11 MiB: three parts
    count = {"n": 0}

    def every_third(method: str, path: str) -> int | str | None:
        count["n"] += 1
        return (None, None, 503, None, None, "reset")[count["n"] % 6]

    proxy.fault = every_third
    store.put_parts("big", [data], most_nbytes=len(data), part_nbytes=5 * MIB, concurrency=2)
    for start in range(0, len(data), 4 * MIB):
        nbytes = min(4 * MIB, len(data) - start)
        assert store.get_range("big", start, nbytes) == data[start : start + nbytes]
    proxy.fault = lambda _method, _path: None
    assert store.get("big") == data


@ENGINES
def test_a_body_cut_short_is_noticed(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    """Case I96."""
    store = through(proxy, s3_server, scheme, bucket)
    data = bytes(range(256)) * 4096
    store.put("k", data)
    cut = {"left": 1}

    def once(method: str, path: str) -> int | str | None:
        if method == "GET" and cut["left"]:
            cut["left"] -= 1
            return "truncate"
        return None

    proxy.fault = once
    assert store.get_range("k", 10, 900_000) == data[10:900_010]
    assert cut["left"] == 0
    proxy.fault = lambda method, _path: "truncate" if method == "GET" else None
    with pytest.raises(UnavailableError):
        store.get_range("k", 10, 900_000)


@ENGINES
def test_a_body_damaged_on_its_way_up_is_refused_where_checksums_are_sent(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    options = s3_server.options | {
        "endpoint_url": proxy.endpoint,
        "retries": "1",
        "upload_checksum": "sha256",
    }
    store = open_store(f"{scheme}://{bucket}/root/run", options)
    assert store.probe_conditional()
    data = bytes(range(256)) * 4096 * 11
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("k", data),
        "put_new": lambda: store.put_new("k", data),
        "parts": lambda: store.put_parts(
            "k", [data], most_nbytes=len(data), part_nbytes=5 * MIB, concurrency=2
        ),
    }
    for name, call in calls.items():
        proxy.fault = lambda method, _path: "damage" if method == "PUT" else None
        with pytest.raises(UnavailableError) as caught:
            call()
        assert caught.value.code == "bad-digest", name
        with pytest.raises(NotFoundError):
            store.head("k")
        proxy.fault = lambda _method, _path: None
        call()
        assert store.get("k") == data, name
        store.delete(["k"])
    store.close()


@ENGINES
def test_a_failed_upload_leaves_no_object(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    store = through(proxy, s3_server, scheme, bucket)
    proxy.fault = lambda _method, path: 503 if "partNumber=2" in path else None
    with pytest.raises(UnavailableError):
        store.put_parts("big", [bytes(11 * MIB)], most_nbytes=11 * MIB, part_nbytes=5 * MIB, concurrency=2)
    with pytest.raises(NotFoundError):
        store.head("big")
    assert any(method == "DELETE" for method, _path in proxy.requests), "the parts were not given up"


@ENGINES
def test_pieces_that_fail_leave_no_parts_behind(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    store = through(proxy, s3_server, scheme, bucket)

    def pieces() -> Iterator[bytes]:
        yield bytes(11 * MIB)
        raise CorruptError("damaged", code="digest")

    with pytest.raises(CorruptError):
        store.put_parts("big", pieces(), most_nbytes=99 * MIB, part_nbytes=5 * MIB, concurrency=2)
    assert any("partNumber=2" in path for _method, path in proxy.requests), "nothing was sent before"
    assert any(method == "DELETE" for method, _path in proxy.requests), "the parts were not given up"


@ENGINES
def test_a_limited_listing_costs_one_request(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    store = through(proxy, s3_server, scheme, bucket)
    for number in range(20):
        store.put(f"manifests/{number:03d}", b"")
        store.put(f"attempts/{number:03d}", b"")
    proxy.requests.clear()
    [newest] = store.list_keys("manifests/", limit=1)
    assert newest.key == "manifests/000"
    assert len(proxy.requests) == 1
    proxy.requests.clear()
    store.delete(f"manifests/{number:03d}" for number in range(20))
    assert len(proxy.requests) == 1


def lose_one_reply_to_a_put(key: str) -> tuple[dict[str, int], Fault]:
    state = {"left": 1}

    def fault(method: str, path: str) -> int | str | None:
        if method == "PUT" and key in path and state["left"]:
            state["left"] -= 1
            return "lose-reply"
        return None

    return state, fault


@ENGINES
def test_a_commit_whose_reply_is_lost_is_still_ours(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    store = through(proxy, s3_server, scheme, bucket)
    state, fault = lose_one_reply_to_a_put("manifest")
    proxy.fault = fault
    assert commit_put(store, "manifest", b"by one", b"one") is True
    assert state["left"] == 0
    assert commit_put(store, "manifest", b"by two", b"two") is False
    assert commit_put(store, "manifest", b"by one", b"one") is True
    assert store.get("manifest") == b"by one"


@ENGINES
def test_a_commit_refused_by_a_hiccup_is_tried_again(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    store = through(proxy, s3_server, scheme, bucket)
    assert store.probe_conditional()
    left = {"n": 5}  # more than the client's own retries

    def fault(method: str, path: str) -> int | str | None:
        if method == "PUT" and left["n"]:
            left["n"] -= 1
            return 503
        return None

    proxy.fault = fault
    assert commit_put(store, "manifest", b"by one", b"one") is True


@ENGINES
def test_a_conflict_without_an_object_is_not_a_loss(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    """Amazon answers 409 when two conditional puts meet; then possibly neither has stored anything."""
    store = through(proxy, s3_server, scheme, bucket)
    assert store.probe_conditional()
    left = {"n": 1}

    def fault(method: str, path: str) -> int | str | None:
        if method == "PUT" and left["n"]:
            left["n"] -= 1
            return 409
        return None

    proxy.fault = fault
    assert commit_put(store, "manifest", b"by one", b"one") is True


@ENGINES
def test_a_commit_that_cannot_be_decided_says_so(
    s3_server: Ministack, proxy: FaultProxy, bucket: str, scheme: str
) -> None:
    store = through(proxy, s3_server, scheme, bucket)
    assert store.probe_conditional()
    proxy.fault = lambda _method, _path: 503
    with pytest.raises(UnavailableError):
        commit_put(store, "manifest", b"by one", b"one", tries=2)
    proxy.fault = lambda _method, _path: None
    with pytest.raises(NotFoundError):
        store.head("manifest")


@ENGINES
def test_a_killed_server_is_back_with_everything_acknowledged(tmp_path: Path, scheme: str) -> None:
    server = Ministack(tmp_path / "server")
    server.start()
    try:
        store = open_store(f"{scheme}://{server.make_bucket()}/run", server.options | FAST)
        for number in range(10):
            store.put(f"k{number}", bytes([number]) * 1000)
        server.kill()
        with pytest.raises(CkptError) as caught:
            store.get("k0")
        assert isinstance(caught.value, UnavailableError)
        server.restart()
        assert [store.get(f"k{number}") for number in range(10)] == [
            bytes([number]) * 1000 for number in range(10)
        ]
        with pytest.raises(ConflictError):
            store.put_new("k3", b"")
        store.close()
    finally:
        server.kill()


@ENGINES
def test_a_forked_child_gets_an_error_and_does_not_hang(
    s3_server: Ministack, bucket: str, scheme: str
) -> None:
    """Case I93."""
    program = f"""
import os
from ckpt.errors import InvalidInputError
from ckpt.storage.open import open_store
store = open_store("{scheme}://{bucket}/run", {s3_server.options!r})
store.put("k", b"v")
child = os.fork()
if child == 0:
    try:
        store.get("k")
    except InvalidInputError as error:
        os._exit(0 if error.code == "forked" else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
assert store.get("k") == b"v"
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{root}:{root / 'proto'}"},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@ENGINES
def test_the_environment_that_aws_clients_read_is_enough(
    s3_server: Ministack, bucket: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"{scheme}://{bucket}/run")
    store.put("k", b"v")
    assert store.get("k") == b"v"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    assert open_store(f"{scheme}://{bucket}/run").get("k") == b"v"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-keys")
    assert open_store(f"{scheme}://{bucket}/run", s3_server.options).get("k") == b"v"


@ENGINES
def test_keys_are_read_from_the_credentials_file(
    s3_server: Ministack, bucket: str, scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Case I94."""
    file = tmp_path / "credentials"
    file.write_text("[lab]\naws_access_key_id = test\naws_secret_access_key = test\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    (tmp_path / "config").write_text(f"[profile lab]\nendpoint_url = {s3_server.endpoint}\n")
    store = open_store(f"{scheme}://{bucket}/run")
    store.put("k", b"v")
    assert store.get("k") == b"v"
    store.close()
