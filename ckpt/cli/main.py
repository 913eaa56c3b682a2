"""The ckpt command: its commands, exit codes and version.

Command modules are imported here, so they import nothing heavy themselves: a store, protobuf and gRPC
are loaded by the command that needs them, when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckpt import __version__
from ckpt.cli.diff import diff_command
from ckpt.cli.goodput import goodput_command
from ckpt.cli.health import health_command
from ckpt.cli.ls import list_command, runs_command
from ckpt.cli.options import command
from ckpt.cli.pins import pin_command, unpin_command
from ckpt.cli.prefetch import prefetch_command
from ckpt.cli.prune import prune_command
from ckpt.cli.recovery import recovery_command
from ckpt.cli.repair import repair_command
from ckpt.cli.serve import serve_command, status_command
from ckpt.cli.show import show_command
from ckpt.cli.sweep import sweep_command
from ckpt.cli.verify import verify_command

__all__ = ["app", "run"]

_HELP = """Checkpoints of training runs: list, inspect, compare, verify, repair, pin, prune, serve.

Exit codes: 0 done, 1 failed (diff: different), 2 usage, 3 not found, 4 damaged, 5 refused (it would
lose data), 6 ranks hang or are gone (health), 7 the checkpoint is another run's."""

app = typer.Typer(
    help=_HELP,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it prints local variables, which may hold secrets
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"ckpt {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


app.command("list")(command(list_command))
app.command("show")(command(show_command))
app.command("diff")(command(diff_command))
app.command("verify")(command(verify_command))
app.command("repair")(command(repair_command))
app.command("prune")(command(prune_command))
app.command("sweep")(command(sweep_command))
app.command("pin")(command(pin_command))
app.command("unpin")(command(unpin_command))
app.command("runs")(command(runs_command))
app.command("status")(command(status_command))
app.command("health")(command(health_command))
app.command("recovery")(command(recovery_command))
app.command("goodput")(command(goodput_command))
app.command("prefetch")(command(prefetch_command))
app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(serve_command)


def run() -> None:
    """Entry point of ``ckpt`` and ``python -m ckpt.cli``."""
    app(prog_name="ckpt")
