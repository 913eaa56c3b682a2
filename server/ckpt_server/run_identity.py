"""Nothing of another life of a run is uploaded, committed or mistaken for this one's: it is set aside.

The store is the judge: it has the record of every attempt with the run's id. A trainer sets aside what its
node holds when it starts; this is for nodes that no trainer has started on since, and for what arrives from
others.
"""

from __future__ import annotations

import contextlib

from ckpt.errors import CorruptError, NotFoundError, RefusedError
from ckpt.format.ids import CheckpointId, same_run
from ckpt.ops.identity import OTHER_RUN, belongs
from ckpt.storage.aside import set_aside
from ckpt.storage.staging import StagingDir
from ckpt_server.runs import Run
from ckpt_server.uploader import Segment

__all__ = ["RunIdentity"]


class RunIdentity:
    """Thread-safe.

    Args:
        place: the staging directory, or the one of the node's replicas.
    """

    def __init__(self, place: StagingDir) -> None:
        self._place = place

    def require_own(self, run: Run, ident: CheckpointId, rank: int | None = None) -> None:
        """Set the segments of ``ident`` aside where they are of another life of the run than the store has.

        One request to the store.

        Args:
            run: of the segments.
            ident: the checkpoint.
            rank: whose segment to look at; None: the first that is sealed.

        Raises:
            RefusedError: code "other-run": that was done; "run-gone": the store knows nothing of the run.
            UnavailableError: the store cannot be reached, or the directory not be changed.
        """
        sealed = self._place.sealed_ranks(run.key, ident)
        looked_at = sealed if rank is None else [rank]
        run_id = next((found for one in looked_at if (found := self._of(run, ident, one))), "")
        if belongs(run.store, run_id, ident.attempt):
            return
        ranks = [other for other in sealed if self._of(run, ident, other) == run_id]
        kept = set_aside(self._place, run.key, ident, ranks, of=run_id)
        raise RefusedError(
            "these segments are of another life of the run, which was deleted and begun again; they were set "
            "aside and are not uploaded",
            code=OTHER_RUN,
            checkpoint=ident,
            run_id=run_id,
            path=kept.path,
        )

    def make_way(self, run: Run, segment: Segment, run_id: str) -> None:
        """Set aside what is sealed here under the name of a segment that arrives, if it is of another life.

        Raises:
            RefusedError: code "other-run": it is the one that arrives that is of another life; "run-gone".
            UnavailableError: the store cannot be reached, or the directory not be changed.
        """
        there = self._of(run, segment.ident, segment.rank)
        if same_run(there, run_id):
            return
        if not belongs(run.store, run_id, segment.ident.attempt):
            raise RefusedError(
                "the segment is of another life of the run, which was deleted and begun again",
                code=OTHER_RUN,
                checkpoint=segment.ident,
                rank=segment.rank,
                run_id=run_id,
            )
        set_aside(self._place, run.key, segment.ident, [segment.rank], of=there)

    def _of(self, run: Run, ident: CheckpointId, rank: int) -> str:
        """The run id of a sealed segment; empty where it has none, or is gone or damaged: others say so."""
        with contextlib.suppress(NotFoundError, CorruptError):
            return self._place.read_index(run.key, ident, rank).run_id
        return ""
