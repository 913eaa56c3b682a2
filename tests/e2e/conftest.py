"""Fixtures that several end-to-end files share; one that a file defines itself goes before these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.runs import Place, stop_server
from tests.support.server import Server


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all of a file: its server runs from the first test to the last."""
    path = tmp_path_factory.mktemp("node") / "staging"
    yield path
    stop_server(path)


@pytest.fixture
def place(tmp_path: Path, staging: Path) -> Place:
    return Place(f"file://{tmp_path}/store/run", staging)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "staging") as running:
        yield running


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store/run"
