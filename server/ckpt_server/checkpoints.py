"""Opened checkpoints, a few kept at hand: a client that reads tensor by tensor must not pay for the
manifest and the layouts each time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from ckpt.errors import InvalidInputError
from ckpt.format.ids import CheckpointId, split_run_url
from ckpt.ops.catalog import load_checkpoint, resolve
from ckpt.ops.checkpoint import Checkpoint
from ckpt_server.runs import Runs

__all__ = ["Checkpoints"]

_KEPT = 8


class Checkpoints:
    """Resolves names to opened checkpoints. Thread-safe. What is committed never changes, so an opened
    one stays right until it is pruned; then its reads say that an object is missing.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, CheckpointId], Checkpoint] = OrderedDict()  # guarded by self._lock

    def find(self, url: str, text: str) -> Checkpoint:
        """Open the checkpoint that ``text`` names (empty: "latest").

        Raises:
            InvalidInputError: malformed URL or name.
            NotFoundError: no such checkpoint.
            CkptError: whatever the store raises.
        """
        if not url:
            raise InvalidInputError("the URL of a run is missing")
        split_run_url(url)
        store = self._runs.store_for(url)
        ident = resolve(store, text or "latest")
        key = (store.url, ident)
        with self._lock:
            known = self._open.get(key)
            if known is not None and known.store is store:
                self._open.move_to_end(key)
                return known
        opened = load_checkpoint(store, ident)
        with self._lock:
            self._open[key] = opened
            while len(self._open) > _KEPT:
                self._open.popitem(last=False)
        return opened
