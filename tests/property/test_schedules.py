"""Prune, sweep, pin, commit, start and restore at the same time, in every order of their requests.

Each test lets real operations loose on one small run and lets a scheduler decide whose next request goes
ahead (tests/support/schedules.py). Whatever the order: what ``latest`` names can be restored bit by bit, no
manifest lacks an object, a pin that was granted holds, what a start resumed from is there, and what the
policies keep stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError, CorruptError, RefusedError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import DATA, INDEX, local_uploaded_name
from ckpt.format.layout import LayoutSet, Mesh, Replicate, TensorLayout
from ckpt.ops.attempts import claim_attempt, newest_attempt, read_attempt
from ckpt.ops.catalog import latest, list_checkpoints, load_checkpoint
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.pins import list_pins, pin
from ckpt.ops.prune import execute_prune, plan_deletion, plan_retention
from ckpt.ops.sweep import sweep
from ckpt.ops.verify import verify_quick
from ckpt.storage.base import Store
from ckpt.storage.memory import MemoryStore
from tests.support.builders import FakeClock, borrow, build_checkpoint, claim, memory_store, swept
from tests.support.properties import examples
from tests.support.schedules import Aged, Decide, History, Operation, Until, explore, one_worker, run
from tests.support.sealing import make_world
from tests.support.uploading import Node, changed

_GRACE_S = 3600.0
_TENSOR = "model.weight"


def ident(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(step, attempt)


@pytest.fixture(autouse=True)
def _one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one_worker(monkeypatch)


def _layouts() -> LayoutSet:
    mesh = Mesh.from_ranks((1,), ("dp",), [0])
    return LayoutSet([TensorLayout(_TENSOR, "float32", (3, 2), mesh, (Replicate(),))])


def _build(store: Store, step: int, *, commit: bool = True, attempt: int = 1) -> None:
    build_checkpoint(store, step, attempt, world_size=1, layouts=_layouts(), commit=commit)


@cache
def _bits(seed: int) -> bytes:
    """What a checkpoint of this seed holds."""
    store = memory_store()
    return build_checkpoint(store, seed, world_size=1, layouts=_layouts()).tensors[_TENSOR].tobytes()


def _base() -> Store:
    """A run: 10, 20 (whose chunks lie in 10's object) and 30 are committed; of 15 (overtaken) and 40 only the
    manifest is not there."""
    store = memory_store()
    claim(store, world_size=1)
    _build(store, 10)
    borrow(store, 20, ident(10), world_size=1, layouts=_layouts())
    _build(store, 30)
    _build(store, 15, commit=False)
    _build(store, 40, commit=False)
    return store


_SEEDS = {10: 10, 15: 15, 20: 10, 30: 30, 40: 40}


@cache
def _base_objects() -> Mapping[str, bytes]:
    store = _base()
    return {info.key: store.get(info.key) for info in store.list_keys("")}


def _fresh() -> MemoryStore:
    store = memory_store()
    for key, data in _base_objects().items():
        store.put(key, data)
    return store


def _read(store: Store, one: CheckpointId) -> None:
    found = fetch_tensor(load_checkpoint(store, one), _TENSOR)[2]
    assert found == _bits(_SEEDS[one.step])


def _prune(keep_last: int) -> Operation:
    return lambda store: execute_prune(store, plan_retention(store, keep_last=keep_last)).deleted


def _delete(step: int) -> Operation:
    return lambda store: execute_prune(store, plan_deletion(store, [ident(step)])).deleted


def _sweep(store: Store) -> object:
    return list(sweep(store, older_than_s=_GRACE_S))


def _sweep_all(store: Store) -> object:
    """As if all grace had passed."""
    return list(sweep(store, older_than_s=0, clock=FakeClock(4e9)))


def _commit(step: int) -> Operation:
    return lambda store: try_commit(store, ident(step), clock=FakeClock()).state


def _pin(step: int) -> Operation:
    return lambda store: pin(store, ident(step))


def _start(step: int) -> Operation:
    """What a job does that resumes from a checkpoint by its name."""

    def start(store: Store) -> int:
        _read(store, ident(step))
        return claim_attempt(
            store, parent=ident(step), world_size=1, host="test", clock=FakeClock(), parent_is_committed=True
        )

    return start


def _resume(store: Store) -> CheckpointId:
    """What a job does that resumes from the latest."""
    one = latest(store)
    assert one is not None
    _read(store, one)
    claim_attempt(store, parent=one, world_size=1, host="test", clock=FakeClock(), parent_is_committed=True)
    return one


_OPERATIONS: Mapping[str, Operation] = {
    "prune-1": _prune(1),
    "prune-2": _prune(2),
    "delete-20": _delete(20),
    "delete-30": _delete(30),
    "sweep": _sweep,
    "commit-15": _commit(15),
    "commit-40": _commit(40),
    "pin-20": _pin(20),
    "pin-30": _pin(30),
    "start-20": _start(20),
    "resume": _resume,
}


def _go(names: Sequence[str], decide: Decide) -> History:
    inner = _fresh()
    try:
        history = run(Aged(inner, 2 * _GRACE_S), {name: _OPERATIONS[name] for name in names}, decide)
        try:
            _check(inner, history, names)
        except (AssertionError, CkptError) as error:
            raise AssertionError(f"{error!r}\n{history}") from error
    finally:
        inner.delete([info.key for info in inner.list_keys("")])
    return history


def _check(store: Store, history: History, names: Sequence[str]) -> None:
    for name, error in history.errors.items():
        assert isinstance(error, CkptError), (name, error)
    listed = {info.ident for info in list_checkpoints(store)}
    for one in listed:
        assert verify_quick(load_checkpoint(store, one)) == [], one
        _read(store, one)
    newest = latest(store)
    assert newest is not None
    done = history.values
    for name, step in (("pin-20", 20), ("pin-30", 30)):
        if name in done:
            assert ident(step) in listed & list_pins(store), f"{name} was granted"
    parent = read_attempt(store, newest_attempt(store) or 0).parent
    assert parent is None or parent in listed, "the newest start resumed from it"
    ever = {ident(step) for step in (10, 20, 30)}
    ever |= {
        ident(int(name[-2:]))
        for name in names
        if done.get(name) in (CommitState.COMMITTED, CommitState.ALREADY)
    }
    keep = min((int(name[-1]) for name in names if name.startswith("prune")), default=len(ever))
    deleted = {one for name in names if name.startswith("delete") and name in done for one in done[name]}
    if not {"start-20", "resume"} & set(names):  # else steps that come later are on an abandoned branch
        assert set(sorted(ever)[-keep:]) <= listed | deleted
    # Whoever comes after finds nothing that he cannot clear away.
    if newest is not None:
        execute_prune(store, plan_retention(store, keep_last=1))
        swept(store, older_than_s=0, clock=FakeClock(4e9))
        swept(store, older_than_s=0, clock=FakeClock(4e9))
        left = {info.ident for info in list_checkpoints(store)}
        assert latest(store) == newest
        needed = {ident(10)} if ident(20) in left else set()
        for prefix, depth in ((INDEX, 1), (DATA, 2)):
            owners = {info.key.split("/")[depth] for info in store.list_keys(prefix)}
            assert owners <= set(map(str, left | needed | {ident(40)}))


_PAIRS = [
    ("prune-1", "prune-2"),
    ("prune-1", "delete-20"),
    ("prune-1", "sweep"),
    ("prune-1", "commit-15"),
    ("prune-1", "commit-40"),
    ("prune-1", "pin-20"),
    ("prune-1", "start-20"),
    ("prune-1", "resume"),
    ("delete-20", "start-20"),
    ("delete-20", "pin-20"),
    ("delete-30", "commit-40"),
    ("delete-30", "resume"),
    ("sweep", "commit-15"),
    ("sweep", "commit-40"),
    ("sweep", "start-20"),
]


def _explore(check: Callable[[Decide], History]) -> None:
    """A sample in the suite; all of them with CKPT_SCHEDULES=all, which takes minutes each."""
    wanted = os.environ.get("CKPT_SCHEDULES", "15")
    if wanted == "all":
        print(explore(check, most=100_000), "schedules")
    else:
        assert explore(check, most=int(wanted), sample=1) >= 3


@pytest.mark.parametrize("pair", _PAIRS, ids="+".join)
def test_two_at_a_time(pair: tuple[str, str]) -> None:
    """Cases I67, I68."""
    _explore(lambda decide: _go(pair, decide))


_trios = st.lists(st.sampled_from(sorted(_OPERATIONS)), min_size=3, max_size=4, unique=True)


@examples(40)
@given(_trios, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=12))
def test_three_or_four_at_a_time(names: list[str], turns: list[tuple[int, int]]) -> None:
    """``turns``: whose turn it is, and for how many requests."""
    left = [who for who, count in turns for _ in range(count)]

    def decide(step: int, last: str | None, waiting: tuple[str, ...], requests: Mapping[str, str]) -> str:
        return waiting[left[step] % len(waiting)] if step < len(left) else waiting[0]

    _go(names, decide)


# --- schedules that lost something before ---


def test_I7_a_pin_that_comes_after_the_prune_has_looked_is_refused() -> None:
    history = _go(
        ["prune-1", "pin-20"], Until(("prune-1", "delete manifests/"), ("pin-20", ""), ("prune-1", ""))
    )
    error = history.errors["pin-20"]
    assert isinstance(error, RefusedError)
    assert error.code == "condemned"
    assert history.values["prune-1"] == (ident(20), ident(10))


def test_I7_a_pin_that_comes_before_the_prune_looks_holds() -> None:
    history = _go(["prune-1", "pin-20"], Until(("prune-1", "put index/"), ("pin-20", "")))
    assert history.values["pin-20"] is None
    error = history.errors["prune-1"]
    assert isinstance(error, RefusedError)
    assert error.code == "pinned"


def test_I7_a_start_does_not_resume_from_what_a_prune_takes_under_it() -> None:
    """``latest`` would follow the start to a checkpoint that is gone, although a newer one is there."""
    history = _go(
        ["prune-1", "start-20"], Until(("prune-1", "delete manifests/"), ("start-20", ""), ("prune-1", ""))
    )
    error = history.errors["start-20"]
    assert isinstance(error, RefusedError)
    assert error.code == "condemned"


def test_I2_a_late_commit_that_a_sweep_overtakes_is_undone() -> None:
    """Case I04."""
    history = _go(
        ["sweep", "commit-15"], Until(("commit-15", "put_new manifests/"), ("sweep", ""), ("commit-15", ""))
    )
    error = history.errors["commit-15"]
    assert isinstance(error, CorruptError)
    assert error.code == "deleted"


def test_I2_a_commit_that_slept_while_others_committed_and_pruned_is_undone() -> None:
    """Two servers commit 40; one is held up right before its put, while newer ones come and 40 is pruned."""

    def others(store: Store) -> None:
        assert try_commit(store, ident(40), clock=FakeClock()).state is CommitState.COMMITTED
        _build(store, 50)
        execute_prune(store, plan_retention(store, keep_last=1))

    store = _fresh()
    history = run(
        store,
        {"slow": _commit(40), "others": others},
        Until(("slow", "put_new manifests/"), ("others", ""), ("slow", "")),
    )
    error = history.errors["slow"]
    assert isinstance(error, CorruptError)
    assert error.code == "deleted"
    assert [info.ident for info in list_checkpoints(store)] == [ident(50)]


# --- borrowers ---


class _Borrowers:
    """10, 20 and 30 hold the same bits: the chunks of 20 and 30 lie in 10's objects. 35, of other bits, waits
    to be committed; 40, the same bits again, is sealed and will borrow.
    """

    def __init__(self, folder: Path) -> None:
        store = memory_store()
        claim(store)
        self.node = Node(folder, store)
        same = make_world(rows=8, columns=64)
        self.worlds = dict.fromkeys((10, 20, 30, 40), same)
        self.worlds[35] = changed(same, range(8), 35)
        for step in (10, 20, 30, 35):
            self.node.save(ident(step), self.worlds[step], commit=step != 35)
        self.node.seal(ident(40), self.worlds[40])
        self.objects = {info.key: store.get(info.key) for info in store.list_keys("")}
        self.url = store.url

    def go(self, decide: Decide) -> History:
        inner = MemoryStore(self.url)  # segments say which run they belong to
        inner.delete([info.key for info in inner.list_keys("")])
        for key, data in self.objects.items():
            inner.put(key, data)
        history = run(
            Aged(inner, 2 * _GRACE_S),
            {"save": self.save, "commit": _commit(35), "prune": _prune(1), "sweep": _sweep_all},
            decide,
        )
        try:
            for name, error in history.errors.items():
                assert isinstance(error, CkptError), (name, error)
            assert ident(40) in {info.ident for info in list_checkpoints(inner)}, "saves are not lost"
            self.node.store = inner
            for info in list_checkpoints(inner):
                self.node.check(info.ident, self.worlds[info.ident.step])
        except (AssertionError, CkptError) as error:
            raise AssertionError(f"{error!r}\n{history}") from error
        return history

    def save(self, store: Store) -> CommitState:
        node = self.node
        node.restart()
        for rank in (0, 1):
            (node.staging.checkpoint_dir(node.run_key, ident(40)) / local_uploaded_name(rank)).unlink(
                missing_ok=True
            )
        node.store = store
        for rank in (0, 1):
            node.upload(ident(40), rank)
        node.publish(ident(40), self.worlds[40])
        return node.commit(ident(40))


def test_what_a_save_borrows_outlives_commits_prunes_and_sweeps(tmp_path: Path) -> None:
    borrowers = _Borrowers(tmp_path)
    _explore(borrowers.go)


def test_I2_a_sweep_sees_the_borrower_that_is_committed_while_it_looks(tmp_path: Path) -> None:
    """It read the manifests before the commit and the records of what is not committed after it: neither."""
    history = _Borrowers(tmp_path).go(
        Until(
            ("save", "put_new manifests/"),  # it has borrowed by way of 30
            ("commit", ""),
            ("prune", ""),
            ("sweep", "dirs index/"),
            ("save", ""),
            ("sweep", ""),
        )
    )
    assert history.values["save"] is CommitState.COMMITTED
