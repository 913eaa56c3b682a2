"""file:// -- a durable store in a directory: local disk or a shared file system.

One file per key. A value appears by rename (or, for ``put_new``, by hard link) of a finished and
fsynced temporary file in the same folder, so ST1-ST3 hold also across a power failure.
A key cannot be another key's folder: ``a`` and ``a/b`` exclude each other here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ckpt.clock import Clock, SystemClock
from ckpt.digest import Buffer
from ckpt.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.storage.base import ObjectInfo
from ckpt.storage.durable import TEMP_PREFIX, fsync_dir, make_dirs, new_file, os_error, sync_names

__all__ = ["LocalStore"]

# What a file system without hard links answers (FAT, several FUSE ones).
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_PUT_TRIES = 32
# Writers of a large file touch it every few milliseconds, so an hour of silence is a crash.
_LEFTOVER_S = 3600.0


class LocalStore:
    """See the module and :class:`ckpt.storage.base.Store`. Safe for threads, processes and hosts.

    Args:
        root: directory of the run; created by the first put.
        clock: tells how old a crashed writer's leftover is.
    """

    def __init__(self, root: Path, *, clock: Clock | None = None) -> None:
        self._root = root.absolute()
        self._clock = clock or SystemClock()
        self._conditional: bool | None = None

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if "\0" in key or any(part in ("", ".", "..") or part.startswith(TEMP_PREFIX) for part in parts):
            raise InvalidInputError("not a legal key for a directory store", key=key)
        return self._root.joinpath(*parts)

    def _write(self, key: str, pieces: Iterable[Buffer], place: Callable[[Path, Path], None]) -> None:
        path = self._path(key)
        # A delete in another process may remove the folder, empty for a moment, between our two calls.
        for _ in range(_PUT_TRIES):
            make_dirs(path.parent)
            try:
                with new_file(path.parent, pieces) as temp:
                    place(temp, path)
            except FileNotFoundError:
                continue
            except IsADirectoryError as error:
                raise InvalidInputError("the key is the folder of another key", key=key) from error
            except OSError as error:
                raise os_error(error, path) from error
            # No folder any more: somebody deleted the value after us, and the folder with it.
            with contextlib.suppress(NotFoundError):
                fsync_dir(path.parent)
            return
        raise UnavailableError("the folder of the key keeps being removed", key=key, path=path)

    def put(self, key: str, data: Buffer) -> None:
        self._write(key, (data,), _replace)

    def put_new(self, key: str, data: Buffer) -> None:
        """Create ``key`` by hard link: one atomic step that fails if the name exists, also on NFS.

        Where the file system has no hard links it checks, then renames: not safe against racers, and
        :meth:`probe_conditional` says so.
        """
        place = _link if self.probe_conditional() else _check_and_replace
        try:
            self._write(key, (data,), place)
        except ConflictError as error:
            with contextlib.suppress(NotFoundError):
                self.head(key)  # the caller may build on what is there
            raise ConflictError("the object exists", key=key, url=self.url) from error

    def put_parts(
        self, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int, concurrency: int
    ) -> None:
        del most_nbytes, part_nbytes, concurrency  # a file has no parts; the kernel keeps the disk busy
        self._write(key, pieces, _replace)

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            raise self._read_error(error, key) from error

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        if start < 0 or nbytes < 0:
            raise InvalidInputError("a range must not be negative", key=key, start=start, nbytes=nbytes)
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._read_error(error, key) from error
        try:
            if (size := os.fstat(fd).st_size) < start + nbytes:
                raise self._short(key, start + nbytes, size)
            data = bytearray(nbytes)
            done = 0
            while done < nbytes:
                count = os.preadv(fd, [memoryview(data)[done:]], start + done)
                if count == 0:  # cut while we read
                    raise self._short(key, start + nbytes, start + done)
                done += count
        except OSError as error:
            raise self._read_error(error, key) from error
        finally:
            os.close(fd)
        return data

    def read_parts(self, key: str, start: int, parts: Sequence[memoryview]) -> bytes:
        """See :class:`ckpt.storage.base.ReadsFiles`."""
        from ckpt.storage.scattered import read_parts_at  # loads numpy, which commands that list do without

        wanted = sum(map(len, parts))
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                count, found = read_parts_at(fd, start, parts)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._read_error(error, key) from error
        if count != wanted:
            raise self._short(key, start + wanted, start + count)
        return found

    def _short(self, key: str, end: int, size: int) -> CorruptError:
        return CorruptError(
            "the object is shorter than the range asked for",
            code="short-object",
            key=key,
            end=end,
            object_nbytes=size,
        )

    def head(self, key: str) -> ObjectInfo:
        """As the contract says. What it tells of survives a power cut, even where its writer was killed."""
        info = self._head(key)
        try:
            sync_names(self._path(key))
        except OSError as error:
            raise self._read_error(error, key) from error
        return info

    def _head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        try:
            status = path.stat()
        except OSError as error:
            raise self._read_error(error, key) from error
        if stat.S_ISDIR(status.st_mode):
            raise NotFoundError("no such object", key=key, url=self.url)
        return ObjectInfo(key=key, nbytes=status.st_size, modified_at=status.st_mtime)

    def _read_error(self, error: OSError, key: str) -> Exception:
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return NotFoundError("no such object", key=key, url=self.url)
        return os_error(error, self._root / key)

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        """Yield as the contract says. Reads names folder by folder; stats only what it yields.

        What lies in the folder that the prefix names survives a power cut, as after :meth:`head`.
        """
        folder, _, start = prefix.rpartition("/")
        self._settle_names(self._root / folder)
        count = 0
        for key in self._walk(folder + "/" if folder else "", start):
            if limit is not None and count >= limit:
                return
            try:
                yield self._head(key)
            except NotFoundError:  # deleted since its folder was read: as good as never seen
                continue
            count += 1

    @staticmethod
    def _settle_names(folder: Path) -> None:
        try:
            sync_names(folder)
            fsync_dir(folder)
        except (FileNotFoundError, NotADirectoryError, NotFoundError):
            return  # nothing is there
        except UnavailableError as error:
            if error.code != "denied":  # where we may only read, we have not put it
                raise
        except OSError as error:
            raise os_error(error, folder) from error

    def list_dirs(self, prefix: str) -> Iterator[str]:
        return (name[:-1] for name in self._names(prefix, "") if name.endswith("/"))

    def _names(self, folder: str, start: str) -> list[str]:
        """What is in ``folder`` and begins with ``start``; folders with their slash, in the order of keys."""
        try:
            with os.scandir(self._root / folder) as entries:
                names = [
                    (entry.name + "/" if entry.is_dir() else entry.name)
                    for entry in entries
                    if entry.name.startswith(start) and not entry.name.startswith(TEMP_PREFIX)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise os_error(error, self._root / folder) from error
        return sorted(names)  # a folder sorts with its slash: that is the byte order of whole keys

    def _walk(self, folder: str, start: str) -> Iterator[str]:
        for name in self._names(folder, start):
            if name.endswith("/"):
                yield from self._walk(folder + name, "")
            else:
                yield folder + name

    def delete(self, keys: Iterable[str]) -> None:
        """Delete, make it durable, and remove folders that became empty."""
        folders: set[Path] = set()
        for key in keys:
            path = self._path(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise os_error(error, path) from error
            folders.add(path.parent)
        for folder in folders:
            self._settle(folder)

    def _settle(self, folder: Path) -> None:
        """fsync ``folder``, or remove it and its empty parents up to the root and fsync what is left."""
        while folder != self._root:
            try:
                self._remove_leftovers(folder)
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # not empty, or not ours to remove: tidiness is no reason to fail
                break
            folder = folder.parent
        with contextlib.suppress(NotFoundError):  # another process removed it after us
            fsync_dir(folder)

    def _remove_leftovers(self, folder: Path) -> None:
        """Remove what crashed writers left in a folder that holds nothing else."""
        files = list(folder.iterdir())
        if not all(file.name.startswith(TEMP_PREFIX) for file in files):
            return
        for file in files:
            if file.stat().st_mtime < self._clock.now() - _LEFTOVER_S:
                file.unlink()

    def abort_uploads(self, *, before: float, dry_run: bool) -> int:
        """Remove temporary files that crashed writers left before ``before``; see ``HasUploads``."""
        count = 0
        for folder, _, names in os.walk(self._root):
            for path in (Path(folder, name) for name in names if name.startswith(TEMP_PREFIX)):
                try:
                    if path.stat().st_mtime < before:
                        count += 1
                        if not dry_run:
                            path.unlink()
                except FileNotFoundError:  # its writer lives, and has ended
                    continue
                except OSError as error:
                    raise os_error(error, path) from error
        return count

    def probe_conditional(self) -> bool:
        """Return whether the file system can hard-link, which is what ``put_new`` stands on."""
        if self._conditional is None:
            key = f"probe/{os.urandom(12).hex()}"
            try:
                self._write(key, (b"",), _link)
                self._write(key, (b"",), _link)
            except ConflictError:
                self._conditional = True
            except UnavailableError as error:
                cause = error.__cause__
                if not (isinstance(cause, OSError) and cause.errno in _NO_LINKS):
                    raise
                self._conditional = False
            else:
                self._conditional = False
            self.delete([key])
        return self._conditional

    def close(self) -> None:
        """Nothing to release."""


def _replace(temp: Path, path: Path) -> None:
    temp.replace(path)


def _link(temp: Path, path: Path) -> None:
    path.hardlink_to(temp)


def _check_and_replace(temp: Path, path: Path) -> None:
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temp.replace(path)
