"""Real processes on a real S3 server at once: a server that commits and prunes, two that prune and sweep with
clocks an hour off, one that restores."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.errors import NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import DATA, INDEX, group_key, manifest_key
from ckpt.ops.catalog import latest, list_checkpoints, load_checkpoint, resolve
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.pins import pin
from ckpt.ops.prune import execute_prune, plan_retention
from ckpt.ops.sweep import sweep
from ckpt.ops.verify import verify_deep
from ckpt.repository import Repository
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from tests.support.bits import assert_same_bits
from tests.support.builders import CountingStore, FakeClock, build_checkpoint, claim, memory_store, swept
from tests.support.runs import Live, Place, save_steps, stop_server
from tests.support.s3 import Ministack
from tests.support.schedules import Aged
from tests.support.sealing import make_world
from tests.support.server import Server, save

_FIRST, _MOST = 10, 200
_ROUNDS = 3
_PINNED = CheckpointId(11, 1)
_UNFINISHED = CheckpointId(5, 1)
_HOUR_S = 3600.0


@contextlib.contextmanager
def _racer(
    what: str, url: str, env: dict[str, str], folder: Path, *, ahead_s: float
) -> Iterator[list[object]]:
    """One of tests.support.racing; after the block the list holds what it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.racing", str(folder), str(ahead_s), what, url],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told: list[object] = []
    try:
        yield told
    finally:
        (folder / "stop").touch()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    told.append(json.loads(out))


def test_prunes_sweeps_commits_and_restores_at_once_lose_nothing(
    s3_server: Ministack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases I67, I100."""
    url = f"s3://{s3_server.make_bucket()}/run"
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(url)
    claim(store)
    # Somebody's upload of a step that is overtaken from the first commit on: young, so no sweep may take it.
    build_checkpoint(store, _UNFINISHED.step, world_size=2, group_size=2, commit=False)
    racers = (("prune", _HOUR_S), ("prune", -_HOUR_S), ("restore", 0.0))
    with Server(tmp_path / "staging", environment=s3_server.env) as server, contextlib.ExitStack() as stack:
        key = save(server, url, make_world(seed=9), CheckpointId(9, 1), keep_last=3)
        server.wait_for(key, CheckpointId(9, 1))
        told = [
            stack.enter_context(_racer(what, url, s3_server.env, tmp_path, ahead_s=ahead_s))
            for what, ahead_s in racers
        ]
        done = [tmp_path / f"{what}{ahead_s}" for what, ahead_s in racers]
        for step in range(_FIRST, _MOST):
            save(server, url, make_world(seed=step), CheckpointId(step, 1), keep_last=3)
            server.wait_for(key, CheckpointId(step, 1))
            if step == _PINNED.step:
                pin(store, _PINNED)
            elif step > _PINNED.step and all(x.exists() and x.stat().st_size >= _ROUNDS for x in done):
                break
        last = CheckpointId(step, 1)
        log = server.log()
    codes = [dict(found[0]) for found in told[:2]]  # type: ignore[call-overload]
    for found in codes:
        assert set(found) <= {"prune 0", "prune 5", "sweep 0"}, found
        assert found["prune 0"] >= 1
    restored = dict(told[2][0])  # type: ignore[call-overload]
    assert sum(restored.values()) >= 3
    assert "job.failed" not in log
    assert try_commit(store, _UNFINISHED).state is CommitState.COMMITTED
    assert latest(store) == last
    listed = [info.ident for info in list_checkpoints(store)]
    assert {last, CheckpointId(last.step - 1, 1), _PINNED, _UNFINISHED} <= set(listed)
    assert CheckpointId(9, 1) not in listed
    for ident in listed:
        assert verify_deep(load_checkpoint(store, ident)) == []
    execute_prune(store, plan_retention(store, keep_last=1))
    list(sweep(store, older_than_s=0, clock=FakeClock(4e9)))
    for prefix, depth in ((INDEX, 1), (DATA, 2)):
        assert {i.key.split("/")[depth] for i in store.list_keys(prefix)} == {str(last), str(_PINNED)}


def test_a_sweep_goes_by_the_clock_of_the_store() -> None:
    """Objects two hours old by the store's clock go, and younger ones stay, whatever ours is (I12, I100)."""
    inner = memory_store()
    claim(inner)
    build_checkpoint(inner, 10, commit=False)
    build_checkpoint(inner, 30)
    store = Aged(inner, 2 * _HOUR_S)
    build_checkpoint(store, 20, commit=False)
    assert swept(store, older_than_s=_HOUR_S) == 4
    owners = {info.key.split("/")[1] for info in store.list_keys(INDEX)}
    assert owners == {str(CheckpointId(20, 1)), str(CheckpointId(30, 1))}
    assert list(store.list_keys("probe/")) == []


# --- a restore whose checkpoint is pruned under it ---


class _Pruned(CountingStore):
    """Just after somebody has begun to read step 2, step 3 is committed and 2 is pruned."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.manifest = inner.get(manifest_key(CheckpointId(3, 1)))
        inner.delete([manifest_key(CheckpointId(3, 1))])

    def head(self, key: str) -> object:  # type: ignore[override]
        if key == group_key(CheckpointId(2, 1), 0, 1) and self.manifest:
            self.inner.put(manifest_key(CheckpointId(3, 1)), self.manifest)
            self.manifest = b""
            execute_prune(self.inner, plan_retention(self.inner, keep_last=1))
        return super().head(key)


@pytest.fixture
def elsewhere(place: Place, tmp_path: Path) -> Iterator[Place]:
    """The same run on a node that has none of it."""
    yield Place(place.url, tmp_path / "elsewhere")
    stop_server(tmp_path / "elsewhere")


@pytest.mark.usefixtures("one_thread")
def test_a_restore_of_the_latest_goes_on_to_the_one_that_came_meanwhile(
    place: Place, elsewhere: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case I57."""
    _, states = save_steps(place, [2, 3])
    monkeypatch.setattr("ckpt_trainer_hooks.restore.open_store", lambda *_: _Pruned(open_store(place.url)))
    live = Live.new(seed=5)
    with elsewhere.manager(live) as manager:
        assert manager.restore() == 3
        assert_same_bits(live.state(), states[3])


@pytest.mark.usefixtures("one_thread")
def test_a_restore_by_name_says_that_its_checkpoint_was_pruned(
    place: Place, elsewhere: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case I57."""
    save_steps(place, [2, 3])
    monkeypatch.setattr("ckpt_trainer_hooks.restore.open_store", lambda *_: _Pruned(open_store(place.url)))
    with elsewhere.manager(Live.new()) as manager:
        with pytest.raises(NotFoundError) as caught:
            manager.restore(2)
        assert caught.value.code == "pruned"
        assert str(CheckpointId(2, 1)) in str(caught.value)
        assert manager.attempt is None


def test_a_reader_of_the_latest_goes_on_and_one_by_name_is_told(place: Place) -> None:
    """Case I57."""
    save_steps(place, [2, 3])
    for wanted in ("latest", 2):
        with Repository(place.url) as run:
            if wanted == "latest":
                run._store = _Pruned(run._store)
                assert {item.ident.step for item in run.load(checkpoint=wanted).values()} == {3}
                continue
            with pytest.raises(NotFoundError):
                run.load(checkpoint=wanted)
    assert resolve(open_store(place.url), "latest") == CheckpointId(3, 1)
