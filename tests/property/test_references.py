"""Whatever is saved, pruned, swept and cut short in whatever order: no manifest ever lacks a chunk, and in
the end nothing is left that nobody needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.digest import Buffer
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import DATA, INDEX
from ckpt.ops.catalog import list_checkpoints, load_checkpoint
from ckpt.ops.commit import CommitState
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.ops.verify import verify_quick
from tests.support.builders import CountingStore, FakeClock, claim, memory_store, swept
from tests.support.sealing import World, make_world
from tests.support.uploading import Node, changed

_ROWS = 16
_FAR = FakeClock(4e9)


class _Killed(Exception):
    pass


class _Store(CountingStore):
    """Dies before the so-many-th change from now."""

    left = -1

    def _change(self) -> None:
        if self.left == 0:
            self.left = -1
            raise _Killed
        self.left -= 1

    def put(self, key: str, data: Buffer) -> None:
        self._change()
        super().put(key, data)

    def put_new(self, key: str, data: Buffer) -> None:
        self._change()
        super().put_new(key, data)

    def put_parts(self, key: str, pieces: Iterable[Buffer], **sizes: int) -> None:
        self._change()
        super().put_parts(key, pieces, **sizes)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._change()
            super().delete([key])


class _Job:
    """A run whose uploads may lie about half done, as they do while others prune."""

    def __init__(self, folder: Path) -> None:
        self.store = _Store(memory_store())
        self.node = Node(folder, self.store)
        self.world: World = make_world(rows=_ROWS, columns=1024, groups=((0, 1),))
        self.attempt = claim(self.store)
        self.parent: CheckpointId | None = None
        self.step = 0
        self.worlds: dict[CheckpointId, World] = {}
        self.pending: list[CheckpointId] = []

    def seal(self, rows: int) -> None:
        self.step += 1
        self.world = changed(self.world, range(rows), self.step)
        one = CheckpointId(self.step, self.attempt)
        self.node.seal(one, self.world, parent=self.parent)
        self.worlds[one] = self.world
        self.pending.append(one)

    def upload(self) -> None:
        for one in self.pending:
            for rank in (0, 1):
                self.node.upload(one, rank, wanted="on" if one.step % 3 == 0 else "off")

    def commit(self) -> None:
        while self.pending:
            one = self.pending[0]
            for rank in (0, 1):
                self.node.upload(one, rank)
            self.node.publish(one, self.world)
            assert self.node.commit(one) in (CommitState.COMMITTED, CommitState.ALREADY)
            self.pending.pop(0)

    def restart(self) -> None:
        """A new attempt from the newest checkpoint; what is pending of the old one never commits."""
        self.node.restart()
        newest = next(list_checkpoints(self.store), None)
        self.parent = newest.ident if newest else None
        self.attempt = claim(self.store, parent=self.parent)
        self.pending.clear()

    def prune(self, keep: int) -> None:
        execute_prune(self.store, plan_retention(self.store, keep_last=keep))

    def sweep(self) -> None:
        swept(self.store, older_than_s=0, clock=_FAR)

    def check(self) -> None:
        for info in list_checkpoints(self.store):
            assert verify_quick(load_checkpoint(self.store, info.ident)) == []


_actions = st.one_of(
    st.tuples(st.just("seal"), st.integers(0, _ROWS)),
    st.tuples(st.just("upload")),
    st.tuples(st.just("commit")),
    st.tuples(st.just("prune"), st.integers(1, 3)),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("restart")),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(_actions, st.one_of(st.just(-1), st.integers(0, 12))), min_size=4, max_size=16))
def test_no_history_costs_a_chunk_or_leaves_garbage(history: list[tuple[tuple[object, ...], int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(Path(folder))
        for (name, *arguments), dies_after in history:
            job.store.left = dies_after if name in ("upload", "commit", "prune", "sweep") else -1
            try:
                getattr(job, str(name))(*arguments)
            except _Killed:
                job.node.restart()
            finally:
                job.store.left = -1
            job.check()
        job.commit()
        job.seal(_ROWS)
        job.commit()
        job.prune(1)
        job.sweep()
        job.sweep()
        job.check()
        (last,) = list_checkpoints(job.store)
        job.node.check(last.ident, job.worlds[last.ident])
        owners = {key.split("/")[2] for key in (info.key for info in job.store.list_keys(DATA))}
        assert owners == {str(last.ident)}
        assert {info.key.split("/")[1] for info in job.store.list_keys(INDEX)} == {str(last.ident)}
