"""Reading a range of a file into several pieces of memory, hashing what arrived while it is in the cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from ckpt.digest import Buffer
from ckpt.storage.direct import BLOCK_NBYTES, aligned_buffer, round_up

__all__ = ["PartsFiller", "copy_into", "read_parts_at"]

_BLOCK_NBYTES = 1 << 20  # read, then hashed: small enough to be still in the cache
_PAGE = 4096
_MOST_VIEWS = 512  # the kernel takes 1,024
# The kernel's copy is about three times slower where the destination is 1 to 31 bytes behind the source,
# counted within a page. Measured with Linux 6.18 on AMD EPYC: 324 MiB out of the page cache in 145 ms instead
# of 42 ms of CPU; by way of well-placed memory in 70. Why was not found.
_ALIASING = range(1, 32)


def read_parts_at(
    fd: int, start: int, parts: Sequence[memoryview], *, past_cache: Callable[[], int] | None = None
) -> tuple[int, bytes]:
    """Fill ``parts``, one after another, with the bytes of the file from ``start`` on.

    From the first page on that is not cached, all are read ahead at once. Releases the GIL. The page cache is
    shared, so ranks of one node that want the same bytes read the device once.

    Args:
        fd: the file.
        start: in it.
        parts: memory to fill.
        past_cache: opens the file once more, for direct reads; for bytes that nobody else on this node wants.
            What is not cached is then read past the page cache: to make its pages costs an eighth of the time
            of reading them. None, or where it raises OSError: by way of the page cache.

    Returns:
        (bytes read, fewer only at the end of the file; xxh3-128 of them as they stand in ``parts``).

    Raises:
        OSError: the device cannot read them.
    """
    file = _ReadAhead(fd, start + sum(map(len, parts)), past_cache)
    state = xxhash.xxh3_128()
    done = 0
    bounce: mmap.mmap | None = None
    for batch in _batches(parts, start):
        at = start + done
        if len(batch) == 1 and _is_aliasing(batch[0], at):
            bounce = bounce or mmap.mmap(-1, _BLOCK_NBYTES + _PAGE)
            skip = at % _PAGE
            with memoryview(bounce) as whole, whole[skip : skip + len(batch[0])] as view:
                count = _read_all(file, [view], at)
                ctypes.memmove(_address(batch[0]), _address(view), count)
        else:
            count = _read_all(file, batch, at)
        done += count
        for block in batch:
            state.update(block[:count] if count < len(block) else block)
            count -= min(count, len(block))
        if done < at - start + sum(map(len, batch)):
            break
    return done, state.digest()


def copy_into(parts: Sequence[memoryview], data: Buffer) -> None:
    """Fill ``parts``, one after another, with ``data``, which must be as long. Releases the GIL."""
    view = np.frombuffer(data, np.uint8)
    if sum(map(len, parts)) != len(view):
        raise ValueError(f"{len(view)} bytes for parts of {sum(map(len, parts))}")
    source = view.ctypes.data
    for block in _blocks(parts):
        ctypes.memmove(_address(block), source, len(block))
        source += len(block)


class PartsFiller:
    """Fills ``parts``, one after another, with what arrives in pieces of any size."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = iter(parts)
        self._rest = memoryview(b"")
        self._state = xxhash.xxh3_128()
        self.nbytes = 0

    def feed(self, data: Buffer) -> None:
        """Append ``data``. Raises ValueError where it is more than fits."""
        self._state.update(data)
        left = memoryview(data)
        while left:
            if not self._rest:
                self._rest = next(self._parts, memoryview(b""))
                if not self._rest:
                    raise ValueError("more bytes than the parts hold")
            count = min(len(self._rest), len(left))
            self._rest[:count] = left[:count]
            self._rest, left = self._rest[count:], left[count:]
            self.nbytes += count

    def digest(self) -> bytes:
        """Digest of what was fed."""
        return self._state.digest()


class _ReadAhead:
    """Reads a range of a file, and asks for all that is left of it at the first page that is not cached.

    To ask for pages that are cached is a tenth of the work of copying them.
    """

    def __init__(self, fd: int, stop: int, past_cache: Callable[[], int] | None) -> None:
        self._fd = fd
        self._stop = stop
        self._past_cache = past_cache
        self._is_asked = False
        self._kept: memoryview | None = None  # what was read past the cache
        self._kept_at = 0

    def read(self, views: Sequence[memoryview], at: int) -> int:
        if self._past_cache is not None:
            self._keep_unless_cached(at)
        if self._kept is not None:
            return _copy_from(self._kept[at - self._kept_at :], views)
        if not self._is_asked:
            try:
                if count := os.preadv(self._fd, views, at, os.RWF_NOWAIT):
                    return count
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                    raise
            self._is_asked = True
            os.posix_fadvise(self._fd, at, self._stop - at, os.POSIX_FADV_WILLNEED)
        return os.preadv(self._fd, views, at)

    def _keep_unless_cached(self, at: int) -> None:
        """Once: read all past the cache, unless all is in it."""
        past_cache, self._past_cache = self._past_cache, None
        if past_cache is not None and not _is_cached(self._fd, at, self._stop):
            self._keep(past_cache, at)

    def _keep(self, past_cache: Callable[[], int], at: int) -> None:
        """Read all from ``at`` on past the cache, if that can be done here."""
        begin = at - at % BLOCK_NBYTES
        room = round_up(self._stop - begin)
        buffer = _own_buffer(room)
        try:
            fd = past_cache()
        except OSError:  # not on this file system
            return
        try:
            got = 0
            while got < room and (count := os.preadv(fd, [buffer[got:room]], begin + got)):
                got += count
                if got % BLOCK_NBYTES:  # the end of the file
                    break
        except OSError as error:
            if error.errno != errno.EINVAL:  # blocks of another size than ours
                raise
            return
        finally:
            os.close(fd)
        self._kept, self._kept_at = buffer[:got], begin


def _is_cached(fd: int, start: int, stop: int) -> bool:
    """Whether these bytes are in the page cache. A look, by mincore(2): to read without waiting would make
    the kernel read ahead, and so fill the cache.
    """
    begin = start - start % mmap.PAGESIZE  # of this kernel: 64 KiB on some
    try:
        mapped = mmap.mmap(fd, stop - begin, prot=mmap.PROT_READ, offset=begin)
    except (ValueError, OSError):  # the file is shorter, or cannot be mapped: whoever reads it will say so
        return True
    with mapped:
        pages = np.empty(-(-(stop - begin) // mmap.PAGESIZE), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        failed = _LIBC.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(stop - begin), ctypes.c_void_p(pages.ctypes.data)
        )
        return bool(failed) or bool((pages & 1).all())


_LIBC = ctypes.CDLL(None, use_errno=True)
_own = threading.local()


def _own_buffer(nbytes: int) -> memoryview:
    """Memory of this thread for direct reads: always the same pages, as each new one costs a fault."""
    if len(getattr(_own, "buffer", b"")) < nbytes:
        _own.buffer = aligned_buffer(nbytes)
    found: memoryview = _own.buffer
    return found


def _copy_from(source: memoryview, views: Sequence[memoryview]) -> int:
    """Fill ``views``, one after another, as far as ``source`` goes; return how many bytes that was."""
    done = 0
    for view in views:
        count = min(len(view), len(source) - done)
        if count <= 0:
            break
        ctypes.memmove(_address(view), _address(source) + done, count)
        done += count
    return done


def _read_all(file: _ReadAhead, views: Sequence[memoryview], at: int) -> int:
    left = [*views]
    done = 0
    while left:
        count = file.read(left, at + done)
        if not count:
            break
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done


def _batches(parts: Sequence[memoryview], start: int) -> Iterator[list[memoryview]]:
    """Pieces of ``parts`` in their order, at most a block in each batch; one that is bounced is alone."""
    batch: list[memoryview] = []
    total, at = 0, start
    for block in _blocks(parts):
        alone = _is_aliasing(block, at)
        if batch and (alone or total + len(block) > _BLOCK_NBYTES or len(batch) == _MOST_VIEWS):
            yield batch
            batch, total = [], 0
        batch.append(block)
        total += len(block)
        at += len(block)
        if alone:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _is_aliasing(block: memoryview, at: int) -> bool:
    return len(block) >= _PAGE and (_address(block) - at) % _PAGE in _ALIASING


def _blocks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), _BLOCK_NBYTES):
            yield part[at : at + _BLOCK_NBYTES]


def _address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
