"""Which checkpoint a restore takes, and what the manager refuses; damage, and where good copies come from."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    RefusedError,
)
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import layout_key
from ckpt.ops.catalog import read_manifest
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import EveryNSteps
from tests.support.bits import assert_same_bits, bits_of
from tests.support.runs import Live, Place, save_steps

WAIT_S = 30.0


pytestmark = pytest.mark.usefixtures("one_thread")


# --- choosing, refusing ---


def test_empty_run_has_no_steps_and_starts_at_zero(place: Place) -> None:
    live = Live.new()
    with place.manager(live) as manager:
        assert manager.latest_step() is None
        assert manager.all_steps() == []
        assert manager.attempt is None
        with pytest.raises(NotFoundError):
            manager.restore(3)
        assert manager.restore() == 0


def test_step_saves_when_due_by_interval_or_policy(place: Place) -> None:
    live = Live.new()
    with place.started(live, save_interval_steps=2) as manager:
        handles = [manager.step(iteration) for iteration in range(4)]
        assert [handle.step for handle in handles if handle is not None] == [2, 4]
    assert [handle is None for handle in handles] == [True, False, True, False]

    class Odd:
        def should_save(self, step: int) -> bool:
            return step in (7, 9)

    with place.manager(live, save_decision_policy=Odd()) as manager:
        assert manager.restore() == 4
        assert [n for n in range(4, 12) if manager.step(n) is not None] == [6, 8]
        manager.wait_until_finished(WAIT_S)
        assert manager.all_steps() == [2, 4, 7, 9]
    assert not EveryNSteps(0).should_save(0)
    with pytest.raises(InvalidInputError):
        EveryNSteps(-1)


def test_save_before_restore_is_refused(place: Place) -> None:
    """Case I06."""
    live, _ = save_steps(place, [2])
    with place.manager(live) as manager:
        with pytest.raises(InvalidInputError) as caught:
            manager.save(3)
        assert caught.value.code == "not-started"
        assert manager.attempt is None
        assert manager.restore() == 2
        manager.save(3)


def test_start_over_begins_beside_what_exists_and_latest_follows_it(place: Place) -> None:
    """Cases I06, I14."""
    _, states = save_steps(place, [2])
    other = Live.new(seed=8)
    before = other.state()
    with place.manager(other) as manager:
        assert manager.restore(start_over=True) == 0
        assert_same_bits(other.state(), before)
        assert manager.latest_step() is None
        manager.save(1).upload_completion.result(WAIT_S)
        assert manager.latest_step() == 1
        assert manager.all_steps() == [1, 2]
        assert manager.restore(2) == 2
        assert_same_bits(other.state(), states[2])


def test_unknown_step_is_not_found_and_changes_nothing(place: Place) -> None:
    live, _ = save_steps(place, [1])
    live.train(range(1, 2))
    before = live.state()
    with place.manager(live) as manager:
        for wanted in (5, "5", "000000000005.a000001"):
            with pytest.raises(NotFoundError):
                manager.restore(wanted)
        for wrong in ("newest", -1):
            with pytest.raises(InvalidInputError):
                manager.restore(wrong)
        assert_same_bits(live.state(), before)
        assert manager.attempt is None


def test_steps_must_grow_within_an_attempt(place: Place) -> None:
    """Case I66."""
    live = Live.new()
    with place.started(live) as manager:
        manager.save(5)
        for step in (5, 4):
            with pytest.raises(RefusedError) as caught:
                manager.save(step)
            assert caught.value.code == "step-order"
        manager.save(6)
        with pytest.raises(InvalidInputError):
            manager.save(-1)


def test_mismatch_is_raised_before_anything_changes_and_not_strict_restores_the_rest(place: Place) -> None:
    """Cases I14, I27."""
    _, states = save_steps(place, [2])
    other = Live.new(seed=5)
    other.model.add = nn.Linear(2, 2)
    before = other.state()
    with place.manager(other, state={"extra": other.extra, "more": {}}) as manager:
        with pytest.raises(InvalidInputError) as caught:
            manager.restore()
        assert caught.value.code == "mismatch"
        for name in ("model.add.weight", "model.add.bias", "more (whole item)"):
            assert name in str(caught.value.context["missing"])
        assert_same_bits(other.state(), before)
        assert manager.attempt is None
        assert manager.restore(strict=False) == 2
    found = other.state()
    assert_same_bits({name: found[name] for name in states[2]}, states[2])
    assert bits_of(found["model.add.weight"]) == bits_of(before["model.add.weight"])


def test_value_that_cannot_be_stored_is_named_and_nothing_is_written(place: Place) -> None:
    live = Live.new()
    with place.started(live) as manager:
        live.extra["deep"] = {"list": [0, object()]}
        with pytest.raises(InvalidInputError) as caught:
            manager.save(1)
        assert "['deep']['list'][1]" in str(caught.value.context["path"])
        del live.extra["deep"]
        manager.save(1).upload_completion.result(WAIT_S)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fast"},
        {"on_busy": "drop"},
        {"on_error": "ignore"},
        {"keep_last": 0},
        {"keep_every": 10},
        {"keep_local": 0},
        {"save_interval_steps": -1},
        {"store_options": {"secret_access_key": "x"}},
        {"store_options": {"AWS_SESSION_TOKEN": "x"}},
        {"store_options": {"account_key": "x"}},
        {"store_options": {"sas_key": "x"}},
        {"state": {"model": {}}},
        {"state": {"a.b": {}}},
        {"state": {"thing": object()}},
        {"state": {"frozen": ()}},
        {"per_rank": ("model",)},
        {"per_rank": ("typo",)},
        {"mode": "overlapped", "optimizer": None},
    ],
    ids=lambda arguments: "-".join(arguments) or None,
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    place = Place(f"file://{tmp_path}/store/run", tmp_path / "staging")
    with pytest.raises(InvalidInputError):
        place.manager(Live.new(), **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://bucket", "", "file:///a/b c", "s3://me:hidden@bucket/run"])
def test_wrong_urls_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Place(url, tmp_path / "staging").manager(Live.new())
    assert "hidden" not in str(caught.value)


def test_closed_manager_refuses_and_closing_twice_is_fine(place: Place) -> None:
    live = Live.new()
    manager = place.started(live, save_interval_steps=1)
    manager.save(1).upload_completion.result(WAIT_S)
    manager.close()
    manager.close()
    for call in (lambda: manager.save(2), lambda: manager.step(1), manager.restore):
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert "closed" in str(caught.value)
    live.train(range(1))  # its hooks are gone
    assert manager.all_steps() == [1]


# --- damage ---


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8] ^= 0x40
    path.chmod(0o600)
    path.write_bytes(data)


def test_latest_falls_back_to_the_checkpoint_before_when_no_copy_is_good(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Case I15."""
    _, states = save_steps(place, [1, 2])
    for path in place.segments(CheckpointId(2, 1)):
        _flip_a_byte(path)
    other = Live.new(seed=6)
    with place.manager(other) as manager:
        with pytest.raises(CorruptError):
            manager.restore(2)
        caplog.clear()
        assert manager.restore() == 1
        assert_same_bits(other.state(), states[1])
        fallback = [r for r in caplog.records if getattr(r, "event", "") == "restore.fallback"]
        assert [str(r.fields["damaged"]) for r in fallback] == ["000000000002.a000001"]  # type: ignore[attr-defined]
        other.train(range(1, 2))
        manager.save(2).upload_completion.result(WAIT_S)  # the same step again, in a new attempt
        assert manager.latest_step() == 2
    with place.manager(other) as manager:
        assert manager.restore() == 2


def test_each_piece_that_is_missing_or_cut_makes_latest_fall_back_and_is_named(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cases I02, I15."""
    live = Live.new()
    with place.started(live) as manager:
        manager.save(1).upload_completion.result(WAIT_S)
        expected = live.state()
        live.extra["more"] = torch.ones(3)  # so that its layout is another one
        live.train(range(1, 2))
        manager.save(2).upload_completion.result(WAIT_S)
    root = tmp_path / "store" / "run"
    (layout,) = set(root.glob("layouts/*")) - {root / _layout_of_the_first(root)}
    pieces = [layout, *(path for path in root.rglob("*") if path.is_file() and "0002.a" in str(path))]
    assert len(pieces) == 4  # with its segment, group index and manifest
    for number, piece in enumerate(pieces):
        for keep in (None, piece.stat().st_size - 1):
            # Another URL: nothing of it lies on this node.
            copy = Place(f"file://{tmp_path}/{number}-{keep}/run", place.staging)
            shutil.copytree(root, copy.url.removeprefix("file://"))
            victim = Path(copy.url.removeprefix("file://")) / piece.relative_to(root)
            victim.chmod(0o600)
            victim.unlink() if keep is None else os.truncate(victim, keep)
            caplog.clear()
            other = Live.new(seed=6)
            with copy.manager(other) as manager:
                assert manager.restore() == 1, (piece, keep)
            assert_same_bits(other.state(), expected)
            fallback = [r for r in caplog.records if getattr(r, "event", "") == "restore.fallback"]
            if piece.parent.name == "manifests" and keep is None:
                assert fallback == []  # without a manifest it is no checkpoint
            else:
                assert "000000000002.a000001" in str(fallback[0].fields["damaged"])  # type: ignore[attr-defined]
                assert piece.name in str(fallback[0].fields["error"])  # type: ignore[attr-defined]


def _layout_of_the_first(root: Path) -> str:
    with contextlib.closing(open_store(f"file://{root}")) as store:
        return layout_key(read_manifest(store, CheckpointId(1, 1)).layout_digest)


def test_every_checkpoint_damaged_is_an_error_not_a_fresh_start(place: Place) -> None:
    """Case I15."""
    save_steps(place, [1])
    for path in place.segments(CheckpointId(1, 1)):
        _flip_a_byte(path)
    with place.manager(Live.new()) as manager:
        with pytest.raises(CorruptError):
            manager.restore()
        assert manager.attempt is None


def test_bad_local_copy_is_repaired_from_the_store(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    _, states = save_steps(place, [1])
    _flip_a_byte(place.segments(CheckpointId(1, 1))[0])
    other = Live.new(seed=6)
    with place.manager(other) as manager:
        assert manager.restore() == 1
    assert_same_bits(other.state(), states[1])
    done = next(r for r in caplog.records if getattr(r, "event", "") == "restore.done")
    assert done.fields["repaired_chunks"] == 1  # type: ignore[attr-defined]
    assert done.fields["remote_nbytes"] > 0  # type: ignore[attr-defined]


def test_object_that_is_gone_is_read_from_the_local_copy(place: Place) -> None:
    _, states = save_steps(place, [1])
    place.segments(CheckpointId(1, 1))[1].unlink()
    other = Live.new(seed=6)
    with place.manager(other) as manager:
        assert manager.restore() == 1
    assert_same_bits(other.state(), states[1])
