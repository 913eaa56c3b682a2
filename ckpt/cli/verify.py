"""``ckpt verify``: is a checkpoint whole?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.backend import Backend, open_backend
from ckpt.cli.options import (
    EXIT_DAMAGED,
    EXIT_OTHER_RUN,
    CheckpointArgument,
    OutputOptions,
    ServerOptions,
    StoreOptions,
    UrlArgument,
)
from ckpt.errors import InvalidInputError, NotFoundError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.cli.records import Verified
    from ckpt.cli.render import Cell

__all__ = ["verify_command"]


def verify_command(
    url: UrlArgument,
    checkpoint: CheckpointArgument = "latest",
    *,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte and compare digests, not only presence and sizes.")
    ] = False,
    verify_all: Annotated[
        bool, typer.Option("--all", help="Every committed checkpoint, newest first.")
    ] = False,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Check that a checkpoint is whole, and of this run. Exits with 4 where it is damaged, and names objects
    and chunks; with 7 where it is another run's and nothing else is wrong.
    """
    from ckpt.cli.render import print_json

    if verify_all and checkpoint != "latest":
        raise InvalidInputError(
            "name a checkpoint or give --all, not both", code="usage", checkpoint=checkpoint
        )
    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        found = _verify_all(backend, url, deep) if verify_all else [_verify(backend, url, checkpoint, deep)]
    finally:
        backend.close()
    if output.json:
        print_json({"url": url, "deep": deep, "checkpoints": found})
    else:
        _print(found, deep)
    codes = {problem.code for verified in found for problem in verified.problems}
    if codes:
        raise typer.Exit(EXIT_OTHER_RUN if codes == {"other-run"} else EXIT_DAMAGED)


def _verify_all(backend: Backend, url: str, deep: bool) -> list[Verified]:
    from ckpt.cli.render import error_console

    found = []
    for row in backend.listing(url).rows:
        if not row.committed:
            continue
        try:
            found.append(_verify(backend, url, row.checkpoint, deep))
        except NotFoundError:
            error_console().print(f"{row.checkpoint} was deleted meanwhile")
    return found


def _verify(backend: Backend, url: str, checkpoint: str, deep: bool) -> Verified:
    from ckpt.cli.render import progress_bar

    with progress_bar(f"verifying {checkpoint}", in_bytes=True) as update:
        return backend.verify(url, checkpoint, deep=deep, on_bytes=update)


def _result(verified: Verified, deep: bool) -> Cell:
    from ckpt.cli.render import Cell, counted

    damage = [problem for problem in verified.problems if problem.code != "other-run"]
    if damage:
        return Cell(f"damaged: {counted(len(damage), 'problem')}", "bold red")
    if verified.problems:
        return Cell("another run's", "bold red")
    return Cell("whole" if deep else "whole (quick)", "green")


def _print(found: list[Verified], deep: bool) -> None:
    from ckpt.cli.render import Column, human_bytes, print_line, print_table

    if found:
        print_table(
            [Column("CHECKPOINT"), Column("READ", right=True), Column("RESULT")],
            [
                (
                    verified.checkpoint,
                    human_bytes(verified.checked_nbytes) if deep else "-",
                    _result(verified, deep),
                )
                for verified in found
            ],
        )
    for verified in found:
        for problem in verified.problems:
            print_line(f"{verified.checkpoint}: {problem.message}", "red")
            for key, value in problem.context.items():
                print_line(f"    {key}: {value}")
    if not deep:
        print_line("Presence, sizes and invariants were checked; --deep reads every byte.")
