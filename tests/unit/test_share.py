"""Which saved ranks a node of another topology needs."""

from __future__ import annotations

import pytest

from ckpt.errors import InvalidInputError
from ckpt.plan.share import saved_ranks_for


@pytest.mark.parametrize("saved", range(1, 9))
@pytest.mark.parametrize("world", range(1, 9))
def test_it_is_what_an_even_split_needs_and_all_nodes_have_all(saved: int, world: int) -> None:
    rows = saved * world * 3
    for rank in range(world):
        mine = range(rank * rows // world, (rank + 1) * rows // world)
        needed = {row * saved // rows for row in mine}
        assert saved_ranks_for([rank], world_size=world, saved_world_size=saved) == tuple(sorted(needed))
    half = saved_ranks_for(range(world // 2), world_size=world, saved_world_size=saved)
    rest = saved_ranks_for(range(world // 2, world), world_size=world, saved_world_size=saved)
    assert {*half, *rest} == set(range(saved))


def test_tensor_parallel_ranks_inside_stay_together() -> None:
    # 4 x 2 ranks become 2 x 2: each new one needs two rows of the old mesh.
    assert saved_ranks_for([0, 1], world_size=4, saved_world_size=8) == (0, 1, 2, 3)


@pytest.mark.parametrize(("ranks", "world"), [([4], 4), ([-1], 4), ([0], 0)])
def test_ranks_that_there_will_not_be_are_refused(ranks: list[int], world: int) -> None:
    with pytest.raises(InvalidInputError):
        saved_ranks_for(ranks, world_size=world, saved_world_size=8)
