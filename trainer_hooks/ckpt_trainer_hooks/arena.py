"""The arena: shared, pre-faulted memory that a snapshot is captured into and that the flusher inherits.

A copy into memory that was never touched is several times slower than into memory that was, because
the kernel finds and clears a page for every 4 KiB of it. So the arena is faulted in before the first
snapshot and used again for every later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from ckpt.digest import Buffer
from ckpt.errors import InvalidInputError, UnavailableError

__all__ = ["PAGE_NBYTES", "Arena", "TailOffsets", "arena_nbytes", "page_up"]

PAGE_NBYTES = 4096
_PREFAULT_PIECE_NBYTES = 32 << 20  # bounds how long close() can wait for a pre-fault in another thread
_MADV_POPULATE_WRITE = 23  # Linux 5.14; fault in for writing without changing a byte
_LIBC = ctypes.CDLL(None, use_errno=True)


def page_up(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def arena_nbytes(segment_nbytes: int, index_nbytes: int, layout_nbytes: int) -> int:
    """Return the size of an arena for [segment image][padding to a page][index][layout set]."""
    return page_up(page_up(segment_nbytes) + index_nbytes + layout_nbytes)


class TailOffsets(NamedTuple):
    """Where :meth:`Arena.write_tail` put things, for the Flush message. Bytes from the arena's start."""

    index_offset: int
    index_nbytes: int
    layout_offset: int
    layout_nbytes: int


class Arena:
    """Page-aligned shared memory behind a file descriptor (memfd).

    Attributes:
        fd: the memfd, close-on-exec, sealed against shrinking: the flusher can read all of it at any
            time without the danger of SIGBUS. Owned by the arena.
        nbytes: size, in whole pages.

    Args:
        nbytes: wanted size in bytes, at least 1; rounded up to whole pages.

    Raises:
        InvalidInputError: ``nbytes`` is below 1.
        UnavailableError: the kernel refuses the memory.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise InvalidInputError("an arena needs at least one byte", nbytes=nbytes)
        self.nbytes = page_up(nbytes)
        self._lock = threading.Lock()  # held while an address is in use; guards _map against close()
        with _memory_errors(self.nbytes):
            self.fd = os.memfd_create("ckpt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.fd, self.nbytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
                self._map: mmap.mmap | None = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED)
            except BaseException:
                os.close(self.fd)
                raise
        self._view: memoryview | None = memoryview(self._map)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            # Huge pages where the administrator allows them for shared memory; and forked children
            # (data loader workers) neither need the mapping nor may disturb pages that are pinned.
            with contextlib.suppress(OSError):
                self._map.madvise(advice)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def view(self) -> memoryview:
        """The memory, writable, one byte per item. Whoever keeps a view keeps the memory alive."""
        if self._view is None:
            raise InvalidInputError("the arena is closed", code="closed")
        return self._view

    @property
    def address(self) -> int:
        """Address of the first byte; valid until :meth:`close`."""
        with self._lock:
            return self._address()

    def prefault(self, start: int, stop: int) -> None:
        """Make the kernel provide the pages of ``[start, stop)`` now. Keeps their content.

        Blocks for about 1 s per 0.3 to 3 GB, without the GIL; may be called from any thread, also while
        others copy into the arena. Returns early when the arena is closed meanwhile.

        Raises:
            InvalidInputError: the range does not lie in the arena.
            UnavailableError: there is not enough memory.
        """
        if not 0 <= start <= stop <= self.nbytes:
            raise InvalidInputError(
                "range does not lie in the arena", start=start, stop=stop, nbytes=self.nbytes
            )
        position = start - start % PAGE_NBYTES
        while position < stop:
            size = min(_PREFAULT_PIECE_NBYTES, page_up(stop) - position)
            with self._lock, _memory_errors(self.nbytes):
                if self._map is None:
                    return
                self._populate(position, size)
            position += size

    def prefault_all(self) -> None:
        """:meth:`prefault` of the whole arena."""
        self.prefault(0, self.nbytes)

    def write_tail(self, segment_nbytes: int, index: Buffer, layout: Buffer) -> TailOffsets:
        """Copy index and layout set behind the segment image; return where they are.

        Raises:
            InvalidInputError: code "arena-too-small": they do not fit; use :meth:`grow`.
        """
        index_offset = page_up(segment_nbytes)
        layout_offset = index_offset + len(index)
        end = layout_offset + len(layout)
        if end > self.nbytes:
            raise InvalidInputError(
                "the arena is too small for this snapshot",
                code="arena-too-small",
                needed=end,
                nbytes=self.nbytes,
            )
        self.view[index_offset:layout_offset] = index
        self.view[layout_offset:end] = layout
        return TailOffsets(index_offset, len(index), layout_offset, len(layout))

    def grow(self, nbytes: int) -> Arena:
        """Return a new, empty arena of at least ``nbytes``, and close this one.

        A new memfd, because the flusher may still be reading the old one. It has to be announced with
        :meth:`FlusherProcess.send_arena`.
        """
        larger = Arena(max(nbytes, self.nbytes))
        self.close()
        return larger

    def close(self) -> None:
        """Give up the descriptor and the mapping. Idempotent.

        Memory goes back once the flusher has dropped it too and no view or tensor over it is left.
        """
        with self._lock:
            mapping, self._map = self._map, None
            view, self._view = self._view, None
        if mapping is None or view is None:
            return
        # BufferError: somebody holds a view. The mapping goes away with the last of them instead.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()
        os.close(self.fd)

    def _address(self) -> int:
        if self._map is None:
            raise InvalidInputError("the arena is closed", code="closed")
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _populate(self, start: int, nbytes: int) -> None:
        # Through ctypes: mmap.madvise keeps the GIL, and this takes up to a tenth of a second.
        address = ctypes.c_void_p(self._address() + start)
        while _LIBC.madvise(address, ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # an older kernel; allocating is the larger part of the work
                os.posix_fallocate(self.fd, start, nbytes)
                return
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def _memory_errors(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            "not enough memory for the arena; it needs as much as this rank's share of the state",
            code="no-memory",
            nbytes=nbytes,
            reason=error.strerror,
        ) from error
