"""Create-if-absent as a commit needs it: probe whether the service really does it, and survive lost replies.

A conditional put is not idempotent under retry. The reply can get lost, the client library sends again
by itself, and the second try fails against our own object. So each such object carries a write id that
no other writer draws, and whoever is told "it exists" (or is told nothing) reads it back and compares.
Two rules keep that honest: a conflict may turn into success or stay a conflict; a transport error may
turn into success only if the object is provably ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ckpt.clock import Clock, SystemClock, random_bytes
from ckpt.digest import Buffer
from ckpt.errors import CkptError, ConflictError, NotFoundError, UnavailableError
from ckpt.storage.base import Store

__all__ = ["commit_put", "probe_create"]

_TRIES = 6
_FIRST_WAIT_S = 0.2
_FATAL = frozenset({"denied", "no-space"})


def probe_create(create: Callable[[str, Buffer], None], delete: Callable[[list[str]], None]) -> bool:
    """Return whether ``create`` refuses an existing key, by creating ``probe/<random>`` twice.

    Args:
        create: the engine's conditional put, with no check of its own before it; ConflictError: refused.
        delete: removes the object; where that is not allowed the small object stays.

    Raises:
        UnavailableError: the service could not be asked; nothing is known.
    """
    key = f"probe/{random_bytes(12).hex()}"
    try:
        create(key, b"first")
        # Refused at the first try: its reply was lost and the client sent it again. That is an answer too.
        create(key, b"second")
    except ConflictError:
        answer = True
    else:
        answer = False
    with contextlib.suppress(CkptError):
        delete([key])
    return answer


def commit_put(
    store: Store,
    key: str,
    data: Buffer,
    write_id: bytes,
    *,
    is_ours: Callable[[bytes], bool] | None = None,
    clock: Clock | None = None,
    tries: int = _TRIES,
) -> bool:
    """Create ``key``, once and for all. Blocks through back-off, ``tries`` times.

    On a store where ``probe_conditional`` is False two writers can each overwrite the other; there the
    object is read back after the put, and the loser of all races but the closest learns of it.

    Args:
        data: the value; must contain ``write_id``.
        write_id: drawn at random for this value; a second call for the same value brings the same one.
        is_ours: tells from the stored bytes whether this writer wrote them; by default, whether they
            contain ``write_id``.

    Returns:
        True: the object holds our value, durably. False: another writer's object is there.

    Raises:
        UnavailableError: neither is known. The put may still have happened; call again with the same value.
    """
    ours = is_ours or (lambda stored: write_id in stored)
    clock = clock or SystemClock()
    wait_s = _FIRST_WAIT_S
    for left in range(tries - 1, -1, -1):
        try:
            store.put_new(key, data)
            if store.probe_conditional():
                return True
            failure: CkptError | None = None
        except (ConflictError, UnavailableError) as error:
            failure = error
        verdict, reason = _read_back(store, key, ours)
        if verdict is not None:
            return verdict
        failure = reason or failure or UnavailableError("the object vanished after it was put", key=key)
        if left == 0 or failure.code in _FATAL:
            raise _unknown(failure, key)
        clock.sleep(wait_s)
        wait_s *= 2
    raise UnavailableError("no try was allowed", key=key, tries=tries)


def _read_back(
    store: Store, key: str, is_ours: Callable[[bytes], bool]
) -> tuple[bool | None, CkptError | None]:
    """Return (ours or theirs, None), or (None, what stood in the way); (None, None): nothing is there."""
    try:
        return is_ours(store.get(key)), None
    except NotFoundError:
        return None, None
    except UnavailableError as error:
        return None, error


def _unknown(failure: CkptError, key: str) -> CkptError:
    if isinstance(failure, UnavailableError):
        return failure
    # "It exists", but nobody can read it: a concurrent writer's conflict that left nothing behind.
    error = UnavailableError("the conditional put was refused, yet there is no object", key=key)
    error.__cause__ = failure
    return error
