"""Who may do what: the tokens of a server, their scopes and the runs they are good for.

A tokens file is TOML, one table per token:

    [[token]]
    name = "trainer-a"                       # for the log; never the token itself
    sha256 = "9f86d0..."                     # of the token, or:
    token = "..."                            # the token itself, if only its owner can read the file
    scopes = ["write"]                       # read, write (includes read), admin (includes both), peer
    runs = ["s3://bucket/team-a/*"]          # default: every run

In a pattern ``*`` stands for any text without a slash, ``**`` for any text. The file is read again when it
changes; one that cannot be read leaves what was known before in force.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ckpt.clock import Clock
from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger

__all__ = ["MIN_TOKEN_CHARS", "Grant", "Scope", "Tokens", "parse_tokens"]

MIN_TOKEN_CHARS = 16
_LOOK_S = 1.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What a URL may hold that is compared with a pattern: nothing that a store could read in two ways.
_PLAIN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s%?#\\\x00-\x1f\x7f]+", re.ASCII)
_log = get_logger("server.tokens")


class Scope(StrEnum):
    """What a token allows."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    PEER = "peer"


_INCLUDED = {
    Scope.READ: {Scope.READ},
    Scope.WRITE: {Scope.READ, Scope.WRITE},
    Scope.ADMIN: {Scope.READ, Scope.WRITE, Scope.ADMIN},
    Scope.PEER: {Scope.PEER},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the bearer of one token may do.

    Attributes:
        name: of the token, for logs and errors.
        scopes: with all that they include.
        runs: patterns; None: every run.
    """

    name: str
    scopes: frozenset[Scope]
    runs: tuple[re.Pattern[str], ...] | None

    def is_good_for(self, url: str | None) -> bool:
        """Whether the token reaches the run at ``url``; None: the call is about all runs."""
        if self.runs is None:
            return True
        if url is None:
            return False
        url = url.rstrip("/")
        parts = url.partition("://")[2].split("/")
        if _PLAIN_URL.fullmatch(url) is None or any(part in (".", "..") for part in parts):
            return False
        if "" in parts[1:]:  # the first is empty in file:///path
            return False
        return any(pattern.fullmatch(url) for pattern in self.runs)


def everything(name: str) -> Grant:
    """What the one token of ``--token-file`` allows, and a client certificate where no token is asked for."""
    return Grant(name=name, scopes=frozenset(Scope), runs=None)


def digest_of(token: str) -> bytes:
    """SHA-256 of a token: of a long random text, so neither salt nor slow hash is needed."""
    return hashlib.sha256(token.encode()).digest()


def parse_tokens(data: bytes, *, is_private: bool, where: str) -> dict[bytes, Grant]:
    """Parse a tokens file: SHA-256 of the token -> what it allows.

    Args:
        data: the file.
        is_private: only its owner can read it, so that it may hold tokens in the clear.
        where: for errors.

    Raises:
        InvalidInputError: code "tokens": it is not what the module's text says. Never quotes a token.
    """
    try:
        entries = tomllib.loads(data.decode()).get("token")
    except ValueError as error:
        # Its message may quote the line.
        raise InvalidInputError("the tokens file is not TOML", code="tokens", path=where) from _no_text(error)
    if not isinstance(entries, list) or not entries:
        raise InvalidInputError("the tokens file has no [[token]]", code="tokens", path=where)
    found: dict[bytes, Grant] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        try:
            key, grant = _entry(entry, is_private=is_private)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(
                "a token of the tokens file is malformed",
                code="tokens",
                path=where,
                entry=number,
                reason=error,
            ) from _no_text(error)
        if key in found or grant.name in names:
            raise InvalidInputError("two tokens are the same", code="tokens", path=where, entry=number)
        found[key] = grant
        names.add(grant.name)
    return found


def _no_text(error: Exception) -> Exception:
    return type(error)() if not isinstance(error, UnicodeError) else ValueError()


def _entry(entry: Mapping[str, Any], *, is_private: bool) -> tuple[bytes, Grant]:
    unknown = set(entry) - {"name", "sha256", "token", "scopes", "runs"}
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    name = entry.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError("name: letters, digits, '.', '_' and '-', at most 64")
    scopes = entry.get("scopes")
    if not isinstance(scopes, list) or not scopes or not set(scopes) <= {str(scope) for scope in Scope}:
        raise ValueError("scopes: some of read, write, admin, peer")
    runs = entry.get("runs", ["**"])
    if not isinstance(runs, list) or not runs or not all(isinstance(item, str) and item for item in runs):
        raise ValueError("runs: a list of URL patterns")
    grant = Grant(
        name=name,
        scopes=frozenset().union(*(_INCLUDED[Scope(scope)] for scope in scopes)),
        runs=None if "**" in runs or "*" in runs else tuple(map(_pattern, runs)),
    )
    return _key(entry, is_private=is_private), grant


def _key(entry: Mapping[str, Any], *, is_private: bool) -> bytes:
    if ("sha256" in entry) == ("token" in entry):
        raise ValueError("one of sha256 and token")
    if "sha256" in entry:
        text = entry["sha256"]
        if not isinstance(text, str) or _SHA256.fullmatch(text) is None:
            raise ValueError("sha256: 64 lower-case hexadecimal digits")
        return bytes.fromhex(text)
    token = entry["token"]
    if not is_private:
        raise ValueError("a token in the clear needs a file of mode 0600; or give its sha256")
    if not isinstance(token, str) or len(token) < MIN_TOKEN_CHARS:
        raise ValueError(f"token: at least {MIN_TOKEN_CHARS} characters")
    return digest_of(token)


def _pattern(text: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*|\*)", text.rstrip("/"))
    return re.compile("".join({"*": "[^/]*", "**": ".*"}.get(piece, re.escape(piece)) for piece in pieces))


class Tokens:
    """The tokens of one server. Thread-safe.

    Args:
        single: the token of ``--token-file``, which allows everything; None: there is none.
        path: the tokens file; None: there is none.
        clock: time between looks at the file.

    Raises:
        InvalidInputError: the file cannot be used.
    """

    def __init__(self, single: str | None, path: Path | None, clock: Clock) -> None:
        self._single = {digest_of(single): everything("token-file")} if single else {}
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._version: tuple[int, ...] = ()  # guarded by self._lock
        self._looked_at = clock.monotonic()  # guarded by self._lock
        self._grants: Sequence[tuple[bytes, Grant]] = tuple(self._single.items())  # replaced as a whole
        if path is not None:
            self._version, grants = _read(path)
            self._take(grants)

    def grant_of(self, token: str) -> Grant | None:
        """Return what ``token`` allows; None: nobody knows it. Takes as long whichever it is."""
        self._look()
        sent = digest_of(token)
        found = None
        for known, grant in self._grants:
            if hmac.compare_digest(sent, known):
                found = grant
        return found

    def _take(self, grants: Mapping[bytes, Grant]) -> None:
        self._grants = tuple({**grants, **self._single}.items())

    def _look(self) -> None:
        if self._path is None:
            return
        with self._lock:
            if self._clock.monotonic() - self._looked_at < _LOOK_S:
                return
            self._looked_at = self._clock.monotonic()
            try:
                if _version(self._path.stat()) == self._version:
                    return
                self._version, grants = _read(self._path)
            except (OSError, InvalidInputError) as error:
                event(_log, logging.WARNING, "tokens.unreadable", path=self._path, error=error)
                return
            self._take(grants)
            event(_log, logging.INFO, "tokens.read", path=self._path, tokens=len(grants))


def _read(path: Path) -> tuple[tuple[int, ...], dict[bytes, Grant]]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError as error:
        raise InvalidInputError(
            "cannot read the tokens file", code="tokens", path=path, reason=error.strerror
        ) from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or status.st_uid not in (0, os.geteuid()):
        raise InvalidInputError("others can write the tokens file", code="tokens", path=path)
    is_private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return _version(status), parse_tokens(data, is_private=is_private, where=str(path))


def _version(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
