"""Pins: checkpoints that retention leaves alone. One small object each, ``pins/<id>``."""

from __future__ import annotations

from ckpt.errors import NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import PINS, parse_pin_key, pin_key
from ckpt.ops.catalog import exists
from ckpt.storage.base import Store

__all__ = ["is_pinned", "list_pins", "pin", "unpin"]


def pin(store: Store, ident: CheckpointId) -> None:
    """Keep ``ident`` whatever the retention policy says. Idempotent.

    Raises:
        NotFoundError: code "no-checkpoint": it is not committed (any more).
    """
    store.put(pin_key(ident), b"pinned\n")
    # Looked at after the put: a prune that did not see the pin has taken the manifest away by now, or will
    # see the pin when it looks again.
    if not exists(store, ident):
        unpin(store, ident)
        raise NotFoundError("no such checkpoint", code="no-checkpoint", checkpoint=ident, url=store.url)


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
