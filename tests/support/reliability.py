"""The table of docs/reliability.md: which faults the tests put in, how often, and what came of it.

A test declares its fault before it begins, so that a failure is in the table as well::

    @pytest.mark.fault("Disk", "{errno} from {call}", "strace -e inject", "the save fails and names the file")

Names in braces are the test's parameters. A test may have several marks; the fixture ``tried`` tells that it
put its fault in more than once. The declarations travel in the reports of the tests, so it makes no
difference how many processes run them.

``pytest ... --reliability-report docs/reliability.md`` replaces the marked region of that file. Where a run
is done in parts, give each ``--reliability-report PART.json``, then
``python -m tests.support.reliability docs/reliability.md PART.json ...``.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pytest

__all__ = ["AREAS", "MARK", "Row", "add_option", "declare", "results", "set_times", "write_report"]

MARK = "fault(area, fault, how, outcome, times=1): a row of docs/reliability.md"

AREAS = (
    "Death of a process",
    "Power cut",
    "Disk",
    "Store",
    "Races",
    "Damage",
    "Nodes and network",
    "Hangs and stops",
    "Hostile clients",
)
"""Headings of the table, in order."""

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"

_PROPERTY = "reliability"
_OPTION = "--reliability-report"


class Row(TypedDict):
    """What one test says of one fault.

    Attributes:
        test: its name, without parameters.
        state: "passed", "failed" or "skipped".
        why: of one that was skipped.
    """

    area: str
    fault: str
    how: str
    outcome: str
    times: int
    test: str
    state: str
    why: str


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, metavar="FILE", help="of the faults: the table in FILE.md, or FILE.json")


def declare(item: pytest.Item) -> None:
    """Note the marks of a collected test in what its reports carry."""
    call = getattr(item, "callspec", None)
    names = {name: _text(value, call.id) for name, value in call.params.items()} if call else {}
    for mark in item.iter_markers("fault"):
        area, fault, how, outcome = (text.format(**names) for text in mark.args)
        assert area in AREAS, f"{item.nodeid}: {area}"
        item.user_properties.append((_PROPERTY, [area, fault, how, outcome, mark.kwargs.get("times", 1)]))


def _text(value: object, name: str) -> object:
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else name


def set_times(item: pytest.Item, times: int) -> None:
    """Note how often the test put its fault in."""
    assert times > 0, "a fault that was never put in proves nothing"
    for name, value in item.user_properties:
        if name == _PROPERTY:
            value[4] = times  # type: ignore[index]


def results(reports: Iterable[pytest.TestReport]) -> list[Row]:
    """Return the rows behind ``reports`` (of any phase): the worst of a test's phases is its state."""
    found: dict[tuple[str, int], Row] = {}
    rank = ["passed", "skipped", "failed"]
    for report in reports:
        said = [value for name, value in report.user_properties if name == _PROPERTY]
        for number, (area, fault, how, outcome, times) in enumerate(said):  # type: ignore[misc]
            row = found.setdefault(
                (report.nodeid, number),
                Row(
                    area=area,
                    fault=fault,
                    how=how,
                    outcome=outcome,
                    times=times,
                    test=report.nodeid.split("[")[0],
                    state="passed",
                    why="",
                ),
            )
            row["times"] = max(row["times"], times)
            row["state"] = max(row["state"], report.outcome, key=rank.index)
            if report.skipped and isinstance(report.longrepr, tuple):
                row["why"] = report.longrepr[2].removeprefix("Skipped: ")
    return list(found.values())


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` as JSON, or as the table in the marked region of a document that exists."""
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
        return
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise pytest.UsageError(f"{path} has no region between {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{_table(rows)}\n{END}{after}")


def _table(rows: Sequence[Row]) -> str:
    tests = {row["test"] for row in rows}
    tried = sum(row["times"] for row in rows if row["state"] != "skipped")
    failed = sum(row["state"] == "failed" for row in rows)
    verdict = f"**{failed} FAILED**" if failed else "none failed"
    where = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [f"Run on {day} ({where}): {tried} faults put in by {len(tests)} tests, {verdict}.\n"]
    for area in AREAS:
        merged: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            if row["area"] == area:
                merged.setdefault((row["fault"], row["how"], row["outcome"]), []).append(row)
        if merged:
            lines.append(f"### {area}\n")
            lines.append("| Fault | Put in how | Times | Outcome | Test |\n|---|---|---:|---|---|")
            lines.extend(_line(*key, merged[key]) for key in sorted(merged))
            lines.append("")
    return "\n".join(lines)


def _line(fault: str, how: str, outcome: str, rows: Sequence[Row]) -> str:
    failed = sum(row["state"] == "failed" for row in rows)
    ran = [row for row in rows if row["state"] != "skipped"]
    if failed:
        outcome = f"**{failed} OF {len(ran)} TESTS FAILED**; wanted: {outcome}"
    elif not ran:
        outcome = f"not run: {rows[0]['why'] or 'skipped'}"
    tests = ", ".join(sorted({f"`{row['test'].removeprefix('tests/')}`" for row in rows}))
    return f"| {fault} | {how} | {sum(row['times'] for row in ran)} | {outcome} | {tests} |"


def main(arguments: Sequence[str]) -> None:
    """Write FILE.md from the rows of several runs."""
    rows: list[Any] = [row for part in arguments[1:] for row in json.loads(Path(part).read_text())]
    write_report(Path(arguments[0]), rows)


if __name__ == "__main__":
    main(sys.argv[1:])
