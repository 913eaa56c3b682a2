"""Methods of the manager besides saving and restoring: for places in a training loop, and for looking."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckpt.ops import catalog
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig
from ckpt_trainer_hooks.accumulation import Accumulation
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.lineage import Lineage
from ckpt_trainer_hooks.pipeline import SavePipeline
from ckpt_trainer_hooks.policy import SaveDecisionPolicy
from ckpt_trainer_hooks.stop_options import StopReason
from ckpt_trainer_hooks.watch import Watch

__all__ = ["LoopMethods"]


class LoopMethods:
    """Part of :class:`ckpt_trainer_hooks.CheckpointManager`, which has the attributes that are used here."""

    _accumulation: Accumulation
    _config: RunConfig
    _lineage: Lineage
    _pipeline: SavePipeline
    _policy: SaveDecisionPolicy
    _watch: Watch

    def _save_and_stop(self, handle: SaveHandle | None) -> None:
        raise NotImplementedError

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold around a part of the loop that is to be told apart where ranks are slow or hang, such as
        ``with ckpt.phase("data"): batch = next(batches)``. Costs some microseconds; 24 bytes of name at most.
        """
        return self._watch.pulse.phase(name)

    def check_stop(self) -> None:
        """Stop here if a stop was asked for: for long phases between two steps, such as an evaluation.

        The state must be that after the last :meth:`step`. Every rank should call it in such a phase, where
        ranks do not wait for each other. Costs one look at an attribute.

        Raises:
            StopTraining: as from :meth:`step`.
        """
        if self._watch.check_stop():
            self._save_and_stop(None)

    @property
    def should_stop(self) -> bool:
        """Whether a stop was asked for and carried out; with ``on_stop="flag"`` the loop should end then."""
        return self._watch.stop_reason is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """What a stop achieved, with the exit code for the launcher; None where there was none."""
        return self._watch.stop_reason

    def microbatch(self, index: int, *, of: int) -> contextlib.AbstractContextManager[None]:
        """Hold around forward and backward of microbatch ``index`` (from 0) of ``of`` in one iteration.

        Needed only where a save may come between microbatches (a signal, a timer). Without it every save is
        taken for one between iterations.

        Raises:
            InvalidInputError: on entry, when it is not the microbatch whose turn it is.
        """
        return self._accumulation.microbatch(index, of)

    def remaining_microbatches(self, of: int) -> range:
        """Return the microbatches of this iteration that are not in the gradients yet.

        All of them, but in the iteration that a checkpoint of ``accumulation="capture"`` is resumed in.

        Raises:
            InvalidInputError: ``of`` is not the number that the restored accumulation began with.
        """
        return self._accumulation.remaining(of)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold around an edit of parameters outside ``optimizer.step()`` (EMA swap, manual initialisation).

        Waits until no copy of the state is running, for one memory copy at most. An edit that does without
        is found and the snapshot thrown away, unless it goes through ``.data``, which leaves no trace.
        """
        self._pipeline.wait_until_captured()
        yield

    # --- looking ---

    def should_save(self, step: int) -> bool:
        """Return whether the policy wants a save after ``step`` completed optimizer steps."""
        return self._policy.should_save(step)

    @property
    def attempt(self) -> int | None:
        """Number of this start of the run; None before restore()."""
        return self._lineage.attempt

    def latest_step(self) -> int | None:
        """Return the step that restore() would choose among committed checkpoints, or None."""
        with contextlib.closing(open_store(self._config.url, self._config.store_options)) as store:
            found = catalog.latest(store)
        return None if found is None else found.step

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending, each once."""
        with contextlib.closing(open_store(self._config.url, self._config.store_options)) as store:
            return sorted({info.ident.step for info in catalog.list_checkpoints(store)})
