"""The table of docs/reliability.md, written by the tests that put the faults in.

A test calls ``record_fault(fault, how, outcome)`` when what it says has been checked. With
``--reliability-report PATH`` the run writes the table at its end; the records travel in the reports of the
tests, so that it makes no difference how many processes run them. A record of a test that failed counts as
a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

__all__ = ["AREAS", "Recorder", "add_option", "recorder", "write_report"]

Recorder = Callable[..., None]

AREAS = (
    "Death of a process",
    "Power cut",
    "Store",
    "Disk",
    "Damage",
    "Races",
)
"""Headings of the table, in order."""

_PROPERTY = "reliability"
_OPTION = "--reliability-report"

_HEAD = """# Reliability

Written by the test run itself (`pytest tests --reliability-report docs/reliability.md`), not by hand. Each
row is a fault, how the tests put it in, how often it was put in during that run, and what had to hold
afterwards: a row is in the table only because every one of its tests asserted its outcome. "Whole" means:
every listed checkpoint passed `verify --deep`, and what was read was equal bit by bit.
"""


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, metavar="PATH", help="write the table of faults that the tests recorded")


def recorder(request: pytest.FixtureRequest) -> Recorder:
    """Return the function of the fixture ``record_fault``."""
    name = request.node.nodeid.split("[")[0]

    def record(area: str, fault: str, how: str, outcome: str, *, times: int = 1) -> None:
        """Note that ``fault`` was put in ``times`` times and that ``outcome`` was seen each time.

        Args:
            area: one of :data:`AREAS`.
            fault: what happened.
            how: with what it was brought about.
            outcome: what was asserted afterwards.
            times: how often.
        """
        assert area in AREAS, area
        assert times > 0, "a fault that was never put in proves nothing"
        request.node.user_properties.append((_PROPERTY, [area, fault, how, outcome, times, name]))

    return record


def write_report(path: Path, reports: Iterable[pytest.TestReport]) -> None:
    """Write the table of what the tests behind ``reports`` recorded."""
    rows: dict[tuple[str, str, str, str], list[tuple[int, str, bool]]] = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "call":
                area, fault, how, outcome, times, test = value  # type: ignore[misc]
                rows.setdefault((area, fault, how, outcome), []).append((times, test, report.passed))
    lines = [_HEAD]
    for area in AREAS:
        mine = sorted(key for key in rows if key[0] == area)
        if mine:
            lines.append(f"## {area}\n")
            lines.append("| Fault | Injected how | Times | Outcome | Test |\n|---|---|---:|---|---|")
            lines.extend(_row(key, rows[key]) for key in mine)
            lines.append("")
    tried = sum(times for found in rows.values() for times, _, _ in found)
    lines.append(f"{tried} faults in all.\n")
    path.write_text("\n".join(lines))


def _row(key: tuple[str, str, str, str], found: list[tuple[int, str, bool]]) -> str:
    _, fault, how, outcome = key
    failed = sum(not passed for _, _, passed in found)
    said = f"**{failed} of {len(found)} tests failed**" if failed else outcome
    tests = ", ".join(sorted({f"`{test.removeprefix('tests/')}`" for _, test, _ in found}))
    return f"| {fault} | {how} | {sum(times for times, _, _ in found)} | {said} | {tests} |"
