"""Where the keys of encrypted chunks come from: a file, or a command that asks a key service.

``CKPT_ENCRYPTION_KEYS``     file of mode 0600, a key per line: name, then 64 hexadecimal digits
``CKPT_ENCRYPTION_COMMAND``  is run with a key's name as its last argument and prints the 64 digits
``CKPT_ENCRYPTION_KEY``      name of the key that new chunks are encrypted with; unset: they are not

Both sources may be set: the file is looked at first. Without ``CKPT_ENCRYPTION_KEY`` a process only reads.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ckpt.errors import InvalidInputError
from ckpt.format.crypt import KEY_NBYTES, ChunkKey

__all__ = ["KeySource", "environment_keys"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_COMMAND_S = 30.0


class KeySource:
    """Keys by name. Thread-safe; a key that was found is remembered.

    Args:
        path: key file.
        command: shell-like words of the command; run without a shell.
        writing: name of the key for new chunks; None: they are not encrypted.

    Raises:
        InvalidInputError: code "encryption": the file cannot be used.
    """

    def __init__(self, path: Path | None, command: str | None, writing: str | None) -> None:
        self._command = shlex.split(command) if command else []
        self._writing = writing
        self._lock = threading.Lock()
        self._keys = _read_keys(path) if path is not None else {}  # guarded by self._lock

    def writing(self) -> ChunkKey | None:
        """Return the key for new chunks. Raises InvalidInputError where it cannot be had."""
        return self._named(self._writing) if self._writing else None

    def labelled(self, label: str) -> ChunkKey:
        """Return the key that a chunk table names.

        Raises:
            InvalidInputError: code "encryption-key": there is none of that name, or it is another one than
                the chunk was encrypted with.
        """
        key = self._named(label.rpartition("#")[0])
        if key.label != label:
            raise InvalidInputError(
                "the key of this name is another one than the checkpoint was encrypted with",
                code="encryption-key",
                wanted=label,
                found=key.label,
            )
        return key

    def _named(self, name: str) -> ChunkKey:
        if _NAME.fullmatch(name) is None:
            raise InvalidInputError("not the name of a key", code="encryption-key", key=name)
        with self._lock:
            if name not in self._keys:
                self._keys[name] = self._ask(name)
            return self._keys[name]

    def _ask(self, name: str) -> ChunkKey:
        if not self._command:
            raise InvalidInputError(
                "the checkpoint is encrypted and its key is not here: set CKPT_ENCRYPTION_KEYS or "
                "CKPT_ENCRYPTION_COMMAND",
                code="encryption-key",
                key=name,
            )
        try:
            done = subprocess.run(
                [*self._command, name], capture_output=True, timeout=_COMMAND_S, check=True, text=True
            )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            code = getattr(error, "returncode", None)
            # Never its output, which may hold what is secret.
            raise InvalidInputError(
                "the key command failed", code="encryption-key", key=name, exit=code
            ) from None
        return ChunkKey(name, _secret(done.stdout.strip(), f"key command, {name}"))


def _read_keys(path: Path) -> dict[str, ChunkKey]:
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:
        raise InvalidInputError("cannot read the key file", code="encryption", path=path) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInputError("others can read the key file; chmod 600", code="encryption", path=path)
    found: dict[str, ChunkKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or _NAME.fullmatch(words[0]) is None or words[0] in found:
            raise InvalidInputError(
                "a line of the key file is not a new name and a key",
                code="encryption",
                path=path,
                line=number,
            )
        found[words[0]] = ChunkKey(words[0], _secret(words[1], f"{path}, line {number}"))
    return found


def _secret(text: str, where: str) -> bytes:
    if _HEX.fullmatch(text) is None:
        raise InvalidInputError(
            "a key has 64 hexadecimal digits", code="encryption", where=where, nbytes=KEY_NBYTES
        )
    return bytes.fromhex(text)


def environment_keys(environment: Mapping[str, str] | None = None) -> KeySource:
    """Return the source that the environment describes; the same one while that stays the same."""
    found = os.environ if environment is None else environment
    names = ("CKPT_ENCRYPTION_KEYS", "CKPT_ENCRYPTION_COMMAND", "CKPT_ENCRYPTION_KEY")
    return _source(*(found.get(name) or None for name in names))


@lru_cache(maxsize=4)
def _source(path: str | None, command: str | None, writing: str | None) -> KeySource:
    return KeySource(Path(path) if path else None, command, writing)
