"""Large files past the page cache: chunks written, digested and read with O_DIRECT from threads.

A checkpoint is written once and seldom read soon; going through the page cache would cost a second
copy, throw out what training has cached, and leave the slow part to fdatasync. Where the file system
or the source memory refuses O_DIRECT (EINVAL, at open or at the first write), the same file goes on
buffered and the report says so.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ckpt.digest import DIGEST_NBYTES, digest
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.storage.own_file import open_own
from ckpt.storage.staging import os_errors

__all__ = [
    "BLOCK_NBYTES",
    "O_DIRECT",
    "ChunkReader",
    "DirectFile",
    "WriteReport",
    "aligned_buffer",
    "chunk_count",
    "round_up",
    "write_chunks",
]

BLOCK_NBYTES = 4096  # alignment of O_DIRECT addresses, offsets and lengths; enough for every common device
O_DIRECT = getattr(os, "O_DIRECT", 0)  # absent on macOS, where everything is buffered
_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR}


def round_up(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole blocks."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def chunk_count(nbytes: int, chunk_nbytes: int) -> int:
    """Return the number of chunks of a file of ``nbytes`` bytes; the last may be short."""
    return -(-nbytes // chunk_nbytes)


def aligned_buffer(nbytes: int) -> memoryview:
    """Return writable, page-aligned, zeroed memory of ``nbytes`` rounded up to whole blocks."""
    return memoryview(mmap.mmap(-1, max(round_up(nbytes), BLOCK_NBYTES)))


class DirectFile:
    """A file opened with O_DIRECT where that works. Offsets and lengths must be whole blocks.

    Used from several threads at once. OSError passes through: the caller knows what the file was for.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        flags: int,
        *,
        direct: bool = True,
        opener: Callable[[int], int] | None = None,
    ) -> None:
        open_with = opener or (lambda flags: os.open(path, flags | os.O_CLOEXEC, 0o600))
        self._direct = bool(direct and O_DIRECT)
        try:
            self.fd = open_with(flags | (O_DIRECT if self._direct else 0))
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._direct = False
            self.fd = open_with(flags)

    @property
    def direct(self) -> bool:
        """Whether the file is (still) used with O_DIRECT."""
        return self._direct

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.fd)

    def allocate(self, nbytes: int) -> None:
        """Reserve room for ``nbytes`` bytes, so that a full disk shows before the work and writers need
        not take turns to extend the file. Does nothing where the file system cannot.
        """
        if not nbytes or _fallocate(self.fd, nbytes) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_FALLOCATE:
            raise OSError(code, os.strerror(code))

    def write_all(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Releases the GIL while the device works."""
        done = 0
        while done < len(data):
            was_direct = self._direct  # before the call: another thread may fall back during it
            try:
                count = os.pwrite(self.fd, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._go_buffered()
                continue
            done += count
            if done < len(data) and done % BLOCK_NBYTES:
                self._go_buffered()  # the rest of a short write no longer begins at a block border

    def read_upto(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(buffer):
            was_direct = self._direct
            try:
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._go_buffered()
                continue
            done += count
            if count == 0:
                break
            if done % BLOCK_NBYTES:
                self._go_buffered()  # a short read, most often the end of the file
        return done

    def _go_buffered(self) -> None:
        if self._direct:
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~O_DIRECT)
            self._direct = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """What :func:`write_chunks` did.

    Attributes:
        digests: 16 bytes per chunk, in order, as ``ChunkTable.digests`` wants them.
        direct: False where the page cache had to be used.
    """

    digests: bytes
    direct: bool


def write_chunks(
    file: DirectFile, source: memoryview, nbytes: int, *, chunk_nbytes: int, threads: int
) -> WriteReport:
    """Write ``source[:nbytes]`` to ``file`` from its start and digest every chunk while it is in the cache.

    The file ends up exactly ``nbytes`` long, whatever was in it before; it is not yet durable (that
    is the caller's fdatasync). Blocks until every thread is done, also after a failure.

    Args:
        file: opened for writing.
        source: page-aligned for O_DIRECT; must not change until the call returns. Where it goes on
            to the next block border the padding is written too and cut off again; else the tail is copied.
        nbytes: size of the file.
        chunk_nbytes: a multiple of ``BLOCK_NBYTES``.
        threads: chunks in flight.

    Raises:
        InvalidInputError: a size does not fit.
        OSError: the first failure of a thread; the content of the file is then undefined.
    """
    if chunk_nbytes <= 0 or chunk_nbytes % BLOCK_NBYTES or not 0 <= nbytes <= len(source) or threads < 1:
        raise InvalidInputError(
            "bad sizes for a chunked write", nbytes=nbytes, chunk_nbytes=chunk_nbytes, threads=threads
        )
    file.allocate(nbytes)
    count = chunk_count(nbytes, chunk_nbytes)
    digests = bytearray(count * DIGEST_NBYTES)

    def write_one(chunk: int) -> None:
        start = chunk * chunk_nbytes
        stop = min(start + chunk_nbytes, nbytes)
        digests[chunk * DIGEST_NBYTES : (chunk + 1) * DIGEST_NBYTES] = digest(source[start:stop])
        file.write_all(_whole_blocks(source, start, stop), start)

    _for_each(count, write_one, threads=threads)
    os.ftruncate(file.fd, nbytes)  # cuts off the padding and whatever a recycled file had more
    return WriteReport(digests=bytes(digests), direct=file.direct)


class ChunkReader:
    """Reads whole chunks of a file past the page cache. Used from several threads at once.

    Args:
        root: staging directory that the file is in: nothing below it may be a link or another user's
            (:func:`ckpt.storage.own_file.open_own`); None: the caller vouches for the path.

    Raises NotFoundError when the file is not there, UnavailableError when it cannot be
    read, and CorruptError (code "truncated") when its size is not ``nbytes``.
    """

    def __init__(
        self, path: Path, *, nbytes: int, chunk_nbytes: int, direct: bool = True, root: Path | None = None
    ) -> None:
        self._path = path
        self._nbytes = nbytes
        self._chunk_nbytes = chunk_nbytes
        with os_errors("a segment cannot be opened", path=path):
            opener = (lambda flags: open_own(root, path, flags)) if root is not None else None
            self._file = DirectFile(path, os.O_RDONLY, direct=direct, opener=opener)
        try:
            with os_errors("a segment cannot be read", path=path):
                found = os.fstat(self._file.fd).st_size
            if found != nbytes:
                raise CorruptError(
                    "a segment has the wrong size", code="truncated", path=path, nbytes=found, expected=nbytes
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def direct(self) -> bool:
        """Whether the page cache is (still) avoided."""
        return self._file.direct

    def close(self) -> None:
        self._file.close()

    def read(self, chunk: int, buffer: memoryview) -> memoryview:
        """Read chunk ``chunk`` into ``buffer``; return the part of ``buffer`` that holds it, unverified.

        Args:
            chunk: number of the chunk.
            buffer: of :func:`aligned_buffer`, at least one chunk long.
        """
        start = chunk * self._chunk_nbytes
        size = min(self._chunk_nbytes, self._nbytes - start)
        if size <= 0 or len(buffer) < round_up(size):
            raise InvalidInputError(
                "no such chunk, or the buffer is too small", chunk=chunk, buffer=len(buffer)
            )
        with os_errors("a segment cannot be read", path=self._path, chunk=chunk):
            got = self._file.read_upto(buffer[: round_up(size)], start)
        if got < size:
            raise CorruptError("a segment is cut short", code="truncated", path=self._path, chunk=chunk)
        return buffer[:size]


def _whole_blocks(source: memoryview, start: int, stop: int) -> memoryview:
    """Return ``source[start:stop]`` extended to whole blocks, copied only where the source is too short."""
    end = round_up(stop)
    if end <= len(source):
        return source[start:end]
    tail = aligned_buffer(stop - start)
    tail[: stop - start] = source[start:stop]
    return tail


def _for_each(count: int, work: Callable[[int], None], *, threads: int) -> None:
    """Call ``work(i)`` for every i below ``count``; the first failure stops chunks that have not begun."""
    numbers = iter(range(count))
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                work(number)
            except BaseException:
                stop.set()
                raise

    if count <= 1 or threads == 1:
        return drain()
    with ThreadPoolExecutor(min(threads, count), thread_name_prefix="ckpt-write") as pool:
        futures = [pool.submit(drain) for _ in range(min(threads, count))]
    for future in futures:
        future.result()
    return None


def _fallocate(fd: int, nbytes: int) -> int:
    # Not os.posix_fallocate: where the file system cannot, glibc's version writes a byte into every block.
    call = getattr(_LIBC, "fallocate", None)
    if call is None:
        return 0
    return int(call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)))
