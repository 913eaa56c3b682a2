"""``ckpt goodput``: where the time of a run went, from its first start to now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.cli.options import OutputOptions, StoreOptions, UrlArgument

if TYPE_CHECKING:
    from ckpt.plan.goodput import Ledger, LedgerRow

__all__ = ["goodput_command"]


def goodput_command(
    url: UrlArgument,
    *,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Show where every second of a run went, start by start.

    PRODUCTIVE: steps that count. DATA: waiting for it. SAVE: held up by saves. LOST: steps that were made
    again, or never counted. RESTART: from a failure to the first step after it ("ckpt recovery" has its
    phases). DOWN: nobody knew of the run. The classes add up to the whole. Read from the store, and from
    this node's staging directory.
    """
    from contextlib import closing

    from ckpt.cli.render import print_json
    from ckpt.errors import NotFoundError
    from ckpt.format.keys import run_key
    from ckpt.ops.ledger import load_ledger
    from ckpt.storage.open import open_store
    from ckpt.storage.staging import StagingDir, default_staging_path
    from ckpt.urls import absolute_url

    url = absolute_url(url)
    staging = StagingDir(store.staging or default_staging_path())
    with closing(open_store(url, store.as_mapping())) as opened:
        found = load_ledger(opened, staging, run_key(url))
    if not found.rows:
        raise NotFoundError("nothing is known of the time of this run", code="no-ledger", url=url)
    if output.json:
        print_json(_document(url, found))
    else:
        _print(url, found)


def _document(url: str, found: Ledger) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "url": url,
        "wall_s": found.wall_s,
        "effective_ratio": found.effective_ratio,
        "seconds": dict(found.seconds),
        "starts": [asdict(row) for row in found.rows],
    }


def _print(url: str, found: Ledger) -> None:
    from ckpt.cli.render import counted, human_time, print_line, print_pairs

    first, last = found.rows[0], found.rows[-1]
    print_pairs(
        [
            ("run", url),
            ("from", human_time(first.began_at)),
            ("to", human_time(last.ended_at) + (" (it runs)" if last.is_running else "")),
            ("all", f"{found.wall_s:.1f} s in {counted(len(found.rows), 'start')}"),
            ("effective training time", f"{100 * found.effective_ratio:.1f} %"),
        ]
    )
    print_line()
    _print_rows(found)


def _print_rows(found: Ledger) -> None:
    from ckpt.cli.render import Column, print_table
    from ckpt.plan.goodput import CLASSES

    # What is always 0 in this run needs no column.
    classes = [name for name in CLASSES if name != "unknown" or found.seconds[name]]
    whole = found.wall_s or 1.0
    print_table(
        [
            Column("ATTEMPT", right=True),
            Column("AFTER"),
            Column("FROM STEP", right=True),
            Column("STEPS", right=True),
            Column("AGAIN", right=True),
            *[Column(name.upper(), right=True) for name in classes],
        ],
        [
            *[_cells(row, classes) for row in found.rows],
            ("sum", "", "", "", "", *[f"{found.seconds[name]:.1f} s" for name in classes]),
            ("share", "", "", "", "", *[f"{100 * found.seconds[name] / whole:.1f} %" for name in classes]),
        ],
    )


def _cells(row: LedgerRow, classes: list[str]) -> tuple[str, ...]:
    return (
        str(row.attempt),
        row.cause,
        str(row.from_step),
        "?" if row.steps is None else str(row.steps),
        str(row.lost_steps),
        *[f"{row.seconds[name]:.1f} s" for name in classes],
    )
