"""``ckpt pin`` and ``ckpt unpin``."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli.backend import open_backend
from ckpt.cli.options import OutputOptions, ServerOptions, StoreOptions, UrlArgument
from ckpt.urls import absolute_url

__all__ = ["pin_command", "unpin_command"]

_Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help='"latest", a step ("12000"), or an id.', show_default=False),
]


def pin_command(
    url: UrlArgument,
    checkpoint: _Checkpoint,
    *,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Keep a checkpoint whatever the retention rule says."""
    _set(url, checkpoint, True, server, store, output)


def unpin_command(
    url: UrlArgument,
    checkpoint: _Checkpoint,
    *,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Leave a checkpoint to the retention rule again. Deletes nothing."""
    _set(url, checkpoint, False, server, store, output)


def _set(
    url: str,
    checkpoint: str,
    pinned: bool,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    from ckpt.cli.render import print_json, print_line

    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        ident = backend.pin(url, checkpoint, pinned=pinned)
    finally:
        backend.close()
    if output.json:
        print_json({"url": url, "checkpoint": ident, "pinned": pinned})
    else:
        print_line(f"{ident} {'pinned' if pinned else 'unpinned'}")
