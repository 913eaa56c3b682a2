"""The resumable sampler and loader in one process; torchdata's loader carried through."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks.data import ResumableLoader, ResumableSampler
from tests.support.snapshot_trip import put_back, put_back_rng, take, train_state

LENGTH = 53


def _loader(
    workers: int = 0, *, world: int = 1, rank: int = 0, batch: int = 4, **more: Any
) -> ResumableLoader:
    options = {"seed": 3, "tail": "carry", **more}
    sampler = ResumableSampler(LENGTH, batch, rank=rank, world_size=world, **options)
    return ResumableLoader(
        DataLoader(range(LENGTH), batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    )


def _read(loader: ResumableLoader, batches: int) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == batches:
                break
    return found


def _flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_I106_three_resumes_in_one_epoch_read_what_an_uninterrupted_run_reads(workers: int) -> None:
    expected = _read(_loader(batch=1), 60)
    found: list[list[int]] = []
    state = None
    for count in (30, 10, 10, 10):  # the last crosses into the next epoch
        loader = _loader(workers, batch=1)
        if state is not None:
            put_back(state, train_state(data=loader))
        found += _read(loader, count)
        state = take(train_state(data=loader))
    assert found == expected


def test_batches_read_ahead_by_workers_do_not_count() -> None:
    loader = _loader(2)
    _read(loader, 3)
    assert (loader.sampler.epoch, loader.sampler.consumed) == (0, 12)


def test_number_of_workers_may_change() -> None:
    first = _loader(2)
    found = _read(first, 5)
    second = _loader(0)
    second.load_state_dict(first.state_dict())
    assert found + _read(second, 8) == _read(_loader(), 13)


def test_starting_a_loader_draws_nothing_from_the_global_stream() -> None:
    before = torch.get_rng_state()
    _read(_loader(), 20)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_finished_epoch_is_saved_as_the_beginning_of_the_next() -> None:
    loader = _loader(tail="drop")
    epoch = [batch.tolist() for batch in loader]
    assert len(epoch) == LENGTH // 4
    assert (loader.epoch, loader.sampler.consumed) == (1, 0)
    again = _loader(tail="drop")
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(_flat(_read(loader, LENGTH))) for loader in (_loader(batch=1), _loader(batch=1, seed=4))}
    loader = _loader(batch=1)
    _read(loader, LENGTH)
    orders.add(tuple(_flat(_read(loader, LENGTH))))
    assert len(orders) == 3
    assert all(sorted(order) == list(range(LENGTH)) for order in orders)


def test_saved_seed_counts_not_that_of_the_new_program() -> None:
    first = _loader()
    found = _read(first, 2)
    second = _loader(seed=99)
    second.load_state_dict(first.state_dict())
    assert found + _read(second, 3) == _read(_loader(), 5)


@pytest.mark.parametrize("change", [{"length": LENGTH + 1}, {"shuffle": False}, {"fingerprint": "0"}])
def test_position_among_other_data_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    loader = _loader()
    _read(loader, 2)
    before = loader.state_dict()
    with pytest.raises(InvalidInputError) as caught:
        loader.load_state_dict({**before, "consumed": 20, **change})
    assert caught.value.code == "data-position"
    assert loader.state_dict() == before


def test_iteration_that_a_restore_overtook_is_refused() -> None:
    loader = _loader()
    state = loader.state_dict()
    running = iter(loader)
    next(running)
    loader.load_state_dict(state)
    with pytest.raises(InvalidInputError) as caught:
        next(running)
    assert caught.value.code == "data-position"


@pytest.mark.parametrize(
    "more",
    [
        {"batch": 0},
        {"batch": LENGTH + 1},
        {"world": 2, "rank": 2},
        {"batch": 30, "world": 2, "tail": "drop"},
        {"tail": "keep"},
    ],
)
def test_sizes_that_cannot_work_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        _loader(**more)


def test_loader_with_another_sampler_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        ResumableLoader(DataLoader(range(4)))  # type: ignore[arg-type]


def test_padding_more_than_an_epoch_is_possible() -> None:
    batches = [next(iter(_loader(world=20, rank=rank, batch=4, tail="pad"))).tolist() for rank in range(20)]
    flat = _flat(batches)
    assert sorted(flat[:LENGTH]) == list(range(LENGTH))
    assert flat[LENGTH:] == flat[: 80 - LENGTH]


def test_position_is_kept_once_for_all_ranks_even_as_the_dataloader_item() -> None:
    state = train_state(per_rank=("dataloader",), dataloader=_loader(), other={"a": 1})
    assert state.per_rank == frozenset()


def _seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def _torchdata(workers: int, generator: torch.Generator | None) -> Any:
    return StatefulDataLoader(
        range(LENGTH),  # type: ignore[arg-type]
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        generator=generator,
    )


def _torchdata_items(workers: int, seed: int) -> dict[str, Any]:
    """Without workers the loader has a generator of its own, which is then state too."""
    if workers:
        return {"dataloader": _torchdata(workers, None)}
    generator = torch.Generator().manual_seed(seed)
    return {"dataloader": _torchdata(workers, generator), "order": generator}


def _follow(loader: Any, steps: int) -> list[tuple[list[int], float]]:
    """Batches and what a dropout would draw beside them."""
    found: list[tuple[list[int], float]] = []
    while len(found) < steps:
        for batch in loader:
            found.append((batch.tolist(), torch.rand(()).item()))
            if len(found) == steps:
                return found
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it, torch warns
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("before", [0, 1, 7, 18])
def test_torchdata_loader_resumes_exactly_and_shifts_no_random_stream(workers: int, before: int) -> None:
    _seed()
    items = _torchdata_items(workers, 2)
    loader = items["dataloader"]
    iterator = iter(loader) if before else None
    for _ in range(before):
        next(iterator)  # type: ignore[arg-type]
        torch.rand(())
    taken = take(train_state(per_rank=("dataloader",), **items))
    expected: list[tuple[list[int], float]] = []
    rest = iterator if iterator is not None else loader
    expected += [(batch.tolist(), torch.rand(()).item()) for batch in rest]
    expected += _follow(loader, 5)

    torch.manual_seed(77)
    again = _torchdata_items(workers, 9)
    put_back(taken, train_state(per_rank=("dataloader",), **again))
    put_back_rng(taken)
    assert _follow(again["dataloader"], len(expected)) == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_generator_of_a_loader_that_is_not_registered_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    items = _torchdata_items(0, 2)
    train_state(**items)
    assert "state.loader_generator" not in caplog.text
    del items["order"]
    train_state(**items)
    assert "state.loader_generator" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        random.Random,
        np.random.default_rng,
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda seed: np.random.Generator(np.random.SFC64(seed)),
        np.random.RandomState,
    ],
    ids=["torch", "python", "pcg64", "mt19937", "philox", "sfc64", "legacy"],
)
def test_I103_generators_the_user_holds_go_on_where_they_were(make: Any) -> None:
    saved = make(1)
    _draw(saved)
    taken = take(train_state(generator=saved))
    expected = [_draw(saved) for _ in range(10)]
    live = make(2)
    put_back(taken, train_state(generator=live))
    assert [_draw(live) for _ in range(10)] == expected


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.randn((), generator=generator).item()
    return float(generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal())


def test_state_of_another_kind_of_generator_is_refused() -> None:
    taken = take(train_state(generator=np.random.default_rng(1)))
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(generator=torch.Generator()))
    assert "numpy:PCG64" in str(caught.value)
    assert "torch:cpu" in str(caught.value)
