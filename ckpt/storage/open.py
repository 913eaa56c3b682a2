"""URL and options to a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt.errors import InvalidInputError
from ckpt.storage.base import Store
from ckpt.storage.local import LocalStore
from ckpt.storage.memory import MemoryStore

__all__ = ["open_store"]

_OBSTORE = frozenset({"s3", "s3a", "gs", "az"})
_S3 = frozenset({"s3", "s3a"})
_FORCE_FSSPEC = "fsspec+"


def open_store(url: str, options: Mapping[str, str] | None = None) -> Store:
    """Open the store at ``url``. Sends nothing: errors of the service come with the first call.

    ======================================  ==========================================================
    URL                                     engine
    ======================================  ==========================================================
    ``file:///dir``, or a path              directory, durable
    ``memory://name``                       this process's memory
    ``s3://`` ``gs://`` ``az://``           obstore
    any of them after ``fsspec+``           fsspec (S3: s3fs)
    any other scheme                        fsspec
    ======================================  ==========================================================

    Args:
        url: where; the path is taken as it stands, without percent-decoding.
        options: ``engine`` (``obstore`` or ``fsspec``) and settings of the engine, all text; for S3
            ``endpoint_url``, ``region``, ``access_key_id``, ``secret_access_key``, ``session_token``,
            ``addressing_style``, ``upload_checksum``, ``timeout_s``, ``connect_timeout_s``, ``retries``.

    Raises:
        InvalidInputError: not a URL of a known kind, an unknown option, a missing package.
    """
    rest = dict(options or {})
    engine = rest.pop("engine", None)
    if engine not in (None, "obstore", "fsspec"):
        raise InvalidInputError("engine is obstore or fsspec", engine=engine)
    forced = url.startswith(_FORCE_FSSPEC)
    scheme, separator, path = url.removeprefix(_FORCE_FSSPEC).partition("://")
    if engine != "fsspec" and not forced:
        if not separator:
            return LocalStore(Path(url))
        if scheme == "file":
            if not path.startswith("/"):
                raise InvalidInputError("a file URL needs an absolute path: file:///dir", url=url)
            return LocalStore(Path(path))
        if scheme == "memory":
            return MemoryStore(url)
        if scheme in _OBSTORE or engine == "obstore":
            return _obstore(url, rest)
    return _fsspec(scheme, url, rest)


def _obstore(url: str, options: Mapping[str, str]) -> Store:
    # Imported here: the engine takes a tenth of a second to load and starts threads.
    from ckpt.storage.obstore_store import ObstoreStore

    return ObstoreStore(url, options)


def _fsspec(scheme: str, url: str, options: Mapping[str, str]) -> Store:
    if scheme in _S3:
        from ckpt.storage.s3fs_store import S3fsStore

        return S3fsStore(url, options)
    from ckpt.storage.fsspec_store import FsspecStore

    return FsspecStore(url, options)
