"""Rows of a benchmark: a table for people, JSON for programs."""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["RESULTS", "Report", "Row"]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity.

    Attributes:
        what: name of the row.
        seconds: every repeat.
        ratio_to: what the ratio compares with, or empty.
        ratio: median over the median of what it compares with.
        note: durability, sizes, conditions.
    """

    what: str
    seconds: list[float]
    ratio_to: str = ""
    ratio: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(slots=True)
class Report:
    """All rows of one benchmark."""

    name: str
    conditions: str
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, seconds: list[float], *, over: Row | None = None, note: str = "") -> Row:
        """Append a row; its ratio is to the median of ``over``."""
        median = statistics.median(seconds)
        ratio = median / over.median if over is not None and over.median else None
        row = Row(what, seconds, over.what if over else "", ratio, note)
        self.rows.append(row)
        return row

    def publish(self) -> None:
        """Print the table and write ``results/<name>.json``."""
        table = Table(title=f"{self.name}: {self.conditions}", title_justify="left")
        for column in ("what", "min", "median", "max", "ratio", "of", "note"):
            is_number = column in ("min", "median", "max", "ratio")
            table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            times = (min(row.seconds), row.median, max(row.seconds))
            table.add_row(row.what, *(_time(s) for s in times), ratio, row.ratio_to, row.note)
        Console(width=max(Console().width, 180)).print(table)
        RESULTS.mkdir(exist_ok=True)
        rows = [asdict(row) for row in self.rows]
        body = {"conditions": self.conditions, "machine": platform.platform(), "rows": rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(body, indent=1) + "\n")


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
