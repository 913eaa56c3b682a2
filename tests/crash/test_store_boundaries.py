"""The writer dies at each request that changes the store, before or after it took effect, and starts again.

Whatever the instant: ``latest`` is whole, never older than the last commit that returned, and the second
start finishes everything and leaves no debris.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from ckpt.digest import Buffer
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import checkpoint_of_data_key, parse_group_key
from ckpt.ops.catalog import latest, list_checkpoints, load_checkpoint
from ckpt.ops.commit import try_commit
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.ops.verify import verify_deep
from ckpt.storage.base import Store
from tests.support.builders import CountingStore, FakeClock, build_checkpoint, claim, memory_store, swept


class Killed(BaseException):
    """The process is gone: nothing may catch this."""


class DyingStore(CountingStore):
    """Dies at the n-th request that changes the store."""

    def __init__(self, inner: Store, at: int, *, takes_effect: bool) -> None:
        super().__init__(inner)
        self.at = at
        self.takes_effect = takes_effect
        self.changes = 0

    def _dies(self) -> bool:
        self.changes += 1
        if self.changes == self.at and not self.takes_effect:
            raise Killed
        return self.changes == self.at

    def put(self, key: str, data: Buffer) -> None:
        dies = self._dies()
        super().put(key, data)
        if dies:
            raise Killed

    def put_new(self, key: str, data: Buffer) -> None:
        dies = self._dies()
        super().put_new(key, data)
        if dies:
            raise Killed

    def put_parts(self, key: str, pieces: Iterable[Buffer], **sizes: int) -> None:
        dies = self._dies()
        super().put_parts(key, pieces, **sizes)
        if dies:
            raise Killed

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            dies = self._dies()
            super().delete([key])
            if dies:
                raise Killed


def lead_a_life(store: Store, done: list[int]) -> None:
    """Save three checkpoints, keep one; ``done`` gets each step whose commit returned."""
    newest = latest(store)
    attempt = claim(store, parent=newest)
    for step in (10, 20, 30):
        if newest is not None and step <= newest.step:
            continue
        build_checkpoint(store, step, attempt, parent=newest, commit=False)
        try_commit(store, CheckpointId(step, attempt), clock=FakeClock())
        done.append(step)
        execute_prune(store, plan_retention(store, keep_last=1))


def check(store: Store, done: list[int]) -> None:
    for info in list_checkpoints(store):
        assert verify_deep(load_checkpoint(store, info.ident)) == []
    newest = latest(store)
    assert (newest.step if newest else 0) >= max(done, default=0)


def changes_of_a_life() -> int:
    store = DyingStore(memory_store(), 0, takes_effect=True)
    lead_a_life(store, [])
    return store.changes


@pytest.mark.fault(
    "Death of a process",
    "committer or pruner at each request that changes the store (took effect: {takes_effect})",
    "an exception that nothing may catch",
    "latest whole and not older than the last commit; the next start finishes, and leaves no debris",
)
@pytest.mark.parametrize("takes_effect", [False, True])
def test_death_at_every_change_of_the_store(takes_effect: bool, tried: Callable[[int], None]) -> None:
    """Case I01."""
    total = changes_of_a_life()
    assert total > 25
    tried(total)
    for at in range(1, total + 1):
        inner = memory_store()
        done: list[int] = []
        with pytest.raises(Killed):
            lead_a_life(DyingStore(inner, at, takes_effect=takes_effect), done)
        check(inner, done)
        lead_a_life(inner, done)
        check(inner, done)
        newest = latest(inner)
        assert newest is not None
        assert newest.step == 30
        execute_prune(inner, plan_retention(inner, keep_last=1))
        swept(inner, older_than_s=0, clock=FakeClock(4e9))
        left = {checkpoint_of_data_key(info.key) for info in inner.list_keys("data/")}
        groups = [parse_group_key(info.key) for info in inner.list_keys("index/")]
        assert left | {group[0] for group in groups if group} == {newest}
