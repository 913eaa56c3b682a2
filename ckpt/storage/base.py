"""The storage interface. Small on purpose: a method is here because a protocol needs it.

A store is opened at a run's URL; keys are relative to it, ``/``-separated, without leading slash.

ST1 A key is absent or holds one complete value. A reader never sees a partial value.
ST2 When ``put``, ``put_new`` or ``put_parts`` returns, the value survives a crash of this process,
    and of the host as far as the service promises.
ST3 ``put_new`` stores the value only if the key is absent; of N racers exactly one returns normally.
    Where ``probe_conditional`` returned False the store cannot promise this and callers must not rely on it.
ST4 ``list_keys`` sees every value whose put returned before the listing began, in ascending byte order.
ST5 Absence is NotFoundError; anything else that goes wrong is another CkptError. A listing never turns
    an error into "nothing there".
ST6 ``get_range`` returns exactly the bytes asked for or raises; a short read is an error.
ST7 A store may be used from several threads at once. It must not be used in a forked child.
ST8 ``list_dirs`` names every folder that holds a value, directly or deeper, by the rules of ST4 and ST5, and
    reads no keys below them. Where folders are real, one whose last value was deleted may be named, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckpt.digest import Buffer

__all__ = ["HasUploads", "ObjectInfo", "ReadsFiles", "Store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a listing or a head says of one object.

    Attributes:
        key: relative to the store's URL.
        nbytes: size.
        modified_at: Unix seconds by the store's clock; for people, never for order.
    """

    key: str
    nbytes: int
    modified_at: float


class Store(Protocol):
    """Bytes by key. The contract is in the module's docstring."""

    @property
    def url(self) -> str:
        """The URL that the store was opened at, without trailing slash."""
        ...

    def put(self, key: str, data: Buffer) -> None:
        """Create or replace ``key``."""
        ...

    def put_new(self, key: str, data: Buffer) -> None:
        """Create ``key``.

        Raises:
            ConflictError: it exists (possibly our own, where a reply was lost and the client sent again).
        """
        ...

    def put_parts(
        self, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int, concurrency: int
    ) -> None:
        """Create or replace ``key`` from ``pieces``, in parts; the engine decides how much is copied.

        Args:
            key: where.
            pieces: the value, piece by piece, of any sizes. Asked for one after the other, possibly from
                another thread, as parts are sent. A piece must not change while anybody refers to it.
                What the iteration raises ends the call, and the key stays as it was.
            most_nbytes: the pieces are not more than this together.
            part_nbytes: wanted part size in bytes; raised where the service's limits demand it.
            concurrency: parts in flight. Memory is so many parts, and one that is being filled.

        Raises:
            CkptError: of the iteration, as it came; or of the store.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return the whole value. Raises NotFoundError."""
        ...

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        """Return ``nbytes`` bytes from ``start``. Raises NotFoundError; CorruptError on a short object."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return the size and time of ``key``. Raises NotFoundError."""
        ...

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects whose key begins with ``prefix``, ascending; at most ``limit`` of them.

        With a limit the number of requests depends on the limit alone (as far as the service can).
        """
        ...

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """Yield each ``name`` such that a key begins with ``prefix + name + "/"``, in the order of those.

        Args:
            prefix: empty, or a folder with its slash.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete every key. A key that is not there is no error."""
        ...

    def probe_conditional(self) -> bool:
        """Return whether ``put_new`` really is create-if-absent here.

        Asks the service once (by creating one small object under ``probe/`` twice), then remembers.
        """
        ...

    def close(self) -> None:
        """Release connections. The store must not be used afterwards."""
        ...


@runtime_checkable
class ReadsFiles(Protocol):
    """A store whose objects are files: read into place, and in the page cache for all processes of a host."""

    def read_parts(self, key: str, start: int, parts: Sequence[memoryview]) -> bytes:
        """Fill ``parts``, one after another, with the bytes of ``key`` from ``start`` on. Releases the GIL.

        Returns:
            Their digest as they stand in ``parts``.

        Raises:
            CkptError: as ``get_range``; ``parts`` may hold anything then.
        """
        ...


@runtime_checkable
class HasUploads(Protocol):
    """A store that knows the large puts that were begun and never ended: invisible, but they take room."""

    def abort_uploads(self, *, before: float, dry_run: bool) -> int:
        """Remove those begun before ``before`` (Unix seconds by the store's clock).

        Returns:
            How many; with ``dry_run`` how many there are.
        """
        ...
