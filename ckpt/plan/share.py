"""Which saved ranks' segments a node will mostly need in a start with another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.errors import InvalidInputError

__all__ = ["saved_ranks_for"]


def saved_ranks_for(ranks: Iterable[int], *, world_size: int, saved_world_size: int) -> tuple[int, ...]:
    """Return the saved ranks that have the same part of the whole as ``ranks`` of the coming start.

    That is exact for what is split evenly over all ranks in their order (FSDP), and for what is split further
    inside, where that stays as it is (tensor parallelism inside of FSDP). For other changes it is a share
    like any other: nodes that divide the coming ranks among them hold all segments together.

    Args:
        ranks: of the coming start.
        world_size: its number of ranks.
        saved_world_size: that of the saved step.

    Raises:
        InvalidInputError: the coming start has no such ranks.
    """
    chosen = sorted(set(ranks))
    if world_size < 1 or (chosen and not 0 <= chosen[0] <= chosen[-1] < world_size):
        raise InvalidInputError(
            "a start with so many ranks has no such ranks", world=world_size, ranks=chosen
        )
    found: set[int] = set()
    for rank in chosen:
        first = rank * saved_world_size // world_size
        last = -(-(rank + 1) * saved_world_size // world_size)  # rounded up
        found.update(range(first, last))
    return tuple(sorted(found))
