"""What exists in a run, and which checkpoint is the latest. Every reader asks here and nowhere else.

A checkpoint exists when its manifest does. ``latest`` is the highest step of the newest attempt; if that
attempt has committed nothing yet, the checkpoint it resumed from. So a zombie of an older attempt may still
commit (its checkpoint is whole and listed) without ever hiding what the newer attempt does, and an attempt
that was started afresh on purpose has no latest until it commits.

Nothing is remembered between calls: another process may commit or prune at any time.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.format.ids import MAX_STEP, CheckpointId
from ckpt.format.keys import ATTEMPTS, MANIFESTS, manifest_key, parse_manifest_key
from ckpt.format.manifest import open_manifest
from ckpt.ops.attempts import first_parsed, newest_attempt, read_attempt
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.groups import read_layout
from ckpt.ops.reread import read_again
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "CheckpointInfo",
    "awaited_parents",
    "candidates",
    "exists",
    "is_on_line",
    "is_run",
    "latest",
    "list_checkpoints",
    "list_runs",
    "load_checkpoint",
    "naming_pruned",
    "read_manifest",
    "require_run",
    "resolve",
]

_log = get_logger("ops.catalog")
_WORKERS = 16
_LOOKS = 3
_RUN_FOLDERS = frozenset({MANIFESTS.rstrip("/"), ATTEMPTS.rstrip("/")})
_STEP = re.compile(r"\d{1,12}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One line of a listing.

    Attributes:
        ident: which checkpoint.
        nbytes: of the manifest object.
        committed_at: Unix seconds by the store's clock; for people, never for order.
    """

    ident: CheckpointId
    nbytes: int
    committed_at: float


def list_checkpoints(store: Store) -> Iterator[CheckpointInfo]:
    """Yield every committed checkpoint, newest first: by attempt, then step, descending.

    Reads keys only, a page of about 1000 per request.
    """
    for info in store.list_keys(MANIFESTS):
        ident = parse_manifest_key(info.key)
        if ident is not None:
            yield CheckpointInfo(ident=ident, nbytes=info.nbytes, committed_at=info.modified_at)


def require_run(store: Store) -> None:
    """Raise NotFoundError (code "no-run") unless the store has a checkpoint or an attempt."""
    if next(list_checkpoints(store), None) is None and newest_attempt(store) is None:
        raise NotFoundError("there is no run at this URL", code="no-run", url=store.url)


def list_runs(root: Store) -> list[str]:
    """Return the names of the runs directly below ``root``, ascending: folders with manifests or attempts.

    One request (of a page) for the root and one for each folder in it; reads no keys below them.
    """
    names = list(root.list_dirs(""))
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-runs") as pool:
        found = pool.map(lambda name: is_run(root, name), names)
        return [name for name, is_one in zip(names, found, strict=True) if is_one]


def is_run(root: Store, name: str) -> bool:
    """Return whether the folder ``name`` of ``root`` is a run. One request (of a page)."""
    return not _RUN_FOLDERS.isdisjoint(root.list_dirs(f"{name}/"))


def exists(store: Store, ident: CheckpointId) -> bool:
    """Return whether ``ident`` is committed. One request."""
    try:
        store.head(manifest_key(ident))
    except NotFoundError:
        return False
    return True


def latest(store: Store, staged: Collection[CheckpointId] = ()) -> CheckpointId | None:
    """Return the checkpoint to resume from, or None where there is none.

    The number of requests does not grow with the checkpoints: the newest attempt key, the newest manifest
    key, and for an attempt that has no manifest yet its record and a look at its parent. None means that the
    run has no checkpoint, or that its newest attempt began afresh on purpose and has committed nothing yet.

    Args:
        store: of the run.
        staged: steps that count like committed ones, because the caller can read them elsewhere.

    Raises:
        CorruptError: code "attempt-missing": the record that says where to resume from is gone.
    """
    # Attempts first: seen in the other order, an attempt that starts and commits in between would look as if
    # it had committed nothing.
    attempt = newest_attempt(store)
    first = first_parsed(store, MANIFESTS, parse_manifest_key)
    known = [*_of_this_run(attempt, staged), *([first[0]] if first else [])]
    if not known:
        return None
    newest = max(known, key=lambda ident: (ident.attempt, ident.step))
    if attempt is None or attempt <= newest.attempt:
        return newest
    parent = _parent_of(store, attempt)
    return next(_line_from(store, parent, staged), None) if parent else None


def _of_this_run(attempt: int | None, staged: Collection[CheckpointId]) -> Iterator[CheckpointId]:
    """Leave out steps of attempts that the run never had: what a run that was deleted left on the nodes."""
    return (ident for ident in staged if attempt is not None and ident.attempt <= attempt)


def candidates(store: Store, staged: Collection[CheckpointId] = ()) -> Iterator[CheckpointId]:
    """Yield ``latest``, then what to fall back to when it is damaged: back along the current line.

    The line goes down the steps of the latest's attempt, then on from what that attempt resumed from. It
    ends at an attempt that began afresh; checkpoints of abandoned branches are not on it.

    Args:
        store: of the run.
        staged: as for :func:`latest`.

    Raises:
        UnavailableError: code "stale-listing": the store lists as newest what is not there any more.
    """
    start: CheckpointId | None = None
    for _ in range(_LOOKS):
        start = latest(store, staged)
        if start is None:
            return
        line = _line_from(store, start, staged)
        # Pruned since it was listed, or an old listing: then something newer is there, and what is left of
        # this line is not what to resume from (nor is nothing).
        if next(line, None) == start:
            yield start
            yield from line
            return
    raise UnavailableError(
        "the store lists as the newest checkpoint one that is not there: its listing is old; try again",
        code="stale-listing",
        checkpoint=start,
        url=store.url,
    )


def is_on_line(store: Store, ident: CheckpointId) -> bool:
    """Return whether no later start of the run went on from something that lies before ``ident``.

    Raises:
        CorruptError: code "attempt-missing".
    """
    attempt = newest_attempt(store) or 0
    while attempt > ident.attempt:
        parent = _parent_of(store, attempt)
        if parent is None or parent.attempt < ident.attempt:
            return False
        if parent.attempt == ident.attempt:
            return ident.step <= parent.step
        attempt = parent.attempt
    return attempt == ident.attempt


def awaited_parents(store: Store) -> list[CheckpointId]:
    """Return what the newest attempt resumed from before it was committed, and so on back; newest first.

    (A restore may use a step that is sealed on all nodes; its commit follows.) Ends at an attempt that has
    committed something, since from then on nobody needs the others.
    """
    found: list[CheckpointId] = []
    attempt = newest_attempt(store)
    while (
        attempt is not None and next(_steps_below(store, CheckpointId(MAX_STEP, attempt), ()), None) is None
    ):
        try:
            parent = read_attempt(store, attempt).parent
        except NotFoundError:
            break
        if parent is None or exists(store, parent):
            break
        found.append(parent)
        attempt = parent.attempt
    return found


def _line_from(
    store: Store, bound: CheckpointId, staged: Collection[CheckpointId] = ()
) -> Iterator[CheckpointId]:
    """Yield the line back from ``bound`` (which itself may be gone, or may never have been committed).

    A lost attempt record ends the line; where that leaves it empty it is an error, because then nobody knows
    what to resume from.
    """
    is_empty = True
    while True:
        known = bound if exists(store, bound) else None
        if known is not None or bound in staged:
            is_empty = False
            yield bound
        for ident, is_committed in _steps_below(store, bound, staged):
            is_empty = False
            known = ident if is_committed else known
            yield ident
        try:
            parent = _parent_of(store, bound.attempt, known)
        except CorruptError as error:
            if is_empty or error.code != "attempt-missing":
                raise
            event(_log, logging.WARNING, "catalog.line_broken", attempt=bound.attempt, url=store.url)
            return
        if parent is None:
            return
        bound = parent


def _steps_below(
    store: Store, bound: CheckpointId, staged: Collection[CheckpointId]
) -> Iterator[tuple[CheckpointId, bool]]:
    """Yield the lower steps of the attempt of ``bound``, descending, each with whether it is committed."""
    # The keys of one attempt share the six digits that stand for it.
    prefix = manifest_key(CheckpointId(MAX_STEP, bound.attempt))[: len(MANIFESTS) + 6]
    parsed = (parse_manifest_key(info.key) for info in store.list_keys(prefix))
    committed = ((ident, True) for ident in parsed if ident is not None and ident.step < bound.step)
    other = [(ident, False) for ident in staged if ident.attempt == bound.attempt and ident.step < bound.step]
    last = None
    for ident, is_committed in heapq.merge(committed, sorted(other, reverse=True), reverse=True):
        if ident != last:  # of one that is both, the committed comes first
            yield ident, is_committed
        last = ident


def _parent_of(store: Store, attempt: int, committed: CheckpointId | None = None) -> CheckpointId | None:
    """Return what ``attempt`` resumed from: by its record, else by a manifest it committed."""
    try:
        return read_attempt(store, attempt).parent
    except NotFoundError as error:
        if committed is None:
            raise CorruptError(
                "the record of an attempt is gone, so what it resumed from is unknown; name a checkpoint",
                code="attempt-missing",
                attempt=attempt,
                url=store.url,
            ) from error
    manifest = read_manifest(store, committed)
    return CheckpointId.from_proto(manifest.parent) if manifest.HasField("parent") else None


def resolve(store: Store, text: str, staged: Collection[CheckpointId] = ()) -> CheckpointId:
    """Return the committed checkpoint that ``text`` names.

    Args:
        store: of the run.
        text: "latest"; a step such as "12000" (of the newest attempt that has it, which may not be the
            current line's); or a full id such as "000000012000.a000003".
        staged: as for :func:`latest`; looked at where nothing committed fits.

    Raises:
        NotFoundError: code "no-checkpoint": there is none such.
        InvalidInputError: ``text`` is none of the three forms.
    """
    found: CheckpointId | None
    if text == "latest":
        found = latest(store, staged)
    elif _STEP.fullmatch(text):
        step = int(text)
        found = next((info.ident for info in list_checkpoints(store) if info.ident.step == step), None)
        if found is None:
            found = max((ident for ident in staged if ident.step == step), default=None)
    else:
        try:
            ident = CheckpointId.parse(text)
        except InvalidInputError as error:
            raise InvalidInputError(
                'a checkpoint is named by "latest", a step, or <step:12 digits>.a<attempt:6 digits>',
                code="checkpoint-name",
                text=text,
            ) from error
        found = ident if ident in staged or exists(store, ident) else None
    if found is None:
        require_run(store)
        raise NotFoundError("no such checkpoint", code="no-checkpoint", checkpoint=text, url=store.url)
    return found


@read_again
def read_manifest(store: Store, ident: CheckpointId) -> disk_pb2.Manifest:
    """Return the manifest of ``ident``.

    Raises:
        NotFoundError: code "no-checkpoint": it is not committed.
        CorruptError: the object is damaged or another checkpoint's.
    """
    key = manifest_key(ident)
    try:
        data = store.get(key)
    except NotFoundError as error:
        raise NotFoundError(
            "no such checkpoint", code="no-checkpoint", checkpoint=ident, url=store.url
        ) from error
    return open_manifest(data, ident, key=key)


def load_checkpoint(store: Store, ident: CheckpointId) -> Checkpoint:
    """Return ``ident`` with its manifest and layouts read; group and segment indexes are read when asked for.

    Two requests.

    Raises:
        NotFoundError: it is not committed.
        CorruptError: manifest or layout is damaged.
    """
    manifest = read_manifest(store, ident)
    return Checkpoint(store, manifest, read_layout(store, manifest.layout_digest))


@contextlib.contextmanager
def naming_pruned(store: Store, ident: CheckpointId) -> Iterator[None]:
    """Around reads of ``ident``: what fails because it was pruned meanwhile is no damage.

    Raises:
        NotFoundError: code "pruned", instead of whatever was missing first.
    """
    try:
        yield
    except (CorruptError, NotFoundError) as error:
        if exists(store, ident):
            raise
        raise NotFoundError(
            "the checkpoint was pruned while it was read; take another, or pin what must stay",
            code="pruned",
            checkpoint=ident,
            url=store.url,
        ) from error
