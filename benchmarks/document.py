"""``python -m benchmarks.document``: write the measured tables into docs/performance.md.

Figures in that document come from the JSON files in the results folder and are never typed by hand. The part
between the two marks is replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.report import RESULTS, Report, amount

__all__ = ["BEGIN", "DOCUMENT", "END", "insert", "main", "render"]

DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN = "<!-- results: begin; written by python -m benchmarks.document -->"
END = "<!-- results: end -->"
_ORDER = (
    "stall",
    "cost",
    "persist",
    "upload",
    "restore",
    "reshard",
    "replicas",
    "memory",
    "checksums",
    "codec",
    "links",
)


def render(bodies: Iterable[dict[str, object]]) -> str:
    """Return one Markdown section per report."""
    return "\n".join(_section(body) for body in sorted(bodies, key=_place))


def _place(body: dict[str, object]) -> tuple[int, str]:
    name = str(body["name"])
    first = name.partition("-")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER)), name


def _section(body: dict[str, object]) -> str:
    report = Report.from_json(body)
    lines = [
        f"### {report.name}",
        "",
        f"{report.conditions}. Measured {body['measured_at']}.",
        "",
        "| what | durable as | min | median | n | CPU | ratio | to | asked | others |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in report.rows:
        if row.absent:
            lines.append(f"| {row.what} | | {_escaped(row.absent)} | | | | | | | |")
            continue
        met = {True: " met", False: " **not met**", None: ""}[row.meets_bar()]
        cells = (
            row.what,
            row.durability,
            amount(min(row.values), row.unit),
            amount(row.median, row.unit),
            str(len(row.values)),
            amount(sorted(row.cpu_s)[len(row.cpu_s) // 2], "s") if row.cpu_s else "",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.over} / this" if row.inverse else row.over,
            f"{_escaped(row.bar)}{met}" if row.bar else "",
            "" if row.foreign is None else f"{row.foreign:.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
        if row.note:
            notes.append(f"{row.what}: {row.note}")
    if notes:
        lines += ["", "Notes. " + ". ".join(notes) + "."]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def insert(document: str, results: str) -> str:
    """Return ``document`` with everything between its two marks replaced.

    Raises:
        ValueError: the marks are not there, once each, in order.
    """
    head, mark, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the document has no lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{results}\n{END}{tail}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.document", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args(argv)
    bodies = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    options.document.write_text(insert(options.document.read_text(), render(bodies)))


if __name__ == "__main__":
    main()
