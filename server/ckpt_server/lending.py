"""What the segments of a run may borrow, asked of the store once per step and node."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ckpt.format.ids import CheckpointId
from ckpt.ops.borrow import Lender, open_lender
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Lending"]

_REMEMBERED = 2  # steps


class Lending:
    """The lenders of one run's steps on this node. Thread-safe: ranks of one step share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lenders: OrderedDict[CheckpointId, Lender | None] = OrderedDict()  # guarded by self._lock

    def lender(self, store: Store, ident: CheckpointId, index: disk_pb2.SegmentIndex) -> Lender | None:
        """Return what segments of ``ident`` may borrow; None where there is nothing. Raises UnavailableError.

        Args:
            store: of the run.
            ident: the step.
            index: of one of its segments on this node.
        """
        with self._lock:
            if ident not in self._lenders:
                parent = CheckpointId.from_proto(index.parent) if index.HasField("parent") else None
                self._lenders[ident] = open_lender(store, ident, parent, index.group.ranks)
                while len(self._lenders) > _REMEMBERED:
                    self._lenders.popitem(last=False)
            return self._lenders[ident]
