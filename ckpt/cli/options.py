"""Options that commands share, declared once, and the border where errors become exit codes."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ckpt.errors import (
    CkptError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
    TimeoutExceededError,
    UnavailableError,
)

__all__ = [
    "EXIT_DAMAGED",
    "EXIT_DIFFERENT",
    "EXIT_FAILED",
    "EXIT_NOT_FOUND",
    "EXIT_OTHER_RUN",
    "EXIT_REFUSED",
    "EXIT_UNHEALTHY",
    "EXIT_USAGE",
    "CheckpointArgument",
    "OutputOptions",
    "ServerOptions",
    "StoreOptions",
    "UrlArgument",
    "agreed",
    "command",
    "exit_code",
]

EXIT_FAILED = 1
EXIT_DIFFERENT = 1  # of `ckpt diff`, as of diff(1)
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_DAMAGED = 4
EXIT_REFUSED = 5
EXIT_UNHEALTHY = 6
EXIT_OTHER_RUN = 7

_EXIT_CODES: tuple[tuple[type[CkptError], int], ...] = (
    (InvalidInputError, EXIT_USAGE),
    (NotFoundError, EXIT_NOT_FOUND),
    (CorruptError, EXIT_DAMAGED),
    (RefusedError, EXIT_REFUSED),
)

# What to do next, by code, else by class, where the message does not say so itself.
_HINTS_BY_CODE: dict[str, str] = {
    "no-checkpoint": "`ckpt list URL` shows what there is",
    "no-run": "check the URL; `ckpt runs ROOT` shows the runs below a root",
    "empty-store": "check URL, endpoint (AWS_ENDPOINT_URL, --endpoint-url) and credentials",
    "other-run": "`ckpt show URL ID` says whose it is; docs/recovery.md, section 8, how to move a run",
    "grace": "give --older-than 1h or more; --force where nobody writes to the run",
    "denied": "check the credentials (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...) of whoever opens the store, this "
    "command or the server, and its rights below the URL",
    "unreachable": "check the endpoint (AWS_ENDPOINT_URL, --endpoint-url) and whether the store is up; "
    "nothing is lost: what is sealed waits on the nodes",
    "no-bucket": "check the URL; the bucket has to be created by hand",
    "retention": "give --keep-last N with N at least 1, or name the checkpoints to delete",
    "latest-damaged": "`ckpt verify URL` shows the damage; restore or train past it before pruning",
}
_HINTS: dict[type[CkptError], str] = {
    CorruptError: "`ckpt verify URL --all --deep` shows all damage, `ckpt repair URL` mends it from nodes",
    UnavailableError: "check endpoint, credentials and network, then try again",
    TimeoutExceededError: "see whether the server is alive (`ckpt status`), then try again",
}

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="URL of the run, e.g. s3://bucket/run; or a directory.", show_default=False
    ),
]
CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help='"latest", a step ("12000"), or an id.')
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Whom to ask instead of the store."""

    server: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            envvar="CKPT_SERVER",
            help="Ask this staging server (unix:/path or host:port) instead of the store.",
            rich_help_panel="Server",
        ),
    ] = ""
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the server's token.", rich_help_panel="Server"),
    ] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="PEM file of the authority of its certificate.", rich_help_panel="Server"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to open the store, and where this node stages."""

    endpoint_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Endpoint of an S3-compatible store.", rich_help_panel="Direct access"
        ),
    ] = None
    option: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="More options of the store, e.g. region=eu-west-1; repeatable. AWS_* works by itself.",
            rich_help_panel="Direct access",
        ),
    ] = field(default_factory=list)
    staging: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Staging directory in which to look for local copies (default: $CKPT_STAGING).",
            rich_help_panel="Direct access",
        ),
    ] = None

    def as_mapping(self) -> dict[str, str]:
        """Return the options of ``open_store``. Raises InvalidInputError."""
        options: dict[str, str] = {}
        for item in self.option:
            key, separator, value = item.partition("=")
            if not key or not separator:
                raise InvalidInputError("--option takes KEY=VALUE", code="options", option=item)
            options[key] = value
        if self.endpoint_url:
            options["endpoint_url"] = self.endpoint_url
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """For whom the output is."""

    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel="Output")
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel="Output")
    ] = False


def exit_code(error: CkptError) -> int:
    """Return the exit code that stands for ``error``."""
    if error.code == "other-run":
        return EXIT_OTHER_RUN
    return next((code for cls, code in _EXIT_CODES if isinstance(error, cls)), EXIT_FAILED)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make ``function`` a command: expand its option groups, turn errors into exit codes.

    A keyword parameter whose annotation is one of the dataclasses above becomes one option per field;
    typer itself would need them repeated in every signature. One parameter must be ``OutputOptions``.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        group = groups.get(parameter.name)
        parameters += (
            _expand(group) if group is not None else [parameter.replace(annotation=hints[parameter.name])]
        )

    @functools.wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{item.name: values.pop(item.name) for item in fields(group)})
        output = next(value for value in values.values() if isinstance(value, OutputOptions))
        try:
            function(**values)
        except CkptError as error:
            _report(error, output)
            raise typer.Exit(exit_code(error)) from None
        except (typer.Exit, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the user's border: a bug is one line, too
            _report(_bug(error), output)
            raise typer.Exit(EXIT_FAILED) from None

    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(text.replace("\n", " ") for text in paragraphs)  # typer keeps line breaks
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _expand(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default_factory() if callable(item.default_factory) else item.default,
            annotation=hints[item.name],
        )
        for item in fields(group)
    ]


def agreed(question: str) -> bool:
    """Ask, where somebody is there to answer; a script meant what it wrote."""
    from ckpt.cli.render import error_console

    if not sys.stdin.isatty():
        return True
    answer = error_console().input(f"{question} [y/N] ")
    if answer.strip().lower() in ("y", "yes"):
        return True
    error_console().print("nothing was deleted")
    return False


def _bug(cause: Exception) -> CkptError:
    error = CkptError(
        "the command failed in a way it should not; --debug shows where, please report it", reason=repr(cause)
    )
    error.__cause__ = cause
    return error


def _hint(error: CkptError) -> str | None:
    """Return what to do next, where the message does not say it."""
    if isinstance(error, UnavailableError) and "target" in error.context:
        return (
            "see that the server runs (`ckpt serve`, or a trainer with an embedded one: its log is "
            "server.log in the staging directory) and that --server or CKPT_SERVER is right; "
            "--server '' asks the store itself"
        )
    by_class = (text for cls, text in _HINTS.items() if isinstance(error, cls))
    return _HINTS_BY_CODE.get(error.code) or next(by_class, None)


def _report(error: CkptError, output: OutputOptions) -> None:
    # Here: commands that succeed on a pipe never need them.
    from ckpt.cli.render import error_console, print_json

    console = error_console()
    if output.debug:
        console.print("".join(traceback.format_exception(error)), end="")
    console.print(f"error: {error.message}", style="red")
    for key, value in sorted(error.context.items()):  # the wire keeps no order
        console.print(f"  {key}: {value}")
    if hint := _hint(error):
        console.print(f"  try: {hint}")
    if output.json:
        from ckpt.cli.describe import problem_of

        print_json({"error": problem_of(error)})
