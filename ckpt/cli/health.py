"""``ckpt health``: how the ranks of a job do: who is slow, who hangs, and who only waits for that one."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.backend import read_token
from ckpt.cli.options import EXIT_UNHEALTHY, OutputOptions, ServerOptions

if TYPE_CHECKING:
    from ckpt.storage.staging import StagingDir
    from ckpt_proto.v1 import staging_pb2

__all__ = ["health_command"]

_STYLES = {"ok": "green", "slow": "yellow", "waiting": "yellow", "hung": "bold red", "dead": "bold red"}
_BAD = ("hung", "dead", "silent")
_ASK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank, as shown. ``age_s``: since it was heard of; ``still_s``: since it last got on."""

    run: str
    attempt: int
    rank: int
    node: str
    pid: int
    step: int
    phase: str
    still_s: float
    age_s: float
    step_s: float
    state: str
    reason: str
    where: str
    kernel: str
    stacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``verdict``: "healthy", "unhealthy", "idle" where no rank runs. ``unreachable``: errors by target."""

    verdict: str
    culprits: list[int]
    ranks: list[RankRow]
    unreachable: dict[str, str]
    draining: list[str]


def health_command(
    *,
    run: Annotated[str, typer.Option(metavar="URL", help="Only this run.")] = "",
    peers: Annotated[
        list[str],
        typer.Option(
            metavar="TARGET", help="Ask the servers of these nodes too, e.g. node7:7070; repeatable."
        ),
    ] = [],  # noqa: B006 - typer copies it
    job: Annotated[
        bool,
        typer.Option(
            "--job",
            help="Ask the servers of all nodes that the runs of this staging directory name "
            "(with $CKPT_SERVER_TOKEN and $CKPT_SERVER_CA).",
        ),
    ] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print the stacks of those that hang.")] = False,
    staging: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Without --server: ask the one of this staging directory (default: $CKPT_STAGING).",
        ),
    ] = None,
    server: ServerOptions,
    output: OutputOptions,
) -> None:
    """Show how each rank does, and name the ones that hold up the others.

    Exit code 6 where a rank hangs, is dead or silent; 0 otherwise, also where some are only slow.
    """
    from ckpt.cli.render import print_json
    from ckpt.storage.staging import StagingDir, default_staging_path

    here = StagingDir(staging or default_staging_path())
    nodes = _nodes(here, run) if job else []
    targets = list(dict.fromkeys([server.server or here.socket_target(), *peers, *nodes]))
    health = _ask(targets, server, run)
    if output.json:
        print_json(health)
    else:
        _print(health, with_stacks=stacks)
    if health.verdict == "unhealthy":
        raise typer.Exit(EXIT_UNHEALTHY)


def _key(url: str) -> str:
    """Folder of the run at ``url``; empty: every run."""
    from ckpt.format.keys import run_key
    from ckpt.urls import absolute_url

    return run_key(absolute_url(url)) if url else ""


def _nodes(staging: StagingDir, url: str) -> list[str]:
    """Targets of the nodes of the run, or of all runs known here."""
    known = [_key(url)] if url else staging.run_keys()
    return [peer.target for key in known for peer in staging.read_run_config(key).peers if peer.target]


def _ask(targets: list[str], server: ServerOptions, url: str) -> Health:
    """Ask all servers at once, and judge over what all of them know. Raises where none answers."""
    from ckpt.client.staging import StagingClient
    from ckpt.errors import CkptError
    from ckpt.rpc.access import PeerAccess

    key = _key(url)
    access = PeerAccess.from_environment()
    secret = read_token(server.token_file) or access.token

    def ask(target: str) -> staging_pb2.StatusResponse | CkptError:
        token = None if target.startswith("unix:") else secret
        try:
            with StagingClient(target, token=token, ca=server.ca or access.ca, timeout_s=_ASK_S) as client:
                return client.status(key)
        except CkptError as error:
            return error

    with ThreadPoolExecutor(min(32, len(targets)), thread_name_prefix="ckpt-ask") as pool:
        answers = list(pool.map(ask, targets))
    errors = {t: a for t, a in zip(targets, answers, strict=True) if isinstance(a, CkptError)}
    if len(errors) == len(targets):
        raise errors[targets[0]]
    told = {t: a for t, a in zip(targets, answers, strict=True) if not isinstance(a, CkptError)}
    rows = _rows([item for answer in told.values() for item in answer.ranks])
    culprits = [row.rank for row in rows if row.state in _BAD]
    running = [row for row in rows if row.state != "ended"]
    return Health(
        verdict="unhealthy" if culprits else "healthy" if running else "idle",
        culprits=culprits,
        ranks=rows,
        unreachable={target: str(error) for target, error in errors.items()},
        draining=[target for target, answer in told.items() if answer.draining],
    )


def _rows(known: list[staging_pb2.RankHealth]) -> list[RankRow]:
    from ckpt.client.ranks import judge_pulses, newest_attempts
    from ckpt.plan.liveness import LivenessPolicy

    # What a server said is kept as long as it knows all ranks: it may have been given its own limits.
    said = {(item.pulse.run_key, item.pulse.rank): item for item in known}
    rows = []
    for ranks in newest_attempts((item.pulse, item.age_s) for item in known).values():
        nodes = {pulse.node for pulse, _ in ranks}
        verdicts = judge_pulses(ranks, LivenessPolicy())
        for (pulse, age_s), verdict in zip(ranks, verdicts, strict=True):
            row = _row(pulse, age_s, verdict.state, verdict.reason)
            if len(nodes) == 1:
                item = said[pulse.run_key, pulse.rank]
                row = replace(row, state=_state(item), reason=item.reason)
            rows.append(row)
    return rows


def _row(pulse: staging_pb2.RankPulse, age_s: float, state: str, reason: str) -> RankRow:
    return RankRow(
        run=pulse.run_key,
        attempt=pulse.attempt,
        rank=pulse.rank,
        node=pulse.node,
        pid=pulse.pid,
        step=pulse.step,
        phase=pulse.phase,
        still_s=round(pulse.still_s, 3),
        age_s=round(age_s, 3),
        step_s=round(pulse.step_s, 4),
        state=state,
        reason=reason,
        where=pulse.where,
        kernel=pulse.kernel,
        stacks=pulse.stacks,
    )


def _state(item: staging_pb2.RankHealth) -> str:
    name: str = item.DESCRIPTOR.enum_types_by_name["State"].values_by_number[item.state].name
    return name.removeprefix("STATE_").lower()


def _print(health: Health, *, with_stacks: bool) -> None:
    from ckpt.cli.render import Cell, Column, human_ranks, print_line, print_table

    if health.ranks:
        print_table(
            [
                Column("RANK", right=True),
                Column("STATE"),
                Column("STEP", right=True),
                Column("PHASE"),
                Column("STILL", right=True),
                Column("PER STEP", right=True),
                Column("HEARD", right=True),
                Column("NODE"),
                Column("REASON", fold=True),
            ],
            [
                (
                    str(row.rank),
                    Cell(row.state, _STYLES.get(row.state, "")),
                    str(row.step),
                    row.phase,
                    f"{row.still_s:.1f} s",
                    f"{row.step_s:.3f} s" if row.step_s else "-",
                    f"{row.age_s:.1f} s",
                    f"{row.node}/{row.pid}",
                    row.reason or "-",
                )
                for row in health.ranks
            ],
        )
    for row in health.ranks if with_stacks else []:
        if row.state in _BAD and (row.stacks or row.kernel):
            print_line(
                f"\nrank {row.rank} on {row.node}, process {row.pid}: {row.kernel}\n{row.stacks}".rstrip()
            )
    for target, error in health.unreachable.items():
        print_line(f"{target} does not answer: {error}", "red")
    for target in health.draining:
        print_line(f"{target} is on its way out", "yellow")
    counts = Counter(row.state for row in health.ranks)
    shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    named = f"; ranks to look at: {human_ranks(sorted(health.culprits))}" if health.culprits else ""
    print_line(f"{health.verdict}: {shown or 'no rank is known'}{named}")
