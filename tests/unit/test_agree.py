"""torchrun keeps the job's key-value store over its restarts: nothing in it may be taken for this start's."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from ckpt.errors import TimeoutExceededError
from ckpt_trainer_hooks.agree import Agreement


def agreement(store: Any, rank: int, world: int, timeout_s: float = 60.0) -> Agreement:
    """What a rank of a new process makes of the job's store."""
    made = Agreement(timeout_s)
    made.rank, made.world_size, made._store, made._base = rank, world, store.clone(), "ckpt/0"
    return made


def take_part(store: Any, rank: int, world: int, start: str, late: int) -> tuple[Any, Any, Any]:
    mine = agreement(store, rank, world)
    if rank == late:
        time.sleep(0.1)  # the others look at what the start before has left
    decided = mine.decide("candidate", lambda: start)
    gathered = mine.gather("holdings", f"{start}/{rank}")
    over_all = mine.decide_over("proof", f"{start}/{rank}", sorted)
    return decided, gathered, over_all


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("late", [0, 2], ids=["rank-0-is-late", "another-is-late"])
def test_what_an_earlier_start_left_in_the_store_is_not_taken_for_this_one(
    store: TCPStore, late: int
) -> None:
    for start, world in (("first", 4), ("second", 3), ("third", 3)):
        with ThreadPoolExecutor(world) as pool:
            told = list(pool.map(lambda r: take_part(store, r, world, start, late), range(world)))  # noqa: B023
        values = [f"{start}/{rank}" for rank in range(world)]
        assert told == [(start, values, values)] * world


def test_a_rank_that_never_comes_is_named_on_every_rank_although_one_of_its_number_came_before(
    store: TCPStore,
) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda r: take_part(store, r, 3, "first", 0), range(3)))
        ranks = [agreement(store, rank, 3, timeout_s=0.5) for rank in (0, 1)]
        for future in [pool.submit(rank.gather, "session", None) for rank in ranks]:
            with pytest.raises(TimeoutExceededError) as caught:
                future.result(30)
            assert "2" in str(caught.value.context["missing_ranks"])
