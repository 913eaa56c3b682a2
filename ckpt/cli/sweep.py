"""``ckpt sweep``: remove what crashes left in the store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.backend import open_backend
from ckpt.cli.options import (
    EXIT_FAILED,
    OutputOptions,
    ServerOptions,
    StoreOptions,
    UrlArgument,
    agreed,
)
from ckpt.errors import InvalidInputError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.cli.records import Sweep

__all__ = ["parse_age", "sweep_command"]

_AGE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_age(text: str) -> float:
    """Return the seconds of an age such as "24h", "90m", "7d". Raises InvalidInputError."""
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidInputError("an age is a number with s, m, h or d, e.g. 24h", code="usage", age=text)
    return float(found[1]) * _UNITS[found[2]]


def sweep_command(
    url: UrlArgument,
    *,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only what was not written to for so long: 24h, 90m, 7d.")
    ] = "24h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Allow an age under 1h: only where nobody writes to the run.")
    ] = False,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Delete what never came to be a checkpoint: left by crashes, and by prunes that were cut short.

    Objects of a checkpoint go only if it is not committed, something newer is, nothing refers to them, and
    none of them is younger than --older-than. Uploads that were begun and never ended go as well, where the
    store can list them. On a terminal it asks first.
    """
    from ckpt.cli.render import counted, print_json, progress_bar

    older_than_s = parse_age(older_than)
    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        found = backend.sweep(
            url, older_than_s=older_than_s, dry_run=True, force=force, on_swept=lambda _: None
        )
        if not output.json:
            _print(found)
        if not dry_run and (found.objects or found.uploads):
            question = f"Delete {counted(found.objects, 'object')} for good?"
            if not (yes or agreed(question)):
                raise typer.Exit(EXIT_FAILED)
            total, done = found.objects, 0
            with progress_bar("sweeping", in_bytes=False) as update:
                update(0, total)

                def on_swept(count: int) -> None:
                    nonlocal done
                    done += count
                    update(min(done, total), total)

                found = backend.sweep(
                    url, older_than_s=older_than_s, dry_run=False, force=force, on_swept=on_swept
                )
    finally:
        backend.close()
    if output.json:
        print_json(
            {
                "url": url,
                "dry_run": dry_run,
                "older_than_s": older_than_s,
                "checkpoints": found.rows,
                "deleted_objects": found.objects,
                "aborted_uploads": found.uploads,
            }
        )
    else:
        _print_result(found, dry_run=dry_run)


def _print(found: Sweep) -> None:
    from ckpt.cli.render import Column, print_table

    if found.rows:
        print_table(
            [Column("NOT COMMITTED"), Column("OBJECTS", right=True)],
            [(row.checkpoint, f"{row.objects:,}") for row in found.rows],
        )


def _print_result(found: Sweep, *, dry_run: bool) -> None:
    from ckpt.cli.render import counted, print_line

    what = counted(found.objects, "object")
    if found.uploads:
        what += f" and {counted(found.uploads, 'unfinished upload')}"
    if not found.objects and not found.uploads:
        print_line("nothing to sweep")
    elif dry_run:
        print_line(f"dry run: {what} would be deleted")
    else:
        print_line(f"{what} deleted")
    if found.uploads is None:
        print_line(
            "This engine cannot list unfinished uploads: give the bucket a lifecycle rule for incomplete "
            "multipart uploads, or sweep fsspec+s3://... once."
        )
