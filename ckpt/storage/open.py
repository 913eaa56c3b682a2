"""URL and options to a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt.errors import InvalidInputError
from ckpt.storage.base import Store
from ckpt.storage.local import LocalStore
from ckpt.storage.memory import MemoryStore

__all__ = ["open_store"]


def open_store(url: str, options: Mapping[str, str] | None = None) -> Store:
    """Open the store at ``url``. Touches nothing: errors of the service come with the first call.

    Args:
        url: ``file:///dir`` or a plain path, ``memory://name``.
        options: settings of the engine, all strings.

    Raises:
        InvalidInputError: not a URL of a known kind, or an unknown option.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", str(Path(url).absolute())
    if scheme == "file":
        if not rest.startswith("/"):
            raise InvalidInputError("a file URL needs an absolute path: file:///dir", url=url)
        return LocalStore(Path(rest))
    if scheme == "memory":
        return MemoryStore(url)
    raise InvalidInputError("no engine for this kind of URL", url=url)
