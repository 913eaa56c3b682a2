"""Rows of a benchmark: a table for people, JSON for programs, a plot."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.plots import draw

__all__ = ["RESULTS", "Report", "Row"]

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True, kw_only=True)
class Row:
    """One measured quantity.

    Attributes:
        what: name of the row, unique in its report.
        values: every repeat, in ``unit``. Rows of one report that belong together have them round by round.
        unit: "s", "MiB", "bytes" or "" for a plain number.
        over: name of the row that the ratio compares with, or empty.
        inverse: the ratio is ``over`` / this row, the share of a limit that was reached.
        ratio: median over the rounds of value / value of ``over``; or of the medians where the rows were not
            measured in rounds together.
        bar: what the ratio is asked to be, such as "<= 1.05"; or empty.
        durability: what is durable when the time ends: none, fsync file, fsync file+dir, sealed, committed.
        cpu_s: CPU seconds of the row's processes in each repeat; or empty.
        foreign: largest share of the cores that others used in any repeat.
        note: conditions.
        absent: why there is nothing to show: not installed, or how it failed.
    """

    what: str
    values: list[float] = field(default_factory=list)
    unit: str = "s"
    over: str = ""
    inverse: bool = False
    ratio: float | None = None
    bar: str = ""
    durability: str = ""
    cpu_s: list[float] = field(default_factory=list)
    foreign: float | None = None
    note: str = ""
    absent: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def meets_bar(self) -> bool | None:
        """Return whether the ratio is as asked; None where nothing is asked or known."""
        if not self.bar or self.ratio is None:
            return None
        relation, bound = self.bar.split()
        return self.ratio <= float(bound) if relation == "<=" else self.ratio >= float(bound)


@dataclass(slots=True)
class Report:
    """All rows of one benchmark in one place.

    Attributes:
        name: of the benchmark, and of its files; with the place ("-tmpfs") where that is not the disk.
        conditions: sizes and settings that a reader has to know.
    """

    name: str
    conditions: str
    rows: list[Row] = field(default_factory=list)

    def add(
        self,
        what: str,
        values: Sequence[float],
        *,
        over: Row | None = None,
        inverse: bool = False,
        unit: str = "s",
        bar: str = "",
        durability: str = "",
        cpu_s: Sequence[float] = (),
        foreign: float | None = None,
        note: str = "",
    ) -> Row:
        """Append a row.

        Args:
            over: what the ratio compares with.
            inverse: the ratio is ``over`` / this row: the share of the limit that was reached.
        """
        row = Row(
            what=what,
            values=[float(value) for value in values],
            unit=unit,
            bar=bar,
            durability=durability,
            cpu_s=[float(value) for value in cpu_s],
            foreign=foreign,
            note=note,
            over="" if over is None else over.what,
            inverse=inverse,
        )
        self.rows.append(row)
        self._set_ratio(row)
        return row

    def _set_ratio(self, row: Row) -> None:
        base = next((each for each in self.rows if each.what == row.over and each.values), None)
        if base is not None and row.values:
            row.ratio = _ratio(row.values, base.values, inverse=row.inverse)

    def merge(self, earlier: Report) -> None:
        """Put the repeats of an earlier run, of the same conditions, before those of this one.

        A machine may be free for a minute at a time only; the rows of each run were interleaved.
        """
        if earlier.conditions != self.conditions:
            raise ValueError(f"{self.name} was measured under other conditions: {earlier.conditions}")
        before = {row.what: row for row in earlier.rows}
        for row in self.rows:
            old = before.pop(row.what, None)
            if old is not None and old.values:
                row.values = old.values + row.values
                row.cpu_s = old.cpu_s + row.cpu_s
                row.foreign = max(filter(None, (old.foreign, row.foreign)), default=None)
                row.over, row.inverse, row.unit = old.over, old.inverse, old.unit
                row.bar, row.durability, row.absent = old.bar, old.durability, ""
        self.rows += before.values()
        for row in self.rows:
            self._set_ratio(row)

    def absent(self, what: str, why: str) -> None:
        """Append a row for something that could not be measured, so that it is not silently missing."""
        self.rows.append(Row(what=what, absent=why))

    def publish(self, folder: Path = RESULTS) -> None:
        """Print the table; write ``folder/<name>.json`` and ``folder/<name>.png``."""
        Console(width=max(Console().width, 180)).print(self.table())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(json.dumps(self.to_json(), indent=1) + "\n")
        draw(self, folder / f"{self.name}.png")

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "conditions": self.conditions,
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
            "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": [asdict(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, body: dict[str, object]) -> Report:
        """Return what :meth:`to_json` wrote."""
        rows = [Row(**row) for row in body["rows"]]  # type: ignore[attr-defined]
        return cls(str(body["name"]), str(body["conditions"]), rows)

    def table(self) -> Table:
        table = Table(title=f"{self.name}: {self.conditions}", title_justify="left")
        for column in ("what", "durable as", "min", "median", "n", "CPU", "ratio", "to", "others", "note"):
            is_number = column in ("min", "median", "n", "CPU", "ratio", "others")
            table.add_column(
                column,
                justify="right" if is_number else "left",
                no_wrap=is_number,
                max_width={"what": 40, "durable as": 18, "to": 22}.get(column),
                min_width=40 if column == "note" else None,
            )
        for row in self.rows:
            table.add_row(*cells(row))
        return table


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, by column."""
    if row.absent:
        return (row.what, "", "", "", "", "", "", "", "", row.absent)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    met = {True: " PASS", False: " FAIL", None: ""}[row.meets_bar()]
    note = "; ".join(part for part in (f"asked {row.bar}{met}" if row.bar else "", row.note) if part)
    return (
        row.what,
        row.durability,
        amount(min(row.values), row.unit),
        amount(row.median, row.unit),
        str(len(row.values)),
        amount(statistics.median(row.cpu_s), "s") if row.cpu_s else "",
        ratio,
        f"{row.over} / this" if row.inverse else row.over,
        "" if row.foreign is None else f"{row.foreign:.0%}",
        note,
    )


def amount(value: float, unit: str) -> str:
    """Return a value with its unit, in three or four figures."""
    if unit == "s":
        return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.1f} ms"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}".rstrip()


def _ratio(values: list[float], base: list[float], *, inverse: bool) -> float | None:
    if not values or not base:
        return None
    top, bottom = (base, values) if inverse else (values, base)
    if len(top) != len(bottom):
        top, bottom = [statistics.median(top)], [statistics.median(bottom)]
    if not all(bottom):
        return None
    return statistics.median(a / b for a, b in zip(top, bottom, strict=True))
