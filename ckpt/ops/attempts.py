"""Attempts: the numbered starts of a run, claimed by create-if-absent.

``attempts/999996.000003.json`` says who started attempt 3 and from which checkpoint. JSON, because people
read it. Written once, never changed.

The records also say which run this is. A run that was deleted and begun again at its URL counts from 1
again, so neither URL nor numbers tell its two lives apart; the *run id* does. It is the claim of the first
attempt, and every later attempt repeats it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ckpt.clock import Clock, random_bytes
from ckpt.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError
from ckpt.format.ids import MAX_ATTEMPT, CheckpointId
from ckpt.format.keys import ATTEMPTS, MANIFESTS, attempt_key, parse_attempt_key, parse_manifest_key
from ckpt.format.limits import MALFORMED, load_json
from ckpt.format.manifest import open_manifest
from ckpt.ops.condemn import protected
from ckpt.storage.base import ObjectInfo, Store
from ckpt.storage.conditional import commit_put

__all__ = [
    "NO_CLAIM",
    "Attempt",
    "claim_attempt",
    "first_parsed",
    "list_attempts",
    "newest_attempt",
    "read_attempt",
    "read_run_id",
    "starts_from",
]

NO_CLAIM = "0" * 32
"""``claim_id`` of a record that was put again by a repair: what was claimed is not known any more."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1, 2, 3 ...; the larger is the newer.
        parent: the checkpoint it resumed from; None for a fresh start.
        world_size: number of ranks.
        host: where rank 0 ran; for people.
        started_at: Unix seconds of the claimer's clock; for people.
        claim_id: 32 random hex digits that tell our own claim from a rival's.
        run_id: of the run's life; empty: claimed by an older version.
    """

    number: int
    parent: CheckpointId | None
    world_size: int
    host: str
    started_at: float
    claim_id: str
    run_id: str = ""

    def to_json(self) -> bytes:
        body = {
            "attempt": self.number,
            "parent": str(self.parent) if self.parent else None,
            "world_size": self.world_size,
            "host": self.host,
            "started_at": self.started_at,
            "claim_id": self.claim_id,
        }
        if self.run_id:
            body["run_id"] = self.run_id
        return json.dumps(body, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, *, key: str) -> Attempt:
        """Parse the body of the object ``key``. Raises CorruptError, code "attempt"."""
        try:
            body = load_json(data)
            parent = CheckpointId.parse(body["parent"]) if body["parent"] is not None else None
            attempt = cls(
                number=int(body["attempt"]),
                parent=parent,
                world_size=int(body["world_size"]),
                host=str(body["host"]),
                started_at=float(body["started_at"]),
                claim_id=str(body["claim_id"]),
                run_id=str(body.get("run_id", "")),
            )
        except (*MALFORMED, InvalidInputError) as error:
            raise CorruptError("attempt record is damaged", code="attempt", key=key) from error
        attempt._check(key)
        return attempt

    def _check(self, key: str) -> None:
        if self.number != parse_attempt_key(key):
            raise CorruptError("attempt record lies under a wrong key", code="attempt", key=key)
        if self.parent is not None and self.parent.attempt >= self.number:
            # Following parents must always go down, or it might never end.
            raise CorruptError(
                "attempt names a parent that is not older than itself",
                code="attempt",
                key=key,
                parent=self.parent,
            )


def first_parsed(store: Store, prefix: str, parse: Callable[[str], T | None]) -> tuple[T, ObjectInfo] | None:
    """Return the first object below ``prefix`` whose key parses, or None. One request, debris aside.

    Keys that do not parse (somebody's notes, a tool's marker) are passed over; a whole listing is asked
    for only where they lie in front.
    """
    seen = 0
    for info in store.list_keys(prefix, limit=1):
        seen += 1
        parsed = parse(info.key)
        if parsed is not None:
            return parsed, info
    if not seen:
        return None
    for info in store.list_keys(prefix):
        parsed = parse(info.key)
        if parsed is not None:
            return parsed, info
    return None


def newest_attempt(store: Store) -> int | None:
    """Return the highest attempt number, or None where the run has none yet. One request."""
    found = first_parsed(store, ATTEMPTS, parse_attempt_key)
    return found[0] if found else None


def read_attempt(store: Store, number: int) -> Attempt:
    """Return the record of an attempt. Raises NotFoundError, CorruptError."""
    key = attempt_key(number)
    return Attempt.from_json(store.get(key), key=key)


def read_run_id(store: Store) -> str | None:
    """Return the id of the run's present life.

    Two or three requests.

    Returns:
        None: the store knows nothing of the run, neither an attempt nor a manifest. Empty: the run is there,
        and the records that would say its id are lost or damaged.

    Raises:
        UnavailableError: the store cannot be reached.
    """
    newest = newest_attempt(store)
    if newest is None:
        return _run_id_of_manifests(store)
    for number in dict.fromkeys((newest, 1)):
        try:
            attempt = read_attempt(store, number)
        except (NotFoundError, CorruptError):  # reported by whoever needs the record itself
            continue
        if attempt.run_id:
            return attempt.run_id
        if number == 1 and attempt.claim_id != NO_CLAIM:
            return attempt.claim_id
    return ""


def _run_id_of_manifests(store: Store) -> str | None:
    """What the newest manifest says, where no attempt record is left."""
    found = first_parsed(store, MANIFESTS, parse_manifest_key)
    if found is None:
        return None
    ident, info = found
    try:
        return open_manifest(store.get(info.key), ident, key=info.key).run_id
    except (NotFoundError, CorruptError):
        return ""


def list_attempts(store: Store) -> Iterator[int]:
    """Yield the attempt numbers, newest first."""
    for info in store.list_keys(ATTEMPTS):
        number = parse_attempt_key(info.key)
        if number is not None:
            yield number


def starts_from(store: Store, parent: CheckpointId | None, *, most: int) -> int:
    """How many attempts in a row, the newest last, have resumed from ``parent``; counts to ``most`` at most.

    More than a few mean that the run fails again and again before it saves.
    """
    count = 0
    for number in list_attempts(store):
        if count == most or read_attempt(store, number).parent != parent:
            break
        count += 1
    return count


def claim_attempt(
    store: Store,
    *,
    parent: CheckpointId | None,
    world_size: int,
    host: str,
    clock: Clock,
    parent_is_committed: bool = False,
    settle_s: float = 1.0,
) -> int:
    """Take the next attempt number of the run and return it. Blocks on the store.

    Called once per start, by one rank, after it decided what to resume from. From then on this attempt is
    the newest, and ``latest`` follows it (design: "a zombie of attempt 2 can never hide what attempt 3
    does").

    Args:
        store: of the run.
        parent: the checkpoint resumed from; None for a fresh start.
        world_size: number of ranks.
        host: for people.
        clock: time of the record, and of the wait below.
        parent_is_committed: the parent was restored from its commit, so it must still be there.
        settle_s: where the store does not keep the condition of ``put_new``, how long to wait before
            looking whether somebody else has overwritten our claim.

    Raises:
        InvalidInputError: the parent's attempt is not below the new number (it belongs to another run).
        NotFoundError, RefusedError: code "no-checkpoint", "condemned": the parent was pruned meanwhile, or is
            just being pruned. Restore again.
        ConflictError: no number could be had, because others kept taking them.
        UnavailableError: the store cannot be reached; a number may be used up, which does no harm.
    """
    with contextlib.ExitStack() as stack:
        if parent is not None:  # until it is what ``latest`` names, a prune would take it
            stack.enter_context(protected(store, parent, may_be_staged=not parent_is_committed))
        return _claim(store, parent, world_size=world_size, host=host, clock=clock, settle_s=settle_s)


def _claim(
    store: Store,
    parent: CheckpointId | None,
    *,
    world_size: int,
    host: str,
    clock: Clock,
    settle_s: float,
) -> int:
    conditional = store.probe_conditional()
    claim_id = random_bytes(16).hex()
    for _ in range(100):
        number = _next_number(store)
        _check_number(number, parent)
        attempt = Attempt(
            number=number,
            parent=parent,
            world_size=world_size,
            host=host,
            started_at=clock.now(),
            claim_id=claim_id,
            run_id=(read_run_id(store) if number > 1 else None) or claim_id,
        )
        if not commit_put(store, attempt_key(number), attempt.to_json(), claim_id.encode(), clock=clock):
            continue
        if conditional or _survives(store, attempt, clock, settle_s):
            return number
    raise ConflictError("other starts of this run keep taking the attempt numbers", url=store.url)


def _next_number(store: Store) -> int:
    # Manifests count too: were attempts/ lost, a number used again would hide behind its namesake's steps.
    manifest = first_parsed(store, MANIFESTS, parse_manifest_key)
    return max(newest_attempt(store) or 0, manifest[0].attempt if manifest else 0) + 1


def _check_number(number: int, parent: CheckpointId | None) -> None:
    if number > MAX_ATTEMPT:
        raise InvalidInputError("attempt numbers are used up", code="attempt", largest=MAX_ATTEMPT)
    if parent is not None and parent.attempt >= number:
        raise InvalidInputError(
            "the parent is of an attempt this run never had", code="attempt", parent=parent, next=number
        )


def _survives(store: Store, attempt: Attempt, clock: Clock, settle_s: float) -> bool:
    # The store overwrites where it should refuse: a rival that listed before our put may put after it.
    clock.sleep(settle_s)
    try:
        return read_attempt(store, attempt.number).claim_id == attempt.claim_id
    except NotFoundError:
        return False
