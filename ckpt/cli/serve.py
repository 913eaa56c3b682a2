"""``ckpt serve`` and ``ckpt status``: the staging server of a node."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.backend import read_token
from ckpt.cli.options import OutputOptions, ServerOptions

if TYPE_CHECKING:
    from ckpt_proto.v1 import staging_pb2

__all__ = ["serve_command", "status_command"]

_STYLES = {"committed": "green", "failed": "bold red", "abandoned": "red"}


def serve_command(context: typer.Context) -> None:
    """Run a staging server; `ckpt serve --help` lists its options."""
    # A new process, not an import: the server is above this package, and a separate part of the wheel.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "ckpt_server", *context.args])  # noqa: S606 - no shell


def status_command(
    *,
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
    """Show what a staging server is doing: steps, states, bytes, and the oldest one not committed."""
    # Here: grpc takes longer to load than everything else.
    from ckpt.cli.render import print_json
    from ckpt.client.staging import StagingClient
    from ckpt.storage.staging import StagingDir, default_staging_path

    target = server.server or StagingDir(staging or default_staging_path()).socket_target()
    with StagingClient(target, token=read_token(server.token_file), ca=server.ca) as client:
        status = client.status()
    if output.json:
        print_json(_document(target, status))
    else:
        _print(target, status)


def _document(target: str, status: staging_pb2.StatusResponse) -> dict[str, Any]:
    return {
        "server": target,
        "version": status.server_version,
        "embedded": status.embedded,
        "oldest_pending_s": status.oldest_pending_s,
        "steps": [_step(step) for step in status.steps],
    }


def _step(step: staging_pb2.StepStatus) -> dict[str, Any]:
    from ckpt.cli.describe import problem_of
    from ckpt.format.ids import CheckpointId
    from ckpt.format.problem import error_from_info

    return {
        "url": step.url,
        "checkpoint": str(CheckpointId.from_proto(step.id)),
        "state": _state(step),
        "sealed_ranks": list(step.sealed_ranks),
        "ranks": list(step.group.ranks),
        "uploaded_nbytes": step.uploaded_bytes,
        "nbytes": step.total_bytes,
        "stored_nbytes": step.stored_bytes,
        "error": problem_of(error_from_info(step.error)) if step.HasField("error") else None,
        "replicas": {str(one.rank): list(one.nodes) for one in step.replicas},
        "replicas_wanted": step.replicas_wanted,
        "warnings": [problem_of(error_from_info(warning)) for warning in step.warnings],
    }


def _state(step: staging_pb2.StepStatus) -> str:
    name: str = step.DESCRIPTOR.enum_types_by_name["State"].values_by_number[step.state].name
    return name.removeprefix("STATE_").lower()


def _replicas(step: dict[str, Any]) -> str:
    """Of how many of this node's segments as many others as wanted hold a replica, and who."""
    if not step["replicas_wanted"]:
        return "-"
    nodes = sorted({node for held in step["replicas"].values() for node in held})
    done = sum(len(held) >= step["replicas_wanted"] for held in step["replicas"].values())
    return f"{done} of {len(step['ranks'])}" + (f" on {', '.join(nodes)}" if nodes else "")


def _print(target: str, status: staging_pb2.StatusResponse) -> None:
    from ckpt.cli.render import Cell, Column, human_bytes, human_ranks, human_seconds, print_line, print_table

    steps = [_step(step) for step in status.steps]
    replicated = any(step["replicas_wanted"] for step in steps)
    if steps:
        print_table(
            [
                Column("CHECKPOINT"),
                Column("STATE"),
                Column("SEALED"),
                Column("UPLOADED", right=True),
                *([Column("REPLICAS", fold=True)] if replicated else []),
                Column("RUN", fold=True),
            ],
            [
                (
                    step["checkpoint"],
                    Cell(step["state"], _STYLES.get(step["state"], "yellow")),
                    f"{human_ranks(step['sealed_ranks'])} of {human_ranks(step['ranks'])}",
                    f"{human_bytes(step['uploaded_nbytes'])} of {human_bytes(step['nbytes'])}",
                    *([_replicas(step)] if replicated else []),
                    step["url"],
                )
                for step in steps
            ],
        )
    for step in steps:
        if step["error"] is not None:
            print_line(f"{step['checkpoint']}: {step['error']}", "red")
        for warning in step["warnings"]:
            print_line(f"{step['checkpoint']}: {warning}", "yellow")
    kind = "embedded server" if status.embedded else "server"
    pending = status.oldest_pending_s
    waiting = f"oldest pending for {human_seconds(pending)}" if pending else "nothing pending"
    print_line(f"{kind} {status.server_version} at {target}: {waiting}")
