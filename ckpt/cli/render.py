"""Tables for people, JSON for programs, progress on stderr.

Tables are laid out here and not by ``rich.table``: that takes seconds for 10,000 rows, and cuts ids
where a terminal is narrow. Here nothing is cut; one column may be folded, and only on a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

__all__ = [
    "Cell",
    "Column",
    "counted",
    "error_console",
    "human_bytes",
    "human_ranks",
    "human_seconds",
    "human_time",
    "print_json",
    "print_line",
    "print_pairs",
    "print_table",
    "progress_bar",
]

T = TypeVar("T")

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_GAP = "  "
_INDENT = "    "
_FOLDED_LEAST = 30  # columns; a folded column is not narrower
_BREAKS = ",./_-"


class Cell(NamedTuple):
    """Text with a rich style such as "green" or "bold red"."""

    text: str
    style: str


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; at most one of a table may ``fold``."""

    title: str
    right: bool = False
    fold: bool = False


@cache
def _output() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


@cache
def error_console() -> Console:
    """The console of stderr: errors, notes, progress, questions."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")


def _paint(text: str, style: str) -> str:
    if not style or _output().color_system is None:
        return text
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def print_line(text: str = "", style: str = "") -> None:
    """Print a line to stdout."""
    _write(_paint(text, style))


def print_json(document: object) -> None:
    """Print the one JSON document of a command to stdout; dataclasses become objects."""
    _write(json.dumps(document, default=_plain))  # no indent: rank lists would be a line per rank


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"not plain: {type(value)}")


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    """Print a table to stdout: no borders, ids whole, nothing cut.

    Where a terminal leaves the column that folds too little room, each row takes two lines: that cell,
    then the others below it.

    Args:
        columns: the head.
        rows: one cell per column each.
    """
    head = [Cell(column.title, "bold") for column in columns]
    cells = [head, *([cell if isinstance(cell, Cell) else Cell(cell, "") for cell in row] for row in rows)]
    widths = [max(_width(row[i].text) for row in cells) for i in range(len(columns))]
    folding = next((i for i, column in enumerate(columns) if column.fold), None)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - _output().width
    if folding is None or excess <= 0 or not _output().is_terminal:
        _print_rows(columns, widths, cells)
    elif widths[folding] - excess >= _FOLDED_LEAST:
        widths[folding] -= excess
        _print_rows(columns, widths, cells)
    else:
        _print_stacked(columns, widths, cells, folding)


def _print_rows(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Sequence[Cell]]) -> None:
    for row in cells:
        for line in _lines(columns, widths, row):
            _write(line)


def _print_stacked(
    columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Sequence[Cell]], first: int
) -> None:
    def rest(items: Sequence[T]) -> list[T]:
        return [*items[:first], *items[first + 1 :]]

    for row in cells:
        for piece in _fold(row[first].text, _output().width):
            _write(_paint(piece, row[first].style))
        for line in _lines(rest(columns), rest(widths), rest(row)):
            _write(_INDENT + line)


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _lines(columns: Sequence[Column], widths: Sequence[int], row: Sequence[Cell]) -> Iterator[str]:
    folded = [
        _fold(cell.text, width) if column.fold else [cell.text]
        for column, width, cell in zip(columns, widths, row, strict=True)
    ]
    for number in range(max(map(len, folded))):
        parts = []
        for column, width, cell, pieces in zip(columns, widths, row, folded, strict=True):
            text = pieces[number] if number < len(pieces) else ""
            pad = " " * (width - _width(text))
            painted = _paint(text, cell.style) if text else ""
            parts.append(pad + painted if column.right else painted + pad)
        yield _GAP.join(parts).rstrip()


def _fold(text: str, width: int) -> list[str]:
    """Cut ``text`` into pieces of at most ``width``, after a separator where there is one."""
    pieces = []
    while _width(text) > width:
        head = text[:width]
        while _width(head) > width:  # double-width characters
            head = head[:-1]
        spots = (head.rfind(" ") + 1, max(head.rfind(mark) for mark in _BREAKS) + 1)
        at = next((spot for spot in spots if spot > width // 3), len(head))
        pieces.append(text[:at].rstrip(" "))
        text = text[at:]
    return [*pieces, text]


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Print "name  value" lines, values aligned; long values fold on a terminal."""
    width = max(len(name) for name, _ in pairs)
    room = sys.maxsize
    if _output().is_terminal:
        room = max(_FOLDED_LEAST, _output().width - width - len(_GAP))
    for name, value in pairs:
        for number, piece in enumerate(_fold(value, room)):
            label = name.ljust(width) if number == 0 else " " * width
            _write(f"{_paint(label, 'bold')}{_GAP}{piece}")


def counted(number: int, noun: str) -> str:
    """Return e.g. "1 rank", "2,048 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human_bytes(nbytes: int) -> str:
    """Return e.g. "12 B", "1.50 MiB", "14.9 GiB": three digits, binary units."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value, index = nbytes / 1024, 0
    while value >= 999.5 and index < len(_UNITS) - 1:
        value, index = value / 1024, index + 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[index]}"


def human_time(seconds: float | None) -> str:
    """Return local time "2026-01-31 12:34:56", or "-"."""
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def human_seconds(seconds: float) -> str:
    """Return a duration such as "4 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def human_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ranges: "0-3,8"; many ranges as their number and the first ones."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] + 1 == rank:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    if len(texts) > 8:
        return f"{len(ranks)} ranks: {','.join(texts[:4])},..."
    return ",".join(texts) or "-"


@contextmanager
def progress_bar(title: str, *, in_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, where that is a terminal; yields ``update(done, total)``."""
    if not error_console().is_terminal:
        yield lambda done, total: None
        return
    # Here: most commands show no bar, and this is a third of rich.
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: list[ProgressColumn] = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    )
    columns = [TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn()]
    with Progress(*columns, console=error_console(), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
