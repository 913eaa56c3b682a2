"""``ckpt repair``: put again what is damaged, from what another tier still has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.backend import open_backend
from ckpt.cli.options import (
    EXIT_DAMAGED,
    CheckpointArgument,
    OutputOptions,
    ServerOptions,
    StoreOptions,
    UrlArgument,
)
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.cli.records import Repair

__all__ = ["repair_command"]


def repair_command(
    url: UrlArgument,
    checkpoint: CheckpointArgument = "latest",
    *,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TARGET",
            help="Server of another node (host:port) that may have a copy; repeatable. Nodes that the run is "
            "known to have had are asked by themselves.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything and look for copies; change nothing.")
    ] = False,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Put what is damaged or missing of a checkpoint into the store again, from copies on nodes.

    Reads every byte, as `verify --deep`. Damaged copies on this node are replaced from the store. Exits with
    4 where something is still damaged, because no good copy was found.
    """
    from ckpt.cli.render import print_json

    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        found = backend.repair(url, checkpoint, peers=tuple(peer or ()), dry_run=dry_run)
    finally:
        backend.close()
    if output.json:
        print_json({"url": url, "dry_run": dry_run, **found.document()})
    else:
        _print(found, dry_run)
    if found.left:
        raise typer.Exit(EXIT_DAMAGED)


def _print(found: Repair, dry_run: bool) -> None:
    from ckpt.cli.render import counted, print_line

    verb = "can be put again" if dry_run else "put again"
    for row in found.mended:
        sources = ", ".join(f"{name} {count}" for name, count in sorted(row.sources.items()))
        print_line(f"{row.key}: {row.code}, {verb}" + (f" (chunks: {sources})" if sources else ""), "green")
    for problem in found.left:
        print_line(f"still damaged: {problem.message}", "red")
        for key, value in problem.context.items():
            print_line(f"    {key}: {value}")
    for target, problem in found.unreachable.items():
        print_line(f"{target} did not answer: {problem}")
    if not found.mended and not found.left:
        print_line(f"{found.checkpoint} is whole: nothing to repair")
    else:
        print_line(
            f"{found.checkpoint}: {counted(len(found.mended), 'object')} {verb}, "
            f"{len(found.left)} still damaged"
        )
