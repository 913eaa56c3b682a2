"""Who deletes says so before he looks who needs it; who needs it says so before he looks whether it goes.

Prune and sweep put ``index/<id>/condemned-<token>`` and only then look for pins, for what ``latest`` names,
and (sweep) for a manifest. A pin, a start that resumes, a late commit and a borrower first put what protects
the checkpoint (:func:`protected`, the manifest, the borrows record) and only then look for a condemned
record. Whichever order these four requests come in, at least one of the two sees the other and withdraws.

A record goes when the deleting is over, as the last of the checkpoint. One that a crash left counts for an
hour, by the store's clock alone; whoever deletes gives up well before (:meth:`Condemned.check_fresh`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from ckpt.clock import Clock, SystemClock, random_bytes
from ckpt.errors import NotFoundError, RefusedError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import (
    condemned_key,
    condemned_prefix,
    manifest_key,
    temporary_pin_key,
)
from ckpt.storage.base import Store

__all__ = ["STALE_S", "Condemned", "is_condemned", "protected", "require_standing"]

STALE_S = 3600.0
"""A record or temporary pin older than this was left by a crash."""

_MOST_S = 1800.0  # a deleter that was held up for longer does not begin: others may have given it up


class Condemned:
    """The records of one deleter.

    Args:
        store: of the run.
        idents: what it is about to delete.
        clock: for how long it took.
    """

    def __init__(self, store: Store, idents: Collection[CheckpointId], clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._began = self._clock.monotonic()
        self._token = random_bytes(8).hex()
        self._keys = [condemned_key(ident, self._token) for ident in idents]
        for key in self._keys:
            store.put(key, b"")

    def put_at(self) -> float:
        """When the last record was put, by the store's clock. One request."""
        return self._store.head(self._keys[-1]).modified_at

    def check_fresh(self) -> None:
        """To be called right before the first delete. Raises UnavailableError: too late, others do not see
        the records any more.
        """
        elapsed_s = self._clock.monotonic() - self._began
        if elapsed_s > _MOST_S:
            raise UnavailableError(
                "what protects checkpoints was looked at too long ago; nothing was deleted, try again",
                code="slow",
                elapsed_s=elapsed_s,
                url=self._store.url,
            )

    def withdraw(self) -> None:
        """Delete the records: nothing is deleted, or everything."""
        self._store.delete(self._keys)


def is_condemned(store: Store, ident: CheckpointId, *, since: str) -> bool:
    """Return whether somebody may be deleting ``ident``. One request, where nobody is.

    Args:
        store: of the run.
        ident: which.
        since: key of what the caller put to protect it, before this call.
    """
    records = list(store.list_keys(condemned_prefix(ident)))
    if not records:
        return False
    try:
        now = store.head(since).modified_at
    except NotFoundError:  # it was taken away with the checkpoint
        return True
    return any(record.modified_at > now - STALE_S for record in records)


def require_standing(store: Store, ident: CheckpointId, *, since: str, may_be_staged: bool = False) -> None:
    """Check that ``ident``, which the caller has protected, is there and stays.

    Args:
        store: of the run.
        ident: which.
        since: as for :func:`is_condemned`.
        may_be_staged: it need not be committed yet.

    Raises:
        NotFoundError: code "no-checkpoint": it is not committed (any more).
        RefusedError: code "condemned": somebody is deleting it right now.
    """
    # In this order: the record is there until everything else is gone.
    if is_condemned(store, ident, since=since):
        raise RefusedError(
            "the checkpoint is just being pruned; try again in a moment, or take another",
            code="condemned",
            checkpoint=ident,
            url=store.url,
        )
    if may_be_staged:
        return
    try:
        store.head(manifest_key(ident))
    except NotFoundError as error:
        raise NotFoundError(
            "no such checkpoint", code="no-checkpoint", checkpoint=ident, url=store.url
        ) from error


@contextlib.contextmanager
def protected(store: Store, ident: CheckpointId, *, may_be_staged: bool = False) -> Iterator[None]:
    """Let nobody delete ``ident`` inside the block, for an hour at most.

    Raises:
        NotFoundError, RefusedError: as :func:`require_standing`.
    """
    key = temporary_pin_key(ident, random_bytes(8).hex())
    store.put(key, b"")
    try:
        require_standing(store, ident, since=key, may_be_staged=may_be_staged)
        yield
    finally:
        store.delete([key])
