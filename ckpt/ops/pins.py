"""Pins: checkpoints that retention leaves alone. One small object each, ``pins/<id>``.

A temporary pin, ``pins/<id>.<token>``, is held by somebody who needs the checkpoint for a moment
(:func:`ckpt.ops.condemn.protected`). Nobody lists it as a pin.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt.errors import NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import PINS, parse_pin_key, parse_temporary_pin_key, pin_key
from ckpt.ops.condemn import STALE_S, protected
from ckpt.storage.base import Store

__all__ = ["is_pinned", "list_pins", "list_protected", "pin", "unpin"]


def pin(store: Store, ident: CheckpointId) -> None:
    """Keep ``ident`` whatever the retention policy says. Idempotent.

    Raises:
        NotFoundError: code "no-checkpoint": it is not committed (any more).
        RefusedError: code "condemned": a prune is just deleting it.
    """
    with protected(store, ident):  # else a prune that did not see the pin may still delete it
        store.put(pin_key(ident), b"pinned\n")


def unpin(store: Store, ident: CheckpointId) -> None:
    """Leave ``ident`` to the retention policy again. Idempotent; deletes nothing but the pin."""
    store.delete([pin_key(ident)])


def is_pinned(store: Store, ident: CheckpointId) -> bool:
    """Return whether ``ident`` is pinned. One request."""
    try:
        store.head(pin_key(ident))
    except NotFoundError:
        return False
    return True


def list_pins(store: Store) -> frozenset[CheckpointId]:
    """Return every pinned checkpoint."""
    parsed = (parse_pin_key(info.key) for info in store.list_keys(PINS))
    return frozenset(ident for ident in parsed if ident is not None)


def list_protected(store: Store, now: Callable[[], float]) -> set[CheckpointId]:
    """Return every checkpoint that is pinned, or was pinned for a moment less than an hour ago. One request.

    Args:
        store: of the run.
        now: Unix seconds by the store's clock; only called where there are temporary pins. Of those, one that
            is older than an hour was left by a crash.
    """
    found: set[CheckpointId] = set()
    temporary: list[tuple[CheckpointId, float]] = []
    for info in store.list_keys(PINS):
        if (pinned := parse_pin_key(info.key)) is not None:
            found.add(pinned)
        elif (needed := parse_temporary_pin_key(info.key)) is not None:
            temporary.append((needed, info.modified_at))
    if temporary:
        stale_before = now() - STALE_S
        found |= {ident for ident, put_at in temporary if put_at > stale_before}
    return found
