"""Every show passes: python -m tests.shows prints their tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shows import recovery, speed
from tests.shows.report import Report
from tests.support.s3 import Ministack


@pytest.mark.slow
@pytest.mark.parametrize(
    "show",
    [recovery.killed_in_mid_save, recovery.node_lost, recovery.gpu_lost, recovery.both_copies_lost],
    ids=lambda show: show.__name__,
)
def test_show(tmp_path: Path, show: Callable[[Path], Report]) -> None:
    report = show(tmp_path)
    print(report)
    assert report.passed, str(report)


@pytest.mark.slow
def test_local_against_throttled_store(tmp_path: Path, s3_server: Ministack) -> None:
    report = speed.local_against_throttled_store(tmp_path, s3_server)
    print(report)
    assert report.passed, str(report)
