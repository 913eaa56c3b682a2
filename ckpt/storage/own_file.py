"""Files below a staging directory, opened so that nobody's link leads elsewhere.

A staging directory belongs to one user, and only that user can make names in it. Where that is not so (a
directory that was left open to others, files restored by root), a link or a pipe planted under a segment's
name would make the server upload or serve what the planter chose. So a file is opened component by component
without following links, and taken only if it is a regular file of this process's user.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ckpt.errors import CorruptError, InvalidInputError
from ckpt.storage.durable import os_error

__all__ = ["check_own_directory", "open_own"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKED = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO)


def open_own(root: Path, path: Path, flags: int = os.O_RDONLY) -> int:
    """Open the regular file ``path`` below ``root`` and return its descriptor (close-on-exec).

    Links above ``root`` are the operator's own and are followed.

    Args:
        root: a directory.
        path: of a file below it, spelled with it.
        flags: of ``os.open``.

    Raises:
        OSError: as ``os.open`` does; FileNotFoundError also where a folder is missing.
        CorruptError: code "foreign-file": a component is a link, the file is no regular file or another
            user's, or ``path`` is not below ``root``.
    """
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts:
        raise CorruptError("the path is not below the staging directory", code="foreign-file", path=path)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Not blocking: opening a pipe would wait for its other end.
        more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(parts[-1], flags | more, dir_fd=folder)
    except OSError as error:
        if error.errno in _LINKED:
            raise CorruptError(
                "a link or special file is where a staged file belongs", code="foreign-file", path=path
            ) from error
        raise
    finally:
        os.close(folder)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise CorruptError(
            "a staged file is no regular file of this user", code="foreign-file", path=path, uid=status.st_uid
        )
    return fd


def check_own_directory(path: Path) -> None:
    """Raise InvalidInputError (code "staging-unsafe") where others can make names in ``path``.

    Raises:
        UnavailableError: it cannot be looked at.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise os_error(error, path) from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidInputError(
            "others can write in the staging directory: give one that is this user's alone, such as a folder "
            "in it",
            code="staging-unsafe",
            path=path,
            uid=status.st_uid,
            mode=f"{stat.S_IMODE(status.st_mode):o}",
        )
