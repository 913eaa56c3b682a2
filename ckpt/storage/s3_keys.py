"""Keys of an AWS profile as they stand now: in the credentials file, or from its ``credential_process``.

Long jobs outlive their keys. Whoever holds a store asks here again, so what was renewed meanwhile (a tool has
rewritten the file, the process hands out the next session) is used without a restart.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ckpt.errors import InvalidInputError, UnavailableError

__all__ = ["ProfileKeys", "has_keys", "read_profile", "read_profile_keys"]

_PROCESS_S = 60.0


@dataclass(frozen=True, slots=True)
class ProfileKeys:
    """Keys as they are now.

    Attributes:
        expires_at: when they end, where the source says so.
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires_at: datetime | None = None


def read_profile(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings of the profile that the environment names. Raises InvalidInputError."""
    name = environ.get("AWS_PROFILE", "default")
    config = Path(environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    shared = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    section = "default" if name == "default" else f"profile {name}"
    return _read_section(config, section) | _read_section(shared, name)


def has_keys(profile: Mapping[str, str]) -> bool:
    """Whether keys can be had from the profile."""
    is_complete = bool(profile.get("aws_access_key_id") and profile.get("aws_secret_access_key"))
    return is_complete or bool(profile.get("credential_process"))


def read_profile_keys(environ: Mapping[str, str] = os.environ) -> ProfileKeys:
    """Return the keys of the profile as they are now: those in the files, else those of its process.

    Raises:
        InvalidInputError: a file cannot be parsed.
        UnavailableError: code "denied": there are none now, or the process does not give them.
    """
    profile = read_profile(environ)
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key and secret:
        return ProfileKeys(key, secret, profile.get("aws_session_token"))
    command = profile.get("credential_process")
    if not command:
        raise UnavailableError("the AWS profile has no keys any more", code="denied")
    return _from_process(command)


def _read_section(path: Path, section: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise InvalidInputError("cannot parse the AWS configuration file", path=path) from error
    return dict(parser[section]) if parser.has_section(section) else {}


def _from_process(command: str) -> ProfileKeys:
    """What AWS calls version 1 of the answer. The output is never quoted: it holds the secret."""
    argv = shlex.split(command)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROCESS_S, check=True
        )
        answer = json.loads(done.stdout)
        ends = answer.get("Expiration")
        return ProfileKeys(
            answer["AccessKeyId"],
            answer["SecretAccessKey"],
            answer.get("SessionToken"),
            datetime.fromisoformat(ends).astimezone(UTC) if ends else None,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = "its answer is not the JSON that is expected of it"
    raise UnavailableError(
        "credential_process of the AWS profile gives no keys", code="denied", process=argv[0], reason=reason
    )
