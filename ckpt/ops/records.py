"""The small records beside a committed checkpoint: its attempt, and what it borrowed. Found, and put again.

Marks are not looked at: once a checkpoint is committed nobody reads them. A pin is its key alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.errors import ConflictError, CorruptError, NotFoundError
from ckpt.format.envelope import Kind, seal_message
from ckpt.format.ids import CheckpointId, same_run
from ckpt.format.keys import attempt_key, index_prefix, parse_borrows_key
from ckpt.ops.attempts import NO_CLAIM, Attempt, read_attempt, read_run_id
from ckpt.ops.borrow import read_borrows
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["check_records", "repair_records"]


def check_records(store: Store, manifest: disk_pb2.Manifest) -> list[CorruptError]:
    """Return what is wrong with the records of a committed checkpoint. Raises UnavailableError."""
    ident = CheckpointId.from_proto(manifest.id)
    problems = []
    try:
        found = _attempt_problem(store, manifest)
    except NotFoundError:
        found = None  # needed only where it is the newest one's; then `latest` says so
    if found is not None:
        problems.append(found)
    problems += [error for _, error in _bad_borrows(store, ident)]
    return problems


def _attempt_problem(store: Store, manifest: disk_pb2.Manifest) -> CorruptError | None:
    ident = CheckpointId.from_proto(manifest.id)
    parent = CheckpointId.from_proto(manifest.parent) if manifest.HasField("parent") else None
    try:
        attempt = read_attempt(store, ident.attempt)
    except CorruptError as error:
        return error
    if not same_run(attempt.run_id, manifest.run_id):
        return None  # the checkpoint is another run's, and says so (ckpt.ops.identity); the record is fine
    if parent is not None and attempt.parent != parent:
        return CorruptError(
            "attempt record names another parent than its checkpoint",
            code="attempt",
            key=attempt_key(ident.attempt),
            parent=attempt.parent,
            expected=parent,
        )
    return None


def _bad_borrows(store: Store, ident: CheckpointId) -> Iterator[tuple[str, CorruptError]]:
    for info in store.list_keys(f"{index_prefix(ident)}borrows-"):
        if parse_borrows_key(info.key) is None:
            continue
        try:
            read_borrows(store, info.key)
        except NotFoundError:
            continue
        except CorruptError as error:
            error.context.setdefault("key", info.key)
            yield info.key, error


def repair_records(
    store: Store, manifest: disk_pb2.Manifest, indexes: Sequence[disk_pb2.SegmentIndex], *, dry_run: bool
) -> Iterator[tuple[str, str]]:
    """Put damaged records again (also a missing attempt record); yield (key, what was wrong).

    What a rebuilt attempt record says of host and time is of the commit, not of the start: both are for
    people. A rebuilt record of what was borrowed names what the manifest refers to: from the commit on, that
    is what counts.

    Args:
        store: of the run.
        manifest: of the checkpoint.
        indexes: of its segments, as committed.
        dry_run: put nothing.
    """
    ident = CheckpointId.from_proto(manifest.id)
    code = None
    try:
        problem = _attempt_problem(store, manifest)
        code = problem.code if problem else None
    except NotFoundError:
        code = "missing"
    if code is not None and same_run(manifest.run_id, read_run_id(store) or ""):
        key = attempt_key(ident.attempt)
        if not dry_run:
            _put_attempt(store, key, _attempt_of(manifest, indexes), is_new=code == "missing")
        yield key, code
    for key, error in list(_bad_borrows(store, ident)):
        base = parse_borrows_key(key)
        assert base is not None
        record = disk_pb2.Borrows(
            id=manifest.id, base=base[1].to_proto(), references=manifest.references or [base[1].to_proto()]
        )
        if not dry_run:
            store.put(key, seal_message(Kind.BORROWS, record))
        yield key, error.code


def _attempt_of(manifest: disk_pb2.Manifest, indexes: Sequence[disk_pb2.SegmentIndex]) -> Attempt:
    del indexes
    return Attempt(
        number=manifest.id.attempt,
        parent=CheckpointId.from_proto(manifest.parent) if manifest.HasField("parent") else None,
        world_size=manifest.world_size,
        host="rebuilt by ckpt repair",
        started_at=manifest.committed_at,
        claim_id=NO_CLAIM,
        run_id=manifest.run_id,
    )


def _put_attempt(store: Store, key: str, attempt: Attempt, *, is_new: bool) -> None:
    if not is_new:
        store.put(key, attempt.to_json())
        return
    try:
        store.put_new(key, attempt.to_json())
    except ConflictError:
        return  # somebody else has put it meanwhile
