"""``ckpt prefetch``: bring segments to a spare node before its ranks start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.options import EXIT_FAILED, CheckpointArgument, OutputOptions, StoreOptions, UrlArgument
from ckpt.errors import InvalidInputError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.client.prefetch import Prefetched

__all__ = ["prefetch_command"]


def prefetch_command(
    url: UrlArgument,
    checkpoint: CheckpointArgument = "latest",
    *,
    ranks: Annotated[
        str,
        typer.Option(metavar="RANKS", help='Of the saved step, e.g. "8-15,32"; default: all.'),
    ] = "",
    world: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The coming start has N ranks, --ranks are this node's in it: fetch what they will need.",
        ),
    ] = None,
    peers: Annotated[
        list[str],
        typer.Option(
            metavar="TARGET",
            help="Servers of other nodes, beside those known here and $CKPT_PEERS; repeatable.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Fetch segments to this node, from other nodes or else the store, before its ranks start.

    Takes the step that a restore would take now. The node's server must run with --peer-listen; it keeps what
    is fetched as replicas. Repeat it after a failure: what has arrived counts. Other nodes are asked with
    $CKPT_SERVER_TOKEN and $CKPT_SERVER_CA. Exit code 1 where a segment could not be had.
    """
    from ckpt.cli.render import print_json
    from ckpt.client.prefetch import prefetch
    from ckpt.format.held import ranks_from_text
    from ckpt.storage.staging import StagingDir, default_staging_path

    try:
        chosen = ranks_from_text(ranks) if ranks else None
    except ValueError as error:
        raise InvalidInputError('--ranks takes numbers and ranges, e.g. "8-15,32"', ranks=ranks) from error
    if world is not None and chosen is None:
        raise InvalidInputError("--world needs --ranks: those that this node will have", world=world)
    url = absolute_url(url)
    staging = StagingDir(store.staging or default_staging_path())
    found = prefetch(
        url, store.as_mapping(), staging, peers=peers, wanted=checkpoint, ranks=chosen, world_size=world
    )
    if output.json:
        print_json(_document(url, found))
    else:
        _print(url, found)
    if found.missing:
        raise typer.Exit(EXIT_FAILED)


def _document(url: str, found: Prefetched) -> dict[str, Any]:
    from ckpt.cli.describe import problem_of

    return {
        "url": url,
        "checkpoint": str(found.ident),
        "ranks": list(found.ranks),
        "here_before": list(found.here),
        "missing": {str(rank): problem_of(error) for rank, error in sorted(found.missing.items())},
        "nbytes": dict(found.nbytes),
        "silent": {target: problem_of(error) for target, error in sorted(found.silent.items())},
    }


def _print(url: str, found: Prefetched) -> None:
    from ckpt.cli.render import human_bytes, human_ranks, print_line, print_pairs

    came = ", ".join(f"{human_bytes(nbytes)} {tier}" for tier, nbytes in sorted(found.nbytes.items()))
    print_pairs(
        [
            ("run", url),
            ("checkpoint", str(found.ident)),
            ("ranks", human_ranks(found.ranks)),
            ("here before", human_ranks(found.here) if found.here else "none"),
            ("fetched", came or "nothing"),
        ]
    )
    for target, error in sorted(found.silent.items()):
        print_line(f"{target} does not answer: {error.message}", "yellow")
    for rank, error in sorted(found.missing.items()):
        print_line(f"rank {rank}: {error}", "red")
