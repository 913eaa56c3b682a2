"""What a restore says where it finds nothing: why it begins from scratch, or that this must be a mistake."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from ckpt.errors import NotFoundError, RefusedError
from ckpt.events import event, get_logger
from ckpt.ops import catalog
from ckpt.ops.identity import absence
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt_trainer_hooks.agree import Agreement
from ckpt_trainer_hooks.ladder import Ladder

__all__ = ["absence_explained", "explain_nothing"]

_log = get_logger("restore")


@contextmanager
def absence_explained(agreement: Agreement, url: str, options: Mapping[str, str]) -> Iterator[None]:
    """Where the block finds that there is no run, on all ranks, say what there is near by instead."""
    try:
        yield
    except NotFoundError as error:
        if error.code != "no-run":
            raise

        def on_rank_0() -> NoReturn:
            raise _absence(url, options)

        agreement.decide("absence", on_rank_0)


def _absence(url: str, options: Mapping[str, str]) -> NotFoundError:
    return absence(url, lambda other: open_store(other, options))


def explain_nothing(
    store: Store, url: str, options: Mapping[str, str], ladder: Ladder, *, required: bool
) -> None:
    """Say why training begins from scratch. On rank 0.

    Args:
        store: of the run.
        url: of the run.
        options: of the store.
        ladder: after it has looked.
        required: finding nothing is an error.

    Raises:
        RefusedError: code "run-gone": this cannot be a fresh run.
        NotFoundError: a checkpoint is required; codes "no-checkpoint", "no-run", "empty-store".
        UnavailableError: the store cannot be reached.
    """
    if ladder.run_id is None and ladder.strangers:
        raise RefusedError(
            "nodes hold steps of this run, but the store knows nothing of it: either this is not the store, "
            "endpoint or path that it was saved to, or the run was deleted there. To begin anew all the same "
            "call restore(start_over=True), which sets those steps aside",
            code="run-gone",
            url=url,
            checkpoints=sorted({str(stranger.ident) for stranger in ladder.strangers}),
            hosts=sorted({stranger.host for stranger in ladder.strangers}),
        )
    why = _why(store, url, options, ladder)
    if required:
        raise why
    is_odd = not {"newest", "similar_runs", "runs_below"}.isdisjoint(why.context)
    event(
        _log,
        logging.WARNING if is_odd else logging.INFO,
        "restore.from_scratch",
        reason=why.message,
        **why.context,
    )


def _why(store: Store, url: str, options: Mapping[str, str], ladder: Ladder) -> NotFoundError:
    existing = next(catalog.list_checkpoints(store), None)
    if existing is not None:
        return NotFoundError(
            "the newest start of the run began anew on purpose and has committed nothing; name a checkpoint "
            "to go on from an earlier one",
            code="no-checkpoint",
            url=url,
            newest=existing.ident,
        )
    if ladder.run_id is not None:
        return NotFoundError(
            "the run was started before, and has no checkpoint yet", code="no-checkpoint", url=url
        )
    return _absence(url, options)
