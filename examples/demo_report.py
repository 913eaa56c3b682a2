"""The demo's losses: read, compared step by step, drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Losses", "compare", "draw", "read_losses", "relative"]

Losses = dict[int, float]  # step -> loss
FLOOR = 1e-9  # equal losses are drawn here on the logarithmic axis


def read_losses(path: Path) -> Losses:
    """Read a loss file of train.py; a torn last line (its writer may be running) is left out."""
    if not path.exists():
        return {}
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    return {line["step"]: line["loss"] for line in map(json.loads, complete.splitlines())}


def relative(loss: float, reference: float) -> float:
    """Return the difference relative to ``reference``; infinite for NaN, which max() would skip."""
    gap = abs(loss - reference) / abs(reference)
    return math.inf if math.isnan(gap) else gap


def compare(reference: Losses, lineage: Sequence[tuple[str, Losses]], every: int) -> float:
    """Print both runs side by side and return the largest relative difference of any step of any phase.

    Args:
        lineage: phases in order; a later one that trains a step again replaces the earlier one in the table.
        every: rows to print: each ``every``-th step, and the first and last of each phase.
    """
    rows: dict[int, tuple[str, float]] = {}
    worst, shown = 0.0, set(range(0, len(reference), every))
    for title, losses in lineage:
        rows |= {step: (title, loss) for step, loss in losses.items()}
        worst = max([worst, *(relative(loss, reference[step]) for step, loss in losses.items())])
    last_title = None
    for step, (title, _) in sorted(rows.items()):
        if title != last_title:
            shown |= {step, step - 1}
        last_title = title
    print(f"\n{'step':>6}  {'uninterrupted':>14}  {'interrupted':>14}  {'difference':>10}  trained on")
    for step in sorted(shown & rows.keys() | {max(rows)}):
        title, loss = rows[step]
        gap = relative(loss, reference[step])
        print(f"{step:>6}  {reference[step]:>14.8f}  {loss:>14.8f}  {gap:>10.1e}  {title}")
    print()
    return worst


def draw(
    path: Path, reference: Losses, lineage: Sequence[tuple[str, Losses]], marks: Mapping[int, str]
) -> None:
    """Draw the losses above and their relative differences below as a PNG at ``path``.

    Args:
        marks: step -> text of a vertical line.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained"
    )
    above.plot(
        list(reference), list(reference.values()), color="0.75", linewidth=6, label="uninterrupted run"
    )
    for title, losses in lineage:
        steps = list(losses)
        above.plot(steps, list(losses.values()), label=title)
        below.plot(steps, [max(relative(losses[s], reference[s]), FLOOR) for s in steps], ".-")
    for step, text in marks.items():
        above.axvline(step, color="0.4", linestyle=":")
        above.text(step, above.get_ylim()[1], f" {text}", va="top", fontsize=8)
    below.axhline(1e-5, color="0.4", linestyle=":")
    below.set(yscale="log", xlabel="step", ylabel="relative difference", ylim=(FLOOR / 2, 1e-4))
    above.set(ylabel="loss", title="A run killed in the middle of a save, resumed on two other topologies")
    above.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
