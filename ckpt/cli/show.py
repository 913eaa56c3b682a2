"""``ckpt show``: one checkpoint in full."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.backend import open_backend
from ckpt.cli.options import (
    EXIT_OTHER_RUN,
    CheckpointArgument,
    OutputOptions,
    ServerOptions,
    StoreOptions,
    UrlArgument,
)
from ckpt.errors import NotFoundError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.cli.records import CopiesRow, SegmentRow, Shown, TensorRow

__all__ = ["show_command"]


def show_command(
    url: UrlArgument,
    checkpoint: CheckpointArgument = "latest",
    *,
    match: Annotated[
        str, typer.Option(metavar="GLOB", help='Only tensors whose name fits, e.g. "model.*.weight".')
    ] = "*",
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Rows per table at most.")] = 50,
    show_all: Annotated[bool, typer.Option("--all", help="Every row.")] = False,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Show a checkpoint: tensors and how they are split, segments, where the copies are, environment.

    LAYOUT reads, per mesh dim, "name=size:placement": S(0) sharded along tensor dim 0, SS(0,2) strided
    shard, R replicated. RANKS are those that store a part: replicas share the work.
    """
    from ckpt.cli.render import error_console, print_json

    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        shown = backend.show(url, checkpoint)
    finally:
        backend.close()
    tensors = [tensor for tensor in shown.tensors if fnmatchcase(tensor.name, match)]
    if not tensors and match != "*":
        raise NotFoundError(
            "no tensor fits the pattern", code="no-tensor", match=match, checkpoint=shown.checkpoint
        )
    shown = replace(shown, tensors=tensors)
    if output.json:
        print_json(shown)
    else:
        _print(shown, len(shown.tensors) + len(shown.segments) if show_all else limit)
    if shown.foreign is not None:
        error_console().print(f"error: {shown.foreign}", style="red")
        raise typer.Exit(EXIT_OTHER_RUN)


def _print(shown: Shown, limit: int) -> None:
    from ckpt.cli.render import print_line, print_pairs

    print_pairs(_facts(shown))
    print_line()
    _print_tensors(shown.tensors, limit)
    if shown.has_explicit_boxes:
        print_line("some state follows no mesh and is not listed")
    print_line()
    _print_segments(shown.segments, limit)


def _facts(shown: Shown) -> list[tuple[str, str]]:
    from ckpt.cli.render import counted, human_bytes, human_time

    here = [segment for segment in shown.segments if segment.local_path]
    folder = here[0].local_path.rpartition("/")[0] if here and here[0].local_path else ""
    local = f"{_ranks(here)} in {folder}" if here else "none"
    facts = [
        ("checkpoint", f"{shown.checkpoint}{' (pinned)' if shown.pinned else ''}"),
        ("step", f"{shown.step} of attempt {shown.attempt}"),
        ("committed", human_time(shown.committed_at)),
        (
            "size",
            f"{human_bytes(shown.nbytes)} ({shown.nbytes:,} bytes), {counted(shown.tensor_count, 'tensor')}",
        ),
        ("stored", _stored(shown)),
        ("run", f"{shown.run} ({shown.run_id or 'an older version wrote no id'})"),
        ("saved by", f"{counted(shown.world_size, 'rank')} in {counted(shown.group_count, 'node group')}"),
        ("resumed from", shown.parent or "a fresh start"),
        ("remote copy", f"{_ranks(shown.segments)} in {shown.url}"),
        ("local copy", local),
        *[("on node", _on_node(copies)) for copies in shown.copies],
    ]
    if shown.references:
        facts.append(("has chunks in", ", ".join(shown.references)))
    environment = " ".join(f"{key}={value}" for key, value in shown.environment.items())
    return [*facts, ("environment", environment or "-")]


def _on_node(copies: CopiesRow) -> str:
    from ckpt.cli.render import human_ranks

    if copies.problem is not None:
        return f"{copies.node}: does not say ({copies.problem.message})"
    parts = [f"ranks {human_ranks(copies.ranks)}"] if copies.ranks else []
    parts += [f"replicas of ranks {human_ranks(copies.replica_ranks)}"] if copies.replica_ranks else []
    here = "" if not copies.here or copies.node == "this node" else " (this node)"
    return f"{copies.node}{here}: {', '.join(parts) or 'nothing'}"


def _stored(shown: Shown) -> str:
    from ckpt.cli.render import human_bytes

    share = f", {shown.stored_nbytes / shown.nbytes:.0%} of the size" if shown.nbytes else ""
    return f"{human_bytes(shown.stored_nbytes)} ({shown.stored_nbytes:,} bytes{share}) in its own objects"


def _ranks(segments: list[SegmentRow]) -> str:
    from ckpt.cli.render import human_ranks

    return f"{'rank' if len(segments) == 1 else 'ranks'} {human_ranks([item.rank for item in segments])}"


def _print_tensors(tensors: list[TensorRow], limit: int) -> None:
    from ckpt.cli.render import Column, human_bytes, human_ranks, print_table

    print_table(
        [
            Column("TENSOR", fold=True),
            Column("DTYPE"),
            Column("SHAPE"),
            Column("SIZE", right=True),
            Column("LAYOUT"),
            Column("RANKS"),
        ],
        [
            (
                tensor.name,
                tensor.dtype,
                "x".join(map(str, tensor.shape)) or "scalar",
                human_bytes(tensor.nbytes),
                _layout(tensor),
                human_ranks(tensor.ranks),
            )
            for tensor in tensors[:limit]
        ],
    )
    _print_rest(len(tensors), limit, "tensors", "--all shows them, --match GLOB picks some")


def _print_segments(segments: list[SegmentRow], limit: int) -> None:
    from ckpt.cli.render import Column, human_bytes, print_table

    print_table(
        [
            Column("RANK", right=True),
            Column("SIZE", right=True),
            Column("STORED", right=True),
            Column("LOCAL"),
            Column("OBJECT", fold=True),
        ],
        [
            (
                str(segment.rank),
                human_bytes(segment.nbytes),
                human_bytes(segment.stored_nbytes),
                "yes" if segment.local_path else "-",
                segment.object_key,
            )
            for segment in segments[:limit]
        ],
    )
    _print_rest(len(segments), limit, "segments", "--all shows them")


def _print_rest(count: int, limit: int, noun: str, hint: str) -> None:
    from ckpt.cli.render import print_line

    if count > limit:
        print_line(f"... {count - limit:,} more {noun}; {hint}")


def _layout(tensor: TensorRow) -> str:
    if all(size == 1 for size in tensor.mesh.shape):
        return "whole"
    names = tensor.mesh.names or [""] * len(tensor.mesh.shape)
    return " ".join(
        f"{name}={size}:{_short(placement)}" if name else f"{size}:{_short(placement)}"
        for name, size, placement in zip(names, tensor.mesh.shape, tensor.placements, strict=True)
    )


def _short(placement: str) -> str:
    """DTensor's own short forms: S(0), R."""
    if placement.startswith("Replicate"):
        return "R"
    return placement.replace("StridedShard", "SS").replace("Shard", "S").replace(" ", "")
