"""Is this the right run? What is said where a checkpoint is another run's, or where there is nothing.

A checkpoint belongs to the run whose id its manifest names (see ckpt.ops.attempts). So a run that is copied
or renamed as a whole, ``attempts/`` with it, goes on under its new URL, and a checkpoint of another run that
somebody has put below this URL is found.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from difflib import get_close_matches
from itertools import islice

from ckpt.errors import CorruptError, NotFoundError, RefusedError
from ckpt.format.ids import CheckpointId, same_run, split_run_url
from ckpt.format.keys import ATTEMPTS, DATA, INDEX, LAYOUTS, MANIFESTS, PINS, PROBE
from ckpt.ops.attempts import read_attempt, read_run_id
from ckpt.ops.catalog import is_run
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["OTHER_RUN", "absence", "absence_among", "belongs", "find_foreign", "require_own"]

OTHER_RUN = "other-run"
"""Code of the errors of :func:`find_foreign`."""

_LISTED = 1000  # names beside or below a URL that are looked at: a page of a listing
_SHOWN = 5
_OWN_FOLDERS = frozenset(
    prefix.rstrip("/") for prefix in (ATTEMPTS, MANIFESTS, DATA, INDEX, LAYOUTS, PINS, PROBE, "recovery/")
)


def find_foreign(store: Store, manifest: disk_pb2.Manifest, run_id: str | None = None) -> RefusedError | None:
    """Return an error that says whose checkpoint this is, where it is not of the run at the store's URL.

    At most one request, beside those for a run id that is not given.

    Args:
        store: of the run.
        manifest: as it lies there.
        run_id: of the run; None: it is read.

    Raises:
        UnavailableError: the store cannot be reached.
    """
    if run_id is None:
        run_id = read_run_id(store) or ""
    why = _why_foreign(store, manifest, run_id)
    if why is None:
        return None
    return RefusedError(
        f"this is a checkpoint of another run, {why}; nothing was taken from it. Read it where it was saved, "
        "or copy that run as a whole, attempts/ included, to a URL of its own; delete what does not belong "
        "here",
        code=OTHER_RUN,
        checkpoint=CheckpointId.from_proto(manifest.id),
        url=store.url,
        saved_by_run=manifest.run,
        saved_run_id=manifest.run_id or "unknown",
        run_id=run_id or "unknown",
    )


def _why_foreign(store: Store, manifest: disk_pb2.Manifest, run_id: str) -> str | None:
    if not same_run(manifest.run_id, run_id):
        return "or of an earlier life of this one"
    if manifest.run == store.url.rstrip("/").rpartition("/")[2]:
        return None
    try:
        attempt = read_attempt(store, manifest.id.attempt)
    except NotFoundError:
        return "copied here without its attempts/"
    except CorruptError:  # there it is, at least; `ckpt verify --deep` names it
        return None
    if manifest.run_id:
        return None  # the run has another name now
    # An older version's: there is no id to compare, so the record of its attempt has to fit.
    parent = CheckpointId.from_proto(manifest.parent) if manifest.HasField("parent") else None
    if (attempt.world_size, attempt.parent) == (manifest.world_size, parent):
        return None
    return "as its name and the record of its attempt say"


def belongs(store: Store, run_id: str, attempt: int) -> bool:
    """Return whether a segment that was sealed by ``attempt`` of the life ``run_id`` is of this run.

    One request, where the run is there.

    Args:
        store: of the run.
        run_id: as the segment's index has it; empty: nothing is known, and it counts as this run's.
        attempt: of the segment's id.

    Raises:
        RefusedError: code "run-gone": the store knows nothing of the run.
        UnavailableError: the store cannot be reached.
    """
    if not run_id:
        return True
    with suppress(NotFoundError, CorruptError):
        known = read_attempt(store, attempt).run_id
        if known:
            return known == run_id
    present = read_run_id(store)
    if present is None:
        raise RefusedError(
            "the store knows nothing of this run: it was deleted there, or this is another store; what is "
            "sealed stays on the node and is not uploaded",
            code="run-gone",
            url=store.url,
            run_id=run_id,
        )
    return same_run(present, run_id)


def require_own(store: Store, manifest: disk_pb2.Manifest, run_id: str | None = None) -> None:
    """Raise RefusedError (code "other-run") where :func:`find_foreign` finds something."""
    found = find_foreign(store, manifest, run_id)
    if found is not None:
        raise found


def absence(url: str, opener: Callable[[str], Store]) -> NotFoundError:
    """Return the error that says that there is no run at ``url``, and what there is near it.

    A mistyped URL looks like a run that has not begun. So runs with similar names beside it, and runs below
    it, are named, where that is cheap: one listing of the URL and of its parent, at most a page each, and a
    few requests more.

    Args:
        url: of the run.
        opener: opens a store at a URL, with the run's options.

    Returns:
        As :func:`absence_among`.

    Raises:
        UnavailableError: the store cannot be reached.
    """
    with ExitStack() as stack:
        opened = {at: stack.enter_context(closing(opener(at))) for at in (url, split_run_url(url)[0])}
        return absence_among(
            url,
            folders=lambda at: list(islice(opened[at].list_dirs(""), _LISTED)),
            holds_run=lambda at, name: is_run(opened[at], name),
        )


def absence_among(
    url: str, *, folders: Callable[[str], list[str]], holds_run: Callable[[str, str], bool]
) -> NotFoundError:
    """The same by what ``folders`` says there is at a URL, and ``holds_run`` of one folder there.

    Returns:
        With code "no-run" where there are runs beside or below the URL, "empty-store" where there is nothing.
    """
    root, name = split_run_url(url)
    inner = (other for other in folders(url) if other not in _OWN_FOLDERS and holds_run(url, other))
    if below := list(islice(inner, _SHOWN)):
        return NotFoundError(
            "there is no run at this URL, but there are runs below it: a run's URL ends with its name",
            code="no-run",
            url=url,
            runs_below=below,
        )
    beside = [other for other in folders(root) if other != name]
    similar = {other for other in beside if other.lower() == name.lower()}
    similar.update(get_close_matches(name, beside, n=_SHOWN, cutoff=0.7))
    ordered = sorted(similar) + [other for other in beside if other not in similar]
    runs = list(islice((other for other in ordered[: 4 * _SHOWN] if holds_run(root, other)), _SHOWN))
    if not runs:
        return NotFoundError(
            "there is no run at this URL, nor any beside it: is it the right store, endpoint and path?",
            code="empty-store",
            url=url,
        )
    near = {
        "similar_runs": [other for other in runs if other in similar],
        "other_runs": [other for other in runs if other not in similar],
    }
    return NotFoundError(
        "there is no run at this URL, but there are others beside it: is the name right?",
        code="no-run",
        url=url,
        **{kind: names for kind, names in near.items() if names},
    )
