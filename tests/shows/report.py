"""What a show prints: a table, the promises that were checked, PASS or FAIL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Report"]


@dataclass(slots=True)
class Report:
    """One show's result.

    Attributes:
        title: what is shown.
        head: of the table.
        rows: of the table.
        promises: (it holds, what it says).
    """

    title: str
    head: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    promises: list[tuple[bool, str]] = field(default_factory=list)

    def row(self, *cells: object) -> None:
        """Add a row; numbers get separators."""
        self.rows.append(tuple(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells))

    def check(self, holds: bool, promise: str) -> None:
        """Note whether a promise holds."""
        self.promises.append((bool(holds), promise))

    @property
    def passed(self) -> bool:
        """Every promise holds, and there is one."""
        return bool(self.promises) and all(holds for holds, _ in self.promises)

    def __str__(self) -> str:
        table = [tuple(self.head), *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.head))]
        lines = [f"=== {self.title}"]
        for first, *rest in table:
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        lines += [f"{'ok' if holds else 'NOT'}: {promise}" for holds, promise in self.promises]
        lines.append(f"{'PASS' if self.passed else 'FAIL'}: {self.title}")
        return "\n".join(lines)
