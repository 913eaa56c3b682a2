"""Durable file writes: temporary name, fsync, rename, fsync of the directory.

The one place that knows the order. After a crash of the process or of the host a name is either
absent (or still the old file), or it holds the complete new contents.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ckpt.clock import random_bytes
from ckpt.digest import Buffer
from ckpt.errors import CkptError, ConflictError, InvalidInputError, NotFoundError, UnavailableError

__all__ = [
    "TEMP_PREFIX",
    "fsync_dir",
    "make_dirs",
    "new_file",
    "os_error",
    "sync_names",
    "write_all",
    "write_durably",
]

TEMP_PREFIX = ".tmp-"
"""File names that begin so are unfinished writes; one that is older than any live writer may be removed."""

_WRITE_NBYTES = 8 << 20
_MKDIR_TRIES = 32
_MOST_KNOWN = 4096
_known: set[tuple[str, int]] = set()  # (path, inode) whose names this process knows to be durable

_CODES = {
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "no-space",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
}


def os_error(error: OSError, path: str | os.PathLike[str]) -> CkptError:
    """Translate an OSError: absence, existence, or unavailable (codes ``no-space``, ``denied``).

    The context names the path and, as ``errno``, what the kernel said (``EIO``: the disk is failing).
    """
    if isinstance(error, FileNotFoundError):
        return NotFoundError("no such file", path=path)
    if isinstance(error, FileExistsError):
        return ConflictError("the file exists", path=path)
    reason = os.strerror(error.errno) if error.errno else str(error)
    code = _CODES.get(error.errno or 0, "unavailable")
    name = errno.errorcode.get(error.errno or 0, "")
    return UnavailableError("the file system refused", code=code, path=path, errno=name, reason=reason)


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make creations, renames and removals in the directory ``path`` durable. Blocks on the disk.

    Raises:
        NotFoundError, UnavailableError: see :func:`os_error`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise os_error(error, path) from error
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for directories; there is nothing better to do.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise os_error(error, path) from error
    finally:
        os.close(fd)


def make_dirs(path: Path, *, mode: int = 0o777) -> None:
    """Create the directory ``path`` and its missing parents: their names are durable when this returns.

    One that is there already may be so new that whoever made it has not synced its name yet, or has died
    before that. So those names are synced as well, once in the life of this process.

    Raises:
        InvalidInputError: a parent is a file.
        UnavailableError: the file system refused.
    """
    # Another process may remove a parent, empty for a moment, between our steps: begin again.
    for _ in range(_MKDIR_TRIES):
        missing = []
        folder = path
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        try:
            sync_names(folder)
            for folder in reversed(missing):
                folder.mkdir(mode, exist_ok=True)
                fsync_dir(folder.parent)
                _note(folder)
        except (FileNotFoundError, NotFoundError):
            continue
        except (FileExistsError, NotADirectoryError) as error:
            if isinstance(error, FileExistsError) and not _is_occupied(folder):
                continue  # it was a directory, made and removed by another process
            raise InvalidInputError("a file is where a directory is needed", path=folder) from error
        except OSError as error:
            raise os_error(error, folder) from error
        return
    raise UnavailableError("the directory keeps being removed", path=path)


def sync_names(path: Path) -> None:
    """Make the names of ``path`` and of the directories above it durable, up to where it is mounted.

    Does nothing for those that this process has seen to already.

    Raises:
        FileNotFoundError: there is no such path.
        UnavailableError: the file system refused; not where the directory above is closed to us, since then
            we have not made the name.
    """
    device = path.stat().st_dev
    unsynced: list[Path] = []
    for here in (path, *path.parents):
        if here == here.parent or _key(here) in _known or here.parent.stat().st_dev != device:
            break
        unsynced.append(here)
    for here in reversed(unsynced):
        try:
            fsync_dir(here.parent)
        except UnavailableError as error:
            if error.code != "denied":
                raise
        _note(here)


def _key(path: Path) -> tuple[str, int]:
    return os.fspath(path), path.stat().st_ino


def _note(path: Path) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known.add(_key(path))


def _is_occupied(path: Path) -> bool:
    """Whether ``path`` is something else than a directory. One stat: a removal cannot come between two."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(mode) and not path.is_dir()  # a link may lead to a directory


def write_all(file: BinaryIO, data: Buffer) -> None:
    """Write ``data`` in pieces without copying it. ``file`` must be unbuffered."""
    view = memoryview(data).cast("B")
    start = 0
    while start < len(view):
        start += file.write(view[start : start + _WRITE_NBYTES])


@contextlib.contextmanager
def new_file(folder: Path, pieces: Iterable[Buffer]) -> Iterator[Path]:
    """Give a temporary file in ``folder`` that holds ``pieces``, fsynced; remove what is left of it at exit.

    No piece is asked for before the file exists. The body moves it to its place by rename or link.
    Raises OSError as it comes.
    """
    temp = folder / f"{TEMP_PREFIX}{random_bytes(12).hex()}"
    try:
        with temp.open("xb", buffering=0) as file:
            for piece in pieces:
                write_all(file, piece)
            os.fsync(file.fileno())
        yield temp
    finally:
        with contextlib.suppress(FileNotFoundError):
            temp.unlink()


def write_durably(path: str | os.PathLike[str], data: Buffer) -> None:
    """Create or replace the file ``path`` with ``data``. Blocks until it is durable.

    The directory must exist. A reader sees the old contents or the new, never a mixture.

    Raises:
        NotFoundError: the directory does not exist.
        UnavailableError: the file system refused (codes ``no-space``, ``denied``); the old file, if any,
            is untouched.
    """
    target = Path(path)
    try:
        with new_file(target.parent, (data,)) as temp:
            temp.replace(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise os_error(error, target) from error
