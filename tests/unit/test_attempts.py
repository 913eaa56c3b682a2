"""Attempts: numbers are taken once, whatever races, lost replies and leftovers do."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.digest import Buffer
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import attempt_key
from ckpt.ops.attempts import claim_attempt, list_attempts, newest_attempt, read_attempt
from tests.support.builders import CountingStore, FakeClock, build_checkpoint, claim, memory_store


def test_numbers_count_up_and_records_tell_who_and_from_what() -> None:
    store = memory_store()
    assert newest_attempt(store) is None
    assert claim(store, world_size=8) == 1
    parent = CheckpointId(20, 1)
    assert claim_attempt(store, parent=parent, world_size=4, host="node7", clock=FakeClock(5.0)) == 2
    record = read_attempt(store, 2)
    assert (record.number, record.parent, record.world_size) == (2, parent, 4)
    assert (record.host, record.started_at) == ("node7", 5.0)
    assert read_attempt(store, 1).parent is None
    assert list(list_attempts(store)) == [2, 1]
    assert newest_attempt(store) == 2
    assert json.loads(store.get(attempt_key(2)))["parent"] == "000000000020.a000001"


def test_the_newest_is_found_by_number_with_one_request() -> None:
    store = CountingStore(memory_store())
    for number in range(1, 1201):
        body = {
            "attempt": number,
            "parent": None,
            "world_size": 1,
            "host": "",
            "started_at": 0,
            "claim_id": "",
        }
        store.inner.put(attempt_key(number), json.dumps(body).encode())
    assert newest_attempt(store) == 1200
    assert store.total == 1
    assert claim(store) == 1201


def test_racing_starts_get_different_numbers() -> None:
    store = memory_store()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim(store), range(8)))
    assert sorted(numbers) == list(range(1, 9))


class LosesReplies(CountingStore):
    """The first conditional put arrives, but its reply does not."""

    lost = False

    def put_new(self, key: str, data: Buffer) -> None:
        super().put_new(key, data)
        if not self.lost:
            self.lost = True
            raise UnavailableError("connection reset")


def test_a_lost_reply_does_not_use_up_a_number() -> None:
    store = LosesReplies(memory_store())
    assert claim(store) == 1
    assert list(list_attempts(store)) == [1]


class IgnoresConditions(CountingStore):
    """Overwrites where it should refuse; a rival's claim arrives right after ours."""

    rival: bytes | None = None

    def put_new(self, key: str, data: Buffer) -> None:
        self.put(key, data)

    def probe_conditional(self) -> bool:
        return False


class OverwritingClock(FakeClock):
    def __init__(self, store: IgnoresConditions) -> None:
        super().__init__()
        self.store = store

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.store.rival is not None:
            self.store.put(attempt_key(1), self.store.rival)
            self.store.rival = None


def test_without_conditional_put_an_overwritten_claim_is_noticed() -> None:
    other = memory_store()
    claim(other)
    store = IgnoresConditions(memory_store())
    store.rival = other.get(attempt_key(1))
    clock = OverwritingClock(store)
    number = claim_attempt(store, parent=None, world_size=1, host="late", clock=clock, settle_s=3.0)
    assert number == 2
    assert clock.slept == [3.0, 3.0]
    assert read_attempt(store, 1).host == "test"


def test_numbers_are_not_used_again_when_the_records_were_lost() -> None:
    """Case I06."""
    store = memory_store()
    built = build_checkpoint(store, 10, attempt=3, world_size=1)
    assert claim(store, parent=built.ident) == 4


def test_foreign_objects_are_passed_over() -> None:
    store = memory_store()
    claim(store)
    store.put("attempts/.keep", b"")
    store.put("attempts/000000.notes.txt", b"")
    assert newest_attempt(store) == 1
    assert claim(store) == 2


def test_a_parent_from_the_future_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        claim(memory_store(), parent=CheckpointId(10, 1))


def test_damaged_records_are_corrupt_and_absent_ones_not_found() -> None:
    store = memory_store()
    claim(store)
    claim(store)
    with pytest.raises(NotFoundError):
        read_attempt(store, 3)
    good = store.get(attempt_key(1))
    loop = json.loads(good) | {"parent": "000000000010.a000001"}
    for body in (good[:-10], b"[]", b"{}", store.get(attempt_key(2)), json.dumps(loop).encode()):
        store.put(attempt_key(1), body)
        with pytest.raises(CorruptError) as caught:
            read_attempt(store, 1)
        assert caught.value.code == "attempt"
