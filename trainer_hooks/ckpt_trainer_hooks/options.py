"""What the user passes to the manager, checked and completed before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from ckpt.errors import InvalidInputError
from ckpt.format.ids import split_run_url
from ckpt.storage.staging import RunConfig
from ckpt.urls import absolute_url

__all__ = [
    "audit_interval",
    "check_choice",
    "checked_options",
    "merged_items",
    "run_config",
    "with_replication",
]

_SECRET_WORDS = ("secret", "password", "token", "credential", "account_key", "sas_key", "sas_token")


def checked_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return ``options`` as they will be written to the staging directory.

    Raises:
        InvalidInputError: a secret is among them; secrets belong in the environment or a profile.
    """
    for name in options:
        if any(word in name.lower() for word in _SECRET_WORDS):
            raise InvalidInputError(
                "store options are written to disk: pass credentials by environment or profile instead",
                option=name,
            )
    return {key: str(value) for key, value in options.items()}


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInputError("not one of the allowed values", option=name, value=value, allowed=allowed)


def audit_interval(value: int | None, *, overlapped: bool) -> int:
    """Complete ``audit_every``. Raises InvalidInputError for a negative one."""
    if value is not None and value < 0:
        raise InvalidInputError("audit_every must not be negative; 0 switches the audit off", value=value)
    return (100 if overlapped else 0) if value is None else value


def merged_items(items: Mapping[str, Any], more: Mapping[str, Any]) -> MutableMapping[str, Any]:
    merged = dict(items)
    for name, item in more.items():
        if merged.get(name) is not None:
            raise InvalidInputError("item is given twice", item=name)
        merged[name] = item
    return merged


def run_config(
    url: str,
    options: Mapping[str, str] | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_local: int,
    compression: str | None = None,
) -> RunConfig:
    if compression is not None:
        check_choice("compression", compression, ("auto", "on", "off"))
    for name, value, least in (
        ("keep_last", keep_last, 1),
        ("keep_every", keep_every, 1),
        ("keep_local", keep_local, 1),
    ):
        if value is not None and value < least:
            raise InvalidInputError(
                "retention counts must be at least 1; None keeps all", option=name, value=value
            )
    if keep_every is not None and keep_last is None:
        raise InvalidInputError("keep_every needs keep_last: without it everything is kept anyway")
    full = absolute_url(url)
    if urlsplit(full).password is not None:
        raise InvalidInputError(
            "the URL is written to disk and to the log: pass credentials by environment or profile instead"
        )
    split_run_url(full)
    return RunConfig(
        url=full,
        store_options=checked_options(options or {}),
        keep_local=keep_local,
        keep_last=keep_last or 0,
        keep_every=keep_every or 0,
        compression=compression or "",
    )


def with_replication(config: RunConfig, factor: int, jump: int | None, rate: float | None) -> RunConfig:
    """Return ``config`` with replication as the user wants it.

    Raises:
        InvalidInputError: a value is out of its range, or given without replication.
    """
    for name, value, least in (
        ("replication_factor", factor, 1),
        ("replication_jump", jump, 1),
        ("replication_rate", rate, 1),
    ):
        if value is not None and value < least:
            raise InvalidInputError("replication options must be at least 1", option=name, value=value)
    if factor == 1 and (jump is not None or rate is not None):
        raise InvalidInputError(
            "replication_jump and replication_rate need a replication_factor of 2 or more"
        )
    return replace(
        config, replication_factor=factor, replication_jump=jump or 0, replication_rate=int(rate or 0)
    )
