"""Tokens files: what is accepted, what is not, and what a grant reaches."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from ckpt.errors import InvalidInputError
from ckpt_proto.v1 import catalog_pb2, peer_pb2, replica_pb2, restore_pb2, staging_pb2
from ckpt_server.access import METHODS
from ckpt_server.bulk_service import bulk_handlers
from ckpt_server.tokens import Scope, Tokens, parse_tokens
from tests.support.builders import FakeClock

SECRET = "a-token-of-good-length"
SHA = hashlib.sha256(SECRET.encode()).hexdigest()


def entry(**more: object) -> bytes:
    fields: dict[str, object] = {"name": "a", "sha256": SHA, "scopes": ["read"]} | more
    lines = [f"{key} = {value!r}" for key, value in fields.items() if value is not None]
    return "\n".join(["[[token]]", *lines, ""]).encode()


def test_scopes_include_one_another() -> None:
    for scope, count in ((Scope.READ, 1), (Scope.WRITE, 2), (Scope.ADMIN, 3), (Scope.PEER, 1)):
        (grant,) = parse_tokens(entry(scopes=[str(scope)]), is_private=False, where="x").values()
        assert len(grant.scopes) == count
        assert scope in grant.scopes


@pytest.mark.parametrize(
    ("url", "is_reached"),
    [
        ("s3://bucket/team-a/run", True),
        ("s3://bucket/team-a/run/", True),
        ("s3://bucket/team-a/run/deeper", False),
        ("s3://bucket/team-a", False),
        ("s3://bucket/team-b/run", False),
        ("s3://bucket/team-a/../team-b/run", False),
        ("s3://bucket/team-a/%2e%2e", False),
        ("s3://bucket/team-a//run", False),
        ("s3://bucket/team-a/run?x=1", False),
        ("s3://bucket/team-a/a\nb", False),
        ("fsspec+s3://bucket/team-a/run", False),
        ("S3://bucket/team-a/run", False),
        (None, False),
        ("", False),
    ],
)
def test_what_a_pattern_reaches(url: str | None, is_reached: bool) -> None:
    data = entry(runs=["s3://bucket/team-a/*"])
    (grant,) = parse_tokens(data, is_private=False, where="x").values()
    assert grant.is_good_for(url) is is_reached


def test_a_token_for_every_run_reaches_calls_about_all() -> None:
    (grant,) = parse_tokens(entry(), is_private=False, where="x").values()
    assert grant.is_good_for(None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"token = 3",
        b"[token]\nname = 'a'",
        entry(scopes=["root"]),
        entry(scopes=[]),
        entry(name="a b"),
        entry(name=None),
        entry(sha256="abc"),
        entry(sha256=None),
        entry(token=SECRET),  # both
        entry(sha256=None, token=SECRET),  # readable by others
        entry(runs=[]),
        entry(run=["s3://b/*"]),  # a typing error must not mean "every run"
        entry() + entry(name="b"),
        entry() + entry(sha256="0" * 64),
    ],
)
def test_malformed_files_are_refused_without_quoting_them(data: bytes) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_tokens(data, is_private=False, where="x")
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)


def test_a_short_token_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        parse_tokens(entry(sha256=None, token="short"), is_private=True, where="x")


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_bytes(entry())
    path.chmod(0o620)
    with pytest.raises(InvalidInputError):
        Tokens(None, path, FakeClock())


def test_the_file_is_read_again_and_a_bad_one_leaves_the_old_in_force(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_bytes(entry())
    clock = FakeClock()
    tokens = Tokens("the-one-token-of-all", path, clock)
    found = tokens.grant_of(SECRET)
    assert found is not None
    assert found.name == "a"
    assert tokens.grant_of("wrong") is None

    replace(path, b"[[token]]\nname=3")
    clock.time += 2
    assert tokens.grant_of(SECRET) is not None

    replace(path, entry(name="b", sha256=hashlib.sha256(b"another").hexdigest()))
    assert tokens.grant_of(SECRET) is not None  # not looked at again yet
    clock.time += 2
    assert tokens.grant_of(SECRET) is None
    assert tokens.grant_of("another") is not None
    assert tokens.grant_of("the-one-token-of-all") is not None


def replace(path: Path, data: bytes) -> None:
    fresh = path.with_name("fresh")
    fresh.write_bytes(data)
    fresh.chmod(0o600)
    fresh.replace(path)


def test_every_method_says_what_it_needs() -> None:
    """A method that is added and not in the table is refused to everybody over TCP; this says so earlier."""
    declared = {
        f"/{service.full_name}/{method.name}"
        for module in (staging_pb2, catalog_pb2, restore_pb2, peer_pb2, replica_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    raw = {f"/ckpt.v1.Bulk/{name}" for name in bulk_names()}
    reflection = {name for name in METHODS if name.startswith("/grpc.reflection")}
    assert declared | raw <= set(METHODS)
    assert set(METHODS) - declared - raw - reflection <= {"/ckpt.v1.Bulk/Replicate"}
    for name in raw:
        assert METHODS[name].message is not None
    assert all(METHODS[name].scopes for name in declared | raw)


def bulk_names() -> list[str]:
    """The raw methods as they are registered."""
    count = len(inspect.signature(bulk_handlers).parameters)
    # Stands for services that are not called: only the names under which they are registered matter.
    handler = bulk_handlers(*(MagicMock() for _ in range(count)))
    return [name.rpartition("/")[2] for name in handler._method_handlers]  # type: ignore[attr-defined]
