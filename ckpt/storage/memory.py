"""memory:// -- a store in this process's memory, for tests and trials.

All stores of one process share one name space, so two stores opened at the same URL see each other.
Nothing survives the process: ST2 holds only in the sense that there is nobody left to ask.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator

from ckpt.clock import SystemClock
from ckpt.digest import Buffer
from ckpt.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError
from ckpt.storage.base import ObjectInfo

__all__ = ["MemoryStore"]


class _Space:
    """Values by full key, with the keys kept sorted so that a limited listing is cheap."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, tuple[bytes, float]] = {}
        self.order: list[str] = []


_SPACE = _Space()
_LAST = chr(0x10FFFF)  # after every key with the prefix before it


class MemoryStore:
    """See the module and :class:`ckpt.storage.base.Store`. Safe for threads.

    Args:
        url: ``memory://...``; everything after the scheme is a prefix of the shared name space.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._root = self._url + "/"
        self._clock = SystemClock()

    @property
    def url(self) -> str:
        return self._url

    def _write(self, key: str, data: Buffer, *, only_new: bool) -> None:
        full, value = self._root + key, bytes(data)
        with _SPACE.lock:
            if full not in _SPACE.values:
                bisect.insort(_SPACE.order, full)
            elif only_new:
                raise ConflictError("the object exists", key=key, url=self._url)
            _SPACE.values[full] = (value, self._clock.now())

    def put(self, key: str, data: Buffer) -> None:
        self._write(key, data, only_new=False)

    def put_new(self, key: str, data: Buffer) -> None:
        self._write(key, data, only_new=True)

    def put_parts(
        self, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int, concurrency: int
    ) -> None:
        del most_nbytes, part_nbytes, concurrency  # one copy, made under no lock
        self._write(key, b"".join(pieces), only_new=False)

    def _read(self, key: str) -> tuple[bytes, float]:
        with _SPACE.lock:
            found = _SPACE.values.get(self._root + key)
        if found is None:
            raise NotFoundError("no such object", key=key, url=self._url)
        return found

    def get(self, key: str) -> bytes:
        return self._read(key)[0]

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        if start < 0 or nbytes < 0:
            raise InvalidInputError("a range must not be negative", key=key, start=start, nbytes=nbytes)
        value = self._read(key)[0]
        if start + nbytes > len(value):
            raise CorruptError(
                "the object is shorter than the range asked for",
                code="short-object",
                key=key,
                start=start,
                nbytes=nbytes,
                object_nbytes=len(value),
            )
        return memoryview(value)[start : start + nbytes]

    def head(self, key: str) -> ObjectInfo:
        value, modified_at = self._read(key)
        return ObjectInfo(key=key, nbytes=len(value), modified_at=modified_at)

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        first = self._root + prefix
        with _SPACE.lock:
            begin = bisect.bisect_left(_SPACE.order, first)
            end = bisect.bisect_left(_SPACE.order, first + _LAST, begin)
            if limit is not None:
                end = min(end, begin + limit)
            found = [(full, *_SPACE.values[full]) for full in _SPACE.order[begin:end]]
        start = len(self._root)
        return (
            ObjectInfo(key=full[start:], nbytes=len(value), modified_at=modified_at)
            for full, value, modified_at in found
        )

    def list_dirs(self, prefix: str) -> Iterator[str]:
        first = self._root + prefix
        found: list[str] = []
        with _SPACE.lock:
            index = bisect.bisect_left(_SPACE.order, first)
            while index < len(_SPACE.order) and _SPACE.order[index].startswith(first):
                name, slash, _ = _SPACE.order[index][len(first) :].partition("/")
                if slash:
                    found.append(name)
                    index = bisect.bisect_left(_SPACE.order, f"{first}{name}0", index)  # "0" follows "/"
                else:
                    index += 1
        return iter(found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            full = self._root + key
            with _SPACE.lock:
                if _SPACE.values.pop(full, None) is not None:
                    del _SPACE.order[bisect.bisect_left(_SPACE.order, full)]

    def probe_conditional(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to release; the values stay for other stores of this process."""
