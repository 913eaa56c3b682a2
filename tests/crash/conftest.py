"""Fixtures of the flusher's tests; one that a file defines itself goes before these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.storage.staging import RunConfig, StagingDir
from tests.support.flushing import Watched, stop
from tests.support.snapshots import RUN_URL

RUN_KEY = keys.run_key(RUN_URL)


@pytest.fixture
def staging(tmp_path: Path) -> StagingDir:
    place = StagingDir(tmp_path / "staging").ensure()
    place.write_run_config(RUN_KEY, RunConfig(url=RUN_URL))
    return place


@pytest.fixture
def watched(staging: StagingDir) -> Iterator[Watched]:
    item = Watched(staging, RUN_KEY)
    yield item
    item.process.close(wait=False)
    stop(item.process.pid)
