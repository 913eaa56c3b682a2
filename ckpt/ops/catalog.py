"""What exists in a run, and which checkpoint is the latest. Every reader asks here and nowhere else.

A checkpoint exists when its manifest does. ``latest`` is the highest step of the newest attempt; if that
attempt has committed nothing yet, the checkpoint it resumed from. So a zombie of an older attempt may still
commit (its checkpoint is whole and listed) without ever hiding what the newer attempt does, and an attempt
that was started afresh on purpose has no latest until it commits.

Nothing is remembered between calls: another process may commit or prune at any time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.ids import MAX_STEP, CheckpointId
from ckpt.format.keys import ATTEMPTS, MANIFESTS, manifest_key, parse_manifest_key
from ckpt.format.manifest import open_manifest
from ckpt.ops.attempts import first_parsed, newest_attempt, read_attempt
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.groups import read_layout
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = [
    "CheckpointInfo",
    "candidates",
    "exists",
    "latest",
    "list_checkpoints",
    "list_runs",
    "load_checkpoint",
    "read_manifest",
    "require_run",
    "resolve",
]

_log = get_logger("ops.catalog")
_WORKERS = 16
_RUN_FOLDERS = frozenset({MANIFESTS.rstrip("/"), ATTEMPTS.rstrip("/")})
_STEP = re.compile(r"\d{1,12}")


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

    def is_run(name: str) -> bool:
        return not _RUN_FOLDERS.isdisjoint(root.list_dirs(f"{name}/"))

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-runs") as pool:
        return [name for name, found in zip(names, pool.map(is_run, names), strict=True) if found]


def exists(store: Store, ident: CheckpointId) -> bool:
    """Return whether ``ident`` is committed. One request."""
    try:
        store.head(manifest_key(ident))
    except NotFoundError:
        return False
    return True


def latest(store: Store) -> CheckpointId | None:
    """Return the checkpoint to resume from, or None where there is none.

    The number of requests does not grow with the checkpoints: the newest attempt key, the newest manifest
    key, and for an attempt that has no manifest yet its record and a look at its parent. None means that the
    run has no checkpoint, or that its newest attempt began afresh on purpose and has committed nothing yet.

    Raises:
        CorruptError: code "attempt-missing": the record that says where to resume from is gone.
    """
    # Attempts first: seen in the other order, an attempt that starts and commits in between would look as if
    # it had committed nothing.
    attempt = newest_attempt(store)
    newest = first_parsed(store, MANIFESTS, parse_manifest_key)
    if newest is None:
        return None
    ident = newest[0]
    if attempt is None or attempt <= ident.attempt:
        return ident
    parent = _parent_of(store, attempt)
    return next(_line_from(store, parent), None) if parent else None


def candidates(store: Store) -> Iterator[CheckpointId]:
    """Yield ``latest``, then what to fall back to when it is damaged: back along the current line.

    The line goes down the steps of the latest's attempt, then on from what that attempt resumed from. It
    ends at an attempt that began afresh; checkpoints of abandoned branches are not on it.
    """
    start = latest(store)
    if start is not None:
        yield from _line_from(store, start)


def _line_from(store: Store, bound: CheckpointId) -> Iterator[CheckpointId]:
    """Yield the line back from ``bound`` (which itself may be gone).

    A lost attempt record ends the line; where that leaves it empty it is an error, because then nobody knows
    what to resume from.
    """
    is_empty = True
    while True:
        known = bound if exists(store, bound) else None
        if known is not None:
            is_empty = False
            yield known
        for ident in _steps_below(store, bound):
            is_empty = False
            known = ident
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


def _steps_below(store: Store, bound: CheckpointId) -> Iterator[CheckpointId]:
    # The keys of one attempt share the six digits that stand for it.
    prefix = manifest_key(CheckpointId(MAX_STEP, bound.attempt))[: len(MANIFESTS) + 6]
    for info in store.list_keys(prefix):
        ident = parse_manifest_key(info.key)
        if ident is not None and ident.step < bound.step:
            yield ident


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


def resolve(store: Store, text: str) -> CheckpointId:
    """Return the committed checkpoint that ``text`` names.

    Args:
        text: "latest"; a step such as "12000" (of the newest attempt that has it, which may not be the
            current line's); or a full id such as "000000012000.a000003".

    Raises:
        NotFoundError: code "no-checkpoint": there is none such.
        InvalidInputError: ``text`` is none of the three forms.
    """
    found: CheckpointId | None
    if text == "latest":
        found = latest(store)
    elif _STEP.fullmatch(text):
        step = int(text)
        found = next((info.ident for info in list_checkpoints(store) if info.ident.step == step), None)
    else:
        try:
            ident = CheckpointId.parse(text)
        except InvalidInputError as error:
            raise InvalidInputError(
                'a checkpoint is named by "latest", a step, or <step:12 digits>.a<attempt:6 digits>',
                code="checkpoint-name",
                text=text,
            ) from error
        found = ident if exists(store, ident) else None
    if found is None:
        require_run(store)
        raise NotFoundError("no such checkpoint", code="no-checkpoint", checkpoint=text, url=store.url)
    return found


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
