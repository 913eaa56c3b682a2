"""Option groups, exit codes, and what the command line loads."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ckpt.cli.backend import open_backend, read_token
from ckpt.cli.main import app
from ckpt.cli.options import OutputOptions, ServerOptions, StoreOptions, command, exit_code
from ckpt.errors import (
    BusyError,
    CkptError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    SnapshotTornError,
    TimeoutExceededError,
    UnavailableError,
)
from ckpt.urls import absolute_url


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CkptError, 1),
        (UnavailableError, 1),
        (TimeoutExceededError, 1),
        (ConflictError, 1),
        (BusyError, 1),
        (SnapshotTornError, 1),
        (InvalidInputError, 2),
        (NotFoundError, 3),
        (CorruptError, 4),
        (RefusedError, 5),
    ],
)
def test_every_error_has_its_exit_code(error: type[CkptError], code: int) -> None:
    assert exit_code(error("x")) == code


def test_a_group_becomes_options_and_errors_become_exits(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, StoreOptions]] = []

    def inspect_run(url: str, *, store: StoreOptions, output: OutputOptions) -> None:
        seen.append((url, store))
        raise RefusedError("it would lose data", url=url)

    expanded = command(inspect_run)

    assert list(inspect.signature(expanded).parameters) == [
        "url", "endpoint_url", "option", "staging", "json", "debug",
    ]  # fmt: skip
    with pytest.raises(typer.Exit) as caught:
        expanded(url="u", endpoint_url=None, option=["region=x=y"], staging=None, json=False, debug=False)
    assert caught.value.exit_code == 5
    assert seen[0][0] == "u"
    assert seen[0][1].as_mapping() == {"region": "x=y"}
    assert capsys.readouterr().err == "error: it would lose data\n  url: u\n"


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*, output: OutputOptions) -> None:
        raise CorruptError("damaged", code="digest")

    with pytest.raises(typer.Exit):
        command(fail)(json=False, debug=True)

    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "in fail" in text


def test_a_bug_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*, output: OutputOptions) -> None:
        raise ZeroDivisionError("division by zero")

    with pytest.raises(typer.Exit) as caught:
        command(fail)(json=False, debug=False)

    text = capsys.readouterr().err
    assert caught.value.exit_code == 1
    assert "Traceback" not in text
    assert "ZeroDivisionError('division by zero')" in text
    assert "--debug" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["list", "run", "--limit", "-1"],
        ["list", "s3://bucket-without-run"],
        ["list", "run", "--option", "novalue"],
        ["list", "run", "--option", "endpoint=1", "--server", "unix:/nowhere"],
        ["runs"],
        ["show", "run", "not-a-checkpoint"],
        ["prune", "run"],
        ["prune", "run", "--keep-every", "2"],
        ["prune", "run", "--keep-last", "1", "--keep-every", "-1"],
        ["prune", "run", "10", "--keep-last", "1"],
        ["verify", "run", "10", "--all"],
        ["pin", "run"],
    ],
)
def test_a_wrong_command_line_exits_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPT_SERVER", raising=False)

    found = CliRunner().invoke(app, arguments)

    assert found.exit_code == 2
    assert found.output


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        StoreOptions(option=["region"]).as_mapping()
    with pytest.raises(InvalidInputError):
        open_backend(ServerOptions(server="unix:/x"), StoreOptions(endpoint_url="http://x"))
    with pytest.raises(InvalidInputError):
        read_token(tmp_path / "none")
    with pytest.raises(InvalidInputError):
        absolute_url("")


def test_a_path_is_named_as_the_trainer_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert absolute_url("run/") == f"file://{tmp_path}/run"
    assert absolute_url(f"{tmp_path}/run") == f"file://{tmp_path}/run"
    assert absolute_url("s3://bucket/run/") == "s3://bucket/run"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import ckpt.cli.main", {"google", "grpc", "numpy", "obstore", "fsspec", "ckpt_server", "ckpt.ops"}),
        ("import ckpt.cli.direct", {"grpc", "numpy", "obstore", "fsspec", "ckpt_server", "ckpt.client"}),
        ("import ckpt.cli.remote", {"torch", "obstore", "fsspec", "ckpt_server", "ckpt.ops"}),
    ],
)
def test_a_command_loads_only_what_it_needs(code: str, absent: set[str]) -> None:
    script = f"{code}; import sys; print(*(n for n in {sorted(absent)} if n in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert found.stdout.split() == []
