"""Servers shared by the whole test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import reliability
from tests.support.cases import case_ids
from tests.support.ceph import Radosgw, UnavailableHere, install
from tests.support.s3 import Ministack, Rclone

_NO_RADOSGW = "radosgw: "


def pytest_addoption(parser: pytest.Parser) -> None:
    reliability.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", reliability.MARK)


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[int], None]:
    """Tell how often the fault of this test (``pytest.mark.fault``) was put in."""
    return lambda times: reliability.set_times(request.node, times)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    """A functional S3 server; take a bucket of your own with ``make_bucket()``. Do not kill this one."""
    server = Ministack(tmp_path_factory.mktemp("ministack"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """An S3 server that ignores conditional puts."""
    server = Rclone(tmp_path_factory.mktemp("rclone"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def radosgw() -> Iterator[Radosgw]:
    """A real S3 server. Where it cannot be had the test is skipped and the summary says why."""
    try:
        gateway = Radosgw(install()).start()
    except UnavailableHere as error:
        pytest.skip(f"{_NO_RADOSGW}{error}")
    yield gateway
    gateway.stop()


def pytest_itemcollected(item: pytest.Item) -> None:
    """``pytest -k I57`` takes the tests whose docstrings name the case, too. Their faults are declared."""
    reliability.declare(item)
    item.extra_keyword_matches.update(case_ids("", getattr(getattr(item, "obj", None), "__doc__", None)))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    del exitstatus
    if path := config.getoption("--reliability-report"):
        states = ("passed", "failed", "error", "skipped")
        reports = [report for state in states for report in terminalreporter.stats.get(state, [])]
        reliability.write_report(Path(path), reliability.results(reports))
    # From the reports, which also come from other processes where several run tests.
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = (
            report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
        )
        _, found, why = reason.partition(_NO_RADOSGW)
        if found:
            terminalreporter.write_line(f"radosgw cannot be had here, its tests were skipped: {why}")
            return
