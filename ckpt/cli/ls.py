"""``ckpt list`` and ``ckpt runs``: what there is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.backend import open_backend
from ckpt.cli.options import OutputOptions, ServerOptions, StoreOptions, UrlArgument
from ckpt.errors import CkptError, CorruptError, InvalidInputError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.cli.records import CopiesRow, Details, Listing, Row
    from ckpt.cli.render import Cell, Column

__all__ = ["list_command", "runs_command"]


def list_command(
    url: UrlArgument,
    *,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Show the newest N.")] = 20,
    show_all: Annotated[bool, typer.Option("--all", help="Show every one; sizes only with --long.")] = False,
    long: Annotated[
        bool,
        typer.Option(
            "--long", help="Read the manifest of everything shown, ask nodes for copies; more columns."
        ),
    ] = False,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """List the checkpoints of a run, newest first.

    With --json every one is listed; "details" is null where the manifest was not read.

    ON NODES (--long): how many copies of every rank's segment lie on nodes: on this one, and with --server
    on all that the server knows of the run.

    Marks: latest (what a restore would choose), pinned, local (also in the staging directory), staged
    (only there: not committed yet), damaged (its manifest cannot be read), other-run (put here by hand).
    """
    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        listing = backend.listing(url, with_copies=long)
        shown = listing.rows if show_all or output.json else listing.rows[:limit]
        wanted = [row.checkpoint for row in _detailed(shown, limit, show_all, long) if row.committed]
        details = backend.details(url, wanted)
    finally:
        backend.close()
    if output.json:
        _print_json(url, listing, details)
    else:
        _print_table(url, listing, shown, details, long=long)


def runs_command(
    root: Annotated[
        str,
        typer.Argument(
            metavar="ROOT",
            help="URL or directory below which to look; with --server also empty: those known there.",
            show_default=False,
        ),
    ] = "",
    *,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """List the runs below a root."""
    if not root and not server.server:
        raise InvalidInputError("name the root, e.g. s3://bucket, or a server with --server", code="usage")
    # Here, in every command: without it --help takes twice as long.
    from ckpt.cli.render import Column, counted, print_json, print_line, print_table

    backend = open_backend(server, store)
    try:
        found = backend.runs(absolute_url(root) if root else "")
    finally:
        backend.close()
    if output.json:
        print_json({"runs": found})
        return
    if found:
        print_table(
            [Column("RUN"), Column("CHECKPOINTS", right=True), Column("LATEST"), Column("URL")],
            [(run.run, f"{run.checkpoints:,}", run.latest or "-", run.url) for run in found],
        )
    print_line(counted(len(found), "run") + (f" below {root}" if root else " at the server"))


def _detailed(shown: list[Row], limit: int, show_all: bool, long: bool) -> list[Row]:
    """Return the rows whose manifest is worth reading: that costs a request each."""
    if long:
        return shown
    return [] if show_all else shown[:limit]


def _print_json(url: str, listing: Listing, details: dict[str, Details | CkptError]) -> None:
    from ckpt.cli.render import print_json

    print_json(
        {
            "url": url,
            "count": len(listing.rows),
            "latest": next((row.checkpoint for row in listing.rows if row.latest), None),
            "problem": listing.problem,
            "run_id": listing.run_id or None,
            "checkpoints": [
                _document(row, details.get(row.checkpoint), listing.run_id) for row in listing.rows
            ],
        }
    )


def _is_foreign(found: Details | CkptError | None, run_id: str) -> bool:
    """Whether a manifest that was read names another run id than the run has."""
    if found is None or isinstance(found, CkptError):
        return False
    return bool(found.run_id and run_id) and found.run_id != run_id


def _document(row: Row, found: Details | CkptError | None, run_id: str) -> dict[str, Any]:
    flags = {"damaged": isinstance(found, CorruptError), "other_run": _is_foreign(found, run_id)}
    document = asdict(row) | flags | {"details": None}
    if found is not None and not isinstance(found, CkptError):
        document["details"] = asdict(found)
    return document


def _print_table(
    url: str,
    listing: Listing,
    shown: list[Row],
    details: dict[str, Details | CkptError],
    *,
    long: bool,
) -> None:
    from ckpt.cli.render import error_console, print_line, print_table

    if shown:
        with_details = bool(details)
        print_table(
            _columns(with_details, long),
            [
                _cells(row, details.get(row.checkpoint), listing.run_id, with_details=with_details, long=long)
                for row in shown
            ],
        )
    print_line(_footer(url, len(listing.rows), len(shown)))
    if listing.problem is not None:
        error_console().print(f"which one is the latest is unknown: {listing.problem}", style="red")


def _footer(url: str, count: int, shown: int) -> str:
    from ckpt.cli.render import counted

    text = f"{counted(count, 'checkpoint')} in {url}"
    return text if shown == count else f"{text}; the newest {shown:,} shown, --all shows every one"


def _columns(with_details: bool, long: bool) -> list[Column]:
    from ckpt.cli.render import Column

    columns = [Column("STEP", right=True), Column("CHECKPOINT"), Column("COMMITTED")]
    if with_details:
        columns += [Column("SIZE", right=True), Column("RANKS", right=True)]
    if with_details and long:
        columns += [Column("TENSORS", right=True), Column("RESUMED FROM")]
    if long:
        columns += [Column("ON NODES")]
    return [*columns, Column("MARKS")]


def _cells(
    row: Row, found: Details | CkptError | None, run_id: str, *, with_details: bool, long: bool
) -> list[str | Cell]:
    from ckpt.cli.render import Cell, human_bytes, human_time

    cells: list[str | Cell] = [str(row.step), row.checkpoint, human_time(row.committed_at)]
    known = found if found is not None and not isinstance(found, CkptError) else None
    if with_details:
        cells += [human_bytes(known.nbytes), str(known.world_size)] if known else ["-", "-"]
    if with_details and long:
        cells += [str(known.tensor_count), known.parent or "-"] if known else ["-", "-"]
    if long:
        cells.append(_on_nodes(row.copies or [], known.world_size if known else None))
    flags = {
        "latest": row.latest,
        "pinned": row.pinned,
        "local": row.local and row.committed,
        "staged": not row.committed,
        "damaged": isinstance(found, CorruptError),
        "other-run": _is_foreign(found, run_id),
    }
    is_wrong = flags["damaged"] or flags["other-run"]
    style = "bold red" if is_wrong else "green" if row.latest else "yellow" if flags["staged"] else ""
    return [*cells, Cell(" ".join(name for name, is_set in flags.items() if is_set), style)]


def _on_nodes(copies: list[CopiesRow], world_size: int | None) -> str:
    """ "2 x 8 ranks": each rank has so many copies on nodes; else which ranks have any."""
    from collections import Counter

    from ckpt.cli.render import counted, human_ranks

    by_rank = Counter(rank for node in copies for rank in (*node.ranks, *node.replica_ranks))
    if not by_rank:
        return "-"
    if world_size is not None and len(by_rank) == world_size:
        return f"{min(by_rank.values())} x {counted(world_size, 'rank')}"
    return f"ranks {human_ranks(sorted(by_rank))}"
