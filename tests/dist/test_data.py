"""Data position and random-number streams over real ranks, also when their number changes."""

from __future__ import annotations

import logging
import logging.handlers
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ckpt.errors import CkptError
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks.data import ResumableLoader, ResumableSampler
from tests.support.models import barrier
from tests.support.ranks import run_ranks

LENGTH = 101


class Cursor:
    """A user's loader that knows only its own rank's position."""

    def __init__(self, position: Any) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": torch.full((3,), float(self.position))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["buffer"], torch.full((3,), float(state["position"])))
        self.position = state["position"]


def _manager(root: Path, rank: int, nodes: str = "node", **more: Any) -> CheckpointManager:
    return CheckpointManager(f"file://{root}/store/run", staging_dir=root / nodes, timeout_s=60, **more)


# --- the resumable loader ---


def _read_some(
    rank: int, world: int, root: Path, batches: int, batch_size: int, workers: int
) -> tuple[list[int], tuple[int, int]]:
    sampler = ResumableSampler(LENGTH, batch_size, seed=11, tail="carry")
    data = DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    loader = ResumableLoader(data)
    model = torch.nn.Linear(1, 1)
    found: list[int] = []
    with _manager(root, rank, model=model, dataloader=loader) as manager:
        start = manager.restore()
        step = start
        while step < start + batches:
            for batch in loader:
                found += batch.tolist()
                step += 1
                if step == start + batches:
                    break
        manager.save(step)
        barrier()
    return found, (loader.epoch, sampler.consumed)


def test_I48_every_sample_of_two_epochs_once_over_4_then_3_then_5_ranks(tmp_path: Path) -> None:
    seen: list[int] = []
    for world, batches, batch_size, workers in ((4, 7, 2, 0), (3, 5, 3, 2), (5, 9, 2, 0), (1, 11, 1, 0)):
        results = run_ranks(world, _read_some, tmp_path, batches, batch_size, workers)
        assert len({position for _, position in results}) == 1
        per_rank = [samples for samples, _ in results]
        for number in range(batches):
            for samples in per_rank:
                seen += samples[number * batch_size : (number + 1) * batch_size]
    assert len(seen) == 7 * 8 + 5 * 9 + 9 * 10 + 11 == 2 * LENGTH
    for epoch in (0, 1):
        counted = Counter(seen[epoch * LENGTH : (epoch + 1) * LENGTH])
        assert counted == Counter(range(LENGTH))


def _parallel_pair(rank: int, world: int) -> list[int]:
    """Ranks 2k and 2k + 1 share a batch, as tensor-parallel ranks do."""
    sampler = ResumableSampler(LENGTH, 4, seed=1, tail="drop", rank=rank // 2, world_size=world // 2)
    return next(iter(sampler))


def test_tensor_parallel_ranks_get_the_same_samples() -> None:
    first, second, third, fourth = run_ranks(4, _parallel_pair)
    assert first == second != third == fourth


# --- state that every rank has its own of ---


def _save_cursors(rank: int, world: int, root: Path, on_ranks: tuple[int, ...] | None) -> list[str]:
    loader = Cursor(100 + rank) if on_ranks is None or rank in on_ranks else None
    heard = logging.handlers.BufferingHandler(10_000)
    logging.getLogger("ckpt").addHandler(heard)
    with _manager(root, rank, model=torch.nn.Linear(2, 2), dataloader=loader) as manager:
        manager.restore()
        manager.save(1)
        barrier()
    return [text for record in heard.buffer if "differ" in (text := record.getMessage())]


def _restore_cursor(rank: int, world: int, root: Path, hook: str | None, **choice: Any) -> Any:
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 2)
    loader = Cursor(rank)
    hooks = {"dataloader": _spread} if hook else None
    manager = _manager(root, rank, f"node-{world}", model=model, dataloader=loader, redistribute=hooks)
    try:
        manager.restore(1, **choice)
    except CkptError as error:
        return type(error).__name__, error.code, str(error)
    finally:
        manager.close()
        barrier()
    return loader.position, model.weight.tolist()


def _restore_strict(rank: int, world: int, root: Path, hook: str | None) -> Any:
    return _restore_cursor(rank, world, root, hook)


def _restore_lenient(rank: int, world: int, root: Path, hook: str | None) -> Any:
    return _restore_cursor(rank, world, root, hook, strict=False)


def _restore_excluding(rank: int, world: int, root: Path, hook: str | None) -> Any:
    return _restore_cursor(rank, world, root, hook, exclude="dataloader.*")


def _spread(states: list[Any], rank: int, world: int) -> Any:
    """The sum of all positions, so that a missing one shows, and the rank."""
    position = sum(state["position"] for state in states) * 10 + rank
    return {"position": position, "buffer": torch.full((3,), float(position))}


@pytest.mark.parametrize(("saved", "live"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_I48_per_rank_state_on_another_number_of_ranks(tmp_path: Path, saved: int, live: int) -> None:
    assert run_ranks(saved, _save_cursors, tmp_path, None) == [[]] * saved
    for kind, code, text in run_ranks(live, _restore_strict, tmp_path, None):
        assert (kind, code) == ("RefusedError", "per-rank")
        assert "redistribute" in text
    total = sum(100 + rank for rank in range(saved)) * 10
    found = run_ranks(live, _restore_strict, tmp_path, "hook")
    assert [position for position, _ in found] == [total + rank for rank in range(live)]
    excluded = run_ranks(live, _restore_excluding, tmp_path, None)
    assert [position for position, _ in excluded] == list(range(live))  # untouched
    assert all(weight == found[0][1] for _, weight in [*found, *excluded])


@pytest.mark.parametrize("live", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_I107_a_set_of_which_ranks_are_missing_is_refused_also_when_not_strict(
    tmp_path: Path, live: int
) -> None:
    heard = run_ranks(4, _save_cursors, tmp_path, (0,))
    assert any("session.per_rank_items_differ" in text for text in heard[0])
    for restore in (_restore_strict, _restore_lenient):
        for kind, _, text in run_ranks(live, restore, tmp_path, "hook"):
            assert kind == "InvalidInputError"
            assert "dataloader" in text
            assert "[1, 2, 3]" in text


# --- random-number streams ---


def _draws(generators: dict[str, Any]) -> list[float]:
    found = []
    for _ in range(10):
        found += [random.random(), float(np.random.rand()), torch.rand(()).item()]
        found.append(torch.rand((), generator=generators["torch"]).item())
        found.append(float(generators["numpy"].random()))
    return found


def _generators(seed: int) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return {"torch": torch.Generator().manual_seed(seed), "numpy": np.random.default_rng(seed)}


def _save_streams(rank: int, world: int, root: Path, alike: bool) -> list[float]:
    generators = _generators(1 if alike else rank)
    for _ in range(1 if alike else rank):  # each rank has drawn another number of values
        _draws(generators)
    with _manager(root, rank, model=torch.nn.Linear(2, 2), state=generators) as manager:
        manager.restore()
        manager.save(1)
        barrier()
        return _draws(generators)


def _restore_streams(rank: int, world: int, root: Path, share: int) -> tuple[list[float], list[float]]:
    found = []
    for seed in (1000, 2000):  # what was drawn before the restore must not matter
        generators = _generators(seed + rank)
        more = {"rng_stream": rank // share, "state": generators}
        with _manager(root, rank, f"node-{world}", model=torch.nn.Linear(2, 2), **more) as manager:
            manager.restore(1)
            found.append(_draws(generators))
            barrier()  # rank 0 hosts the store
    return found[0], found[1]


def test_I103_each_rank_continues_its_own_streams(tmp_path: Path) -> None:
    expected = run_ranks(4, _save_streams, tmp_path, False)
    found = run_ranks(4, _restore_streams, tmp_path, 1)
    assert [first for first, _ in found] == expected
    assert [second for _, second in found] == expected


@pytest.mark.parametrize(("saved", "live"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_I104_other_numbers_of_ranks_get_new_streams_repeatable_and_distinct(
    tmp_path: Path, saved: int, live: int
) -> None:
    before = run_ranks(saved, _save_streams, tmp_path, False)
    found = run_ranks(live, _restore_streams, tmp_path, 1)
    assert all(first == second for first, second in found)
    streams = [tuple(first[kind::5]) for first, _ in found for kind in range(5)]
    continued = [tuple(draws[kind::5]) for draws in before for kind in range(5)]
    assert len(set(streams)) == len(streams)
    assert not set(streams) & set(continued)


def test_ranks_of_one_stream_number_draw_alike_after_a_change(tmp_path: Path) -> None:
    run_ranks(2, _save_streams, tmp_path, False)
    found = [first for first, _ in run_ranks(4, _restore_streams, tmp_path, 2)]
    assert found[0] == found[1] != found[2] == found[3]


def test_streams_that_were_alike_on_all_ranks_go_on_alike(tmp_path: Path) -> None:
    before = run_ranks(2, _save_streams, tmp_path, True)
    found = [first for first, _ in run_ranks(3, _restore_streams, tmp_path, 1)]
    assert found == [before[0]] * 3
