"""Any other URL through fsspec: the compatibility engine, slower and with weaker promises than the others.

What each kind of file system promises here:

- Object stores (``gs``, ``abfs`` ...): a put is atomic; ``put_new`` uses the service's condition.
- Everything else (``sftp``, ``hdfs``, ``smb`` ...): a put writes a temporary file and moves it, atomic where
  the file system's move is; ``put_new`` checks, then puts (``probe_conditional`` is False); fsspec offers
  no fsync, so ST2 is what the far side does by itself.

Listings never come from fsspec's cache, and never from its ``find``/``walk``, which turn errors into
"nothing there". S3 has its own class, :mod:`ckpt.storage.s3fs_store`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import fsspec

from ckpt.clock import random_bytes
from ckpt.digest import Buffer
from ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from ckpt.storage.base import ObjectInfo
from ckpt.storage.conditional import probe_create
from ckpt.storage.durable import TEMP_PREFIX
from ckpt.storage.parts import part_nbytes_for

__all__ = ["FORCE", "FsspecStore", "open_filesystem"]

FORCE = "fsspec+"
"""Before a URL: use this engine although another one knows the scheme."""

# File systems whose single put is atomic; and those whose ``mode="create"`` the service itself decides.
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})


def open_filesystem(protocol: str, options: Mapping[str, Any]) -> Any:
    """Make a private fsspec file system without caches.

    Args:
        protocol: fsspec's name of it.
        options: its storage options; text that is a JSON object, list or boolean is decoded first.

    Raises:
        InvalidInputError: unknown protocol, its package is not installed, or it refuses the options.
    """
    decoded = {name: _decode(value) for name, value in options.items()}
    try:
        return fsspec.filesystem(
            protocol, **decoded, skip_instance_cache=True, use_listings_cache=False, asynchronous=False
        )
    except (ImportError, ValueError, TypeError) as error:
        raise InvalidInputError(
            "fsspec cannot open this kind of URL", protocol=protocol, reason=str(error)
        ) from error


def _decode(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("{", "[", "true", "false")):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


class FsspecStore:
    """See the module and :class:`ckpt.storage.base.Store`. Safe for threads, not across a fork.

    Args:
        url: ``protocol://...``, also with ``fsspec+`` before it.
        options: storage options of the file system.
        filesystem: use this one instead of opening one.
    """

    def __init__(
        self, url: str, options: Mapping[str, str] | None = None, *, filesystem: Any | None = None
    ) -> None:
        self._url = url.rstrip("/")
        location = self._url.removeprefix(FORCE)
        protocol = location.partition("://")[0]
        self._fs = filesystem if filesystem is not None else open_filesystem(protocol, options or {})
        self._root: str = self._fs._strip_protocol(location).rstrip("/")
        self._atomic = protocol in _ATOMIC
        self._conditional: bool | None = None if protocol in _CONDITIONAL else False
        self._pid = os.getpid()

    @property
    def url(self) -> str:
        return self._url

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise InvalidInputError(
                "the store was opened before this process was forked; open it again", code="forked"
            )
        try:
            yield
        except CkptError:
            raise
        except Exception as error:  # a file system raises whatever its client raises
            raise self._translate(error, key) from error

    def _translate(self, error: Exception, key: str) -> CkptError:
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return NotFoundError("no such object", key=key, url=self._url)
        if isinstance(error, FileExistsError):
            return ConflictError("the object exists", key=key, url=self._url)
        denied = isinstance(error, PermissionError)
        return UnavailableError(
            "access to the file system is denied" if denied else "the file system did not do it",
            code="denied" if denied else "unavailable",
            key=key,
            url=self._url,
            reason=" ".join(f"{type(error).__name__}: {error}".split())[:500],
        )

    def put(self, key: str, data: Buffer) -> None:
        with self._errors(key):
            self._place(key, lambda path: self._fs.pipe_file(path, bytes(data)))

    def _place(self, key: str, write: Callable[[str], None]) -> None:
        path = self._path(key)
        if self._atomic:
            write(path)
            return
        folder = path.rpartition("/")[0]
        self._fs.makedirs(folder, exist_ok=True)
        temp = f"{folder}/{TEMP_PREFIX}{random_bytes(12).hex()}"
        try:
            write(temp)
            self._fs.mv(temp, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(temp)
            raise

    def _create(self, key: str, data: Buffer) -> None:
        with self._errors(key):
            self._fs.pipe_file(self._path(key), bytes(data), mode="create")

    def put_new(self, key: str, data: Buffer) -> None:
        """Create ``key`` by the service's condition; without one, check, then put (racers can both win)."""
        if self.probe_conditional():
            self._create(key, data)
            return
        with contextlib.suppress(NotFoundError):
            self.head(key)
            raise ConflictError("the object exists", key=key, url=self._url)
        self.put(key, data)

    def put_parts(
        self, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int, concurrency: int
    ) -> None:
        """Write through a buffered file, one part at a time; ``concurrency`` is fsspec's own affair."""
        del concurrency
        part = part_nbytes_for(most_nbytes, part_nbytes)

        def write(path: str) -> None:
            file = self._fs.open(path, "wb", block_size=part)
            try:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    for start in range(0, len(view), part):
                        file.write(view[start : start + part])
            except BaseException:
                with contextlib.suppress(Exception):
                    if self._atomic:
                        # Closing would complete the object with what there is so far.
                        file.closed = True
                        file.discard()
                    else:
                        file.close()
                raise
            file.close()

        with self._errors(key):
            self._place(key, write)

    def get(self, key: str) -> bytes:
        with self._errors(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        if start < 0 or nbytes < 0:
            raise InvalidInputError("a range must not be negative", key=key, start=start, nbytes=nbytes)
        end = start + nbytes
        data: Buffer = b""
        failure: UnavailableError | None = None
        if nbytes:
            try:
                with self._errors(key):
                    data = self._fs.cat_file(self._path(key), start=start, end=end)
            except UnavailableError as error:
                failure = error  # possibly "range not satisfiable": the size below tells
        if nbytes and len(data) == nbytes:
            return data
        size = self.head(key).nbytes
        if size < end:
            raise CorruptError(
                "the object is shorter than the range asked for",
                code="short-object",
                key=key,
                end=end,
                object_nbytes=size,
            )
        if len(data) == size:  # the service ignored the range and sent everything
            return memoryview(data)[start:end]
        if nbytes:
            raise failure or UnavailableError("the service sent another number of bytes", key=key)
        return b""

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            self._fs.invalidate_cache()
            entry = self._fs.info(self._path(key))
        if entry["type"] != "file":
            raise NotFoundError("no such object", key=key, url=self._url)
        return _info(key, entry)

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        """Yield as the contract says; reads folder by folder, only those the prefix leaves open."""
        folder, _, start = prefix.rpartition("/")
        with self._errors(prefix):
            self._fs.invalidate_cache()
        yield from itertools.islice(self._walk(folder, start), limit)

    def list_dirs(self, prefix: str) -> Iterator[str]:
        with self._errors(prefix):
            self._fs.invalidate_cache()
        return (name[:-1] for name in sorted(self._entries(prefix.rstrip("/"), "")) if name.endswith("/"))

    def _entries(self, folder: str, start: str) -> dict[str, Any]:
        """What is in ``folder`` and begins with ``start``, by name; folders have a slash at the end."""
        path = self._path(folder) if folder else self._root
        try:
            with self._errors(folder):
                entries = self._fs.ls(path, detail=True)
        except NotFoundError:
            return {}
        found: dict[str, Any] = {}
        for entry in entries:
            full = entry["name"].rstrip("/")
            name = full.rpartition("/")[2]
            if full != path.rstrip("/") and name.startswith(start) and not name.startswith(TEMP_PREFIX):
                # A folder sorts with its slash: that is the byte order of whole keys.
                found[name + "/" if entry["type"] == "directory" else name] = entry
        return found

    def _walk(self, folder: str, start: str) -> Iterator[ObjectInfo]:
        found = self._entries(folder, start)
        base = f"{folder}/" if folder else ""
        for name in sorted(found):
            if name.endswith("/"):
                yield from self._walk(base + name.rstrip("/"), "")
            else:
                yield _info(base + name, found[name])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with contextlib.suppress(NotFoundError), self._errors(key):
                self._fs.rm_file(self._path(key))

    def probe_conditional(self) -> bool:
        if self._conditional is None:
            self._conditional = probe_create(self._create, self.delete)
        return self._conditional

    def close(self) -> None:
        """The file system closes its connections with its last reference."""


def _info(key: str, entry: Mapping[str, Any]) -> ObjectInfo:
    when = entry.get("LastModified") or entry.get("mtime") or entry.get("updated") or entry.get("created")
    if isinstance(when, datetime):
        when = when.timestamp()
    return ObjectInfo(
        key=key,
        nbytes=int(entry["size"]),
        modified_at=float(when) if isinstance(when, int | float) else 0.0,
    )
