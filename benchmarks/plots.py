"""One picture per report: the rows as bars, every repeat as a dot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the report draws itself
    from benchmarks.report import Report

__all__ = ["draw"]

_OURS, _LIMIT, _PEER = "#1b6ca8", "#9aa5b1", "#d98c3f"


def draw(report: Report, path: Path) -> None:
    """Write a horizontal bar chart of the report as PNG; one panel per unit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    units = sorted({row.unit for row in report.rows if row.values})
    if not units:
        return
    panels = [[row for row in report.rows if row.values and row.unit == unit] for unit in units]
    heights = [len(rows) for rows in panels]
    figure, axes = pyplot.subplots(
        len(units),
        1,
        figsize=(11, 1.4 + 0.32 * sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axis, unit, rows in zip(axes[:, 0], units, panels, strict=True):
        for place, row in enumerate(rows):
            axis.barh(place, row.median, color=_color(row.what, bool(row.over)), height=0.7)
            axis.plot(row.values, [place] * len(row.values), "k.", markersize=3, alpha=0.6)
            label = f"  {row.median:.3g}" + (f"  ({row.ratio:.2f} x)" if row.ratio is not None else "")
            axis.text(max([row.median, *row.values]), place, label, va="center", fontsize=8)
        axis.set_yticks(range(len(rows)), [row.what for row in rows], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_xlabel({"s": "seconds"}.get(unit, unit), fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{report.name}: {report.conditions}", fontsize=9, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _color(what: str, has_ratio: bool) -> str:
    if "ckpt" in what:
        return _OURS
    return _PEER if has_ratio else _LIMIT
