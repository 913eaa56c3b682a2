"""``ckpt prune``: delete checkpoints by a retention rule, or by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.backend import Backend, open_backend
from ckpt.cli.options import EXIT_FAILED, OutputOptions, ServerOptions, StoreOptions, UrlArgument, agreed
from ckpt.errors import InvalidInputError
from ckpt.urls import absolute_url

if TYPE_CHECKING:
    from ckpt.cli.records import Policy, PrunePlan

__all__ = ["prune_command"]


def prune_command(
    url: UrlArgument,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHECKPOINT", help="Delete exactly these instead.", show_default=False),
    ] = None,
    *,
    keep_last: Annotated[
        int | None,
        typer.Option(metavar="N", help="Keep the newest N of the current line.", show_default=False),
    ] = None,
    keep_every: Annotated[int, typer.Option(metavar="M", help="Also keep steps divisible by M. 0: off.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    server: ServerOptions,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Delete checkpoints that a retention rule does not keep.

    The latest one and pinned ones always stay. Refuses (exit code 5) to delete what a run would resume
    from, or anything while that one is damaged. On a terminal it asks first.
    """
    from ckpt.cli.render import counted

    policy = _policy(checkpoints or [], keep_last, keep_every)
    url = absolute_url(url)
    backend = open_backend(server, store)
    try:
        plan = backend.plan_prune(url, policy)
        if not output.json:
            _print(plan)
        objects = 0
        if plan.condemned and not dry_run:
            question = f"Delete {counted(len(plan.condemned), 'checkpoint')} for good?"
            if not (yes or agreed(question)):
                raise typer.Exit(EXIT_FAILED)
            objects = _execute(backend, url, plan)
    finally:
        backend.close()
    _print_result(url, plan, objects, output, dry_run=dry_run)


def _policy(checkpoints: list[str], keep_last: int | None, keep_every: int) -> Policy:
    from ckpt.cli.records import Policy

    if checkpoints and (keep_last is not None or keep_every):
        raise InvalidInputError("name checkpoints or give a rule, not both", code="usage")
    if checkpoints:
        return Policy(checkpoints=tuple(checkpoints))
    if keep_last is None:
        raise InvalidInputError("give --keep-last N, or name the checkpoints to delete", code="usage")
    if keep_last < 1 or keep_every < 0:  # also here: on the wire a negative number is no number at all
        raise InvalidInputError(
            "bad retention policy", code="retention", keep_last=keep_last, keep_every=keep_every
        )
    return Policy(keep_last=keep_last, keep_every=keep_every)


def _execute(backend: Backend, url: str, plan: PrunePlan) -> int:
    from ckpt.cli.render import progress_bar

    done, total = 0, len(plan.condemned)
    with progress_bar("deleting", in_bytes=False) as update:
        update(0, total)

        def on_deleted(count: int) -> None:
            nonlocal done
            done += count
            update(done, total)

        return backend.prune(url, plan, on_deleted)


def _print(plan: PrunePlan) -> None:
    from ckpt.cli.render import Cell, Column, print_line, print_table

    if plan.verdicts:
        print_table(
            [Column("CHECKPOINT"), Column("VERDICT"), Column("REASON")],
            [
                (
                    verdict.checkpoint,
                    Cell("keep", "green") if verdict.keep else Cell("delete", "red"),
                    verdict.reason,
                )
                for verdict in plan.verdicts
            ],
        )
    for checkpoint in plan.held:
        print_line(f"{checkpoint}: its objects stay, others hold chunks in them")
    for checkpoint in plan.freed:
        print_line(f"{checkpoint}: deleted earlier, its objects go now: nobody needs them any more")


def _print_result(url: str, plan: PrunePlan, objects: int, output: OutputOptions, *, dry_run: bool) -> None:
    from ckpt.cli.render import counted, print_json, print_line

    if output.json:
        print_json(
            {
                "url": url,
                "dry_run": dry_run,
                "verdicts": plan.verdicts,
                "deleted": [] if dry_run else plan.condemned,
                "deleted_objects": plan.objects if dry_run else objects,
                "held": plan.held,
                "freed": plan.freed,
            }
        )
        return
    what = counted(len(plan.condemned), "checkpoint")
    if not plan.condemned:
        print_line("nothing to delete")
    elif dry_run:
        print_line(f"dry run: {what} ({counted(plan.objects, 'object')}) would be deleted")
    else:
        print_line(f"{what} ({counted(objects, 'object')}) deleted")
