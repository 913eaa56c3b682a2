"""``ckpt recovery``: where the time between a failure and the first step after it went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import OutputOptions, StoreOptions, UrlArgument

if TYPE_CHECKING:
    from ckpt.ops.recovery import RankRecovery, Recovery

__all__ = ["recovery_command"]


def recovery_command(
    url: UrlArgument,
    *,
    attempt: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="This start of the run; default: the last.")
    ] = None,
    store: StoreOptions,
    output: OutputOptions,
) -> None:
    """Show how long the last restart took, phase by phase, from the failure to the first step.

    CRITICAL is the rank whose first step came last; that column adds up to the whole. MAX and SPREAD (largest
    less smallest) are over all ranks. Read from the store, and from this node's staging directory.
    """
    from ckpt.cli.render import print_json
    from ckpt.ops.recovery import summarize
    from ckpt.urls import absolute_url

    url = absolute_url(url)
    records = _records(url, attempt, store)
    found = summarize(records)
    if output.json:
        print_json({"url": url, **_document(found), "by_rank": records})
    else:
        _print(url, found)


def _records(url: str, attempt: int | None, options: StoreOptions) -> list[RankRecovery]:
    """Those of the newest attempt that either place knows; of each rank one."""
    from contextlib import closing

    from ckpt.errors import NotFoundError
    from ckpt.format.keys import run_key
    from ckpt.ops.recovery import load_recovery, local_recoveries
    from ckpt.storage.open import open_store
    from ckpt.storage.staging import StagingDir, default_staging_path

    local = local_recoveries(StagingDir(options.staging or default_staging_path()), run_key(url), attempt)
    with closing(open_store(url, options.as_mapping())) as store:
        try:
            remote = load_recovery(store, attempt)
        except NotFoundError:
            if not local:
                raise
            remote = []
    newest = max(record.attempt for record in [*local, *remote])
    by_rank = {record.rank: record for record in [*remote, *local] if record.attempt == newest}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _document(found: Recovery) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(found)


def _print(url: str, found: Recovery) -> None:
    from ckpt.cli.render import Column, counted, human_bytes, human_time, print_line, print_pairs, print_table

    print_pairs(
        [
            ("run", url),
            ("attempt", f"{found.attempt} after a {found.cause}"),
            ("restored", found.checkpoint or "nothing (a fresh start)"),
            ("steps to make again", str(found.lost_steps)),
            ("failed at", human_time(found.failed_at)),
            ("back after", f"{found.wall_s:.2f} s (rank {found.critical_rank} last)"),
            ("told by", f"{found.ranks} of {counted(found.world_size, 'rank')}"),
        ]
    )
    print_line()
    whole = found.wall_s or 1.0
    print_table(
        [
            Column("PHASE"),
            Column("CRITICAL", right=True),
            Column("SHARE", right=True),
            Column("MAX", right=True),
            Column("SPREAD", right=True),
            Column("SLOWEST", right=True),
        ],
        [
            *[
                (
                    phase.name,
                    f"{phase.critical_s:.3f} s",
                    f"{100 * phase.critical_s / whole:.1f} %",
                    f"{phase.max_s:.3f} s",
                    f"{phase.spread_s:.3f} s",
                    f"rank {phase.rank}",
                )
                for phase in found.phases
            ],
            ("sum", f"{sum(p.critical_s for p in found.phases):.3f} s", "", "", "", ""),
        ],
    )
    print_line()
    read = ", ".join(f"{human_bytes(nbytes)} {tier}" for tier, nbytes in found.nbytes.items() if nbytes)
    print_line(f"read: {read or 'nothing'}")
