"""Every sample of an epoch exactly once, whatever ranks and batch sizes read it, and where they stop."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ckpt_trainer_hooks.data import ResumableLoader, ResumableSampler
from tests.support.properties import examples

SEED = 5


def _loaders(length: int, batch: int, world: int, tail: str) -> list[ResumableLoader]:
    samplers = [
        ResumableSampler(length, batch, seed=SEED, tail=tail, rank=rank, world_size=world)  # type: ignore[arg-type]
        for rank in range(world)
    ]
    return [ResumableLoader(DataLoader(range(length), batch_sampler=s)) for s in samplers]  # type: ignore[arg-type]


def _order(length: int, epoch: int) -> list[int]:
    sampler = ResumableSampler(length, 1, seed=SEED, tail="drop", rank=0, world_size=1)
    return sampler._order_of(epoch).tolist()


def _phase(loaders: list[ResumableLoader], batches: int) -> list[int]:
    """Read ``batches`` global batches on all ranks; the samples in the order of the global batches."""
    iterators = [iter(loader) for loader in loaders]
    found: list[int] = []
    for _ in range(batches):
        for number, loader in enumerate(loaders):
            batch = next(iterators[number], None)
            if batch is None:  # the epoch is over, on every rank at once
                iterators[number] = iter(loader)
                batch = next(iterators[number])
            found += batch.tolist()
    return found


_PHASES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6)


@examples(150)
@given(st.integers(35, 120), _PHASES)
def test_carried_tail_reads_the_plain_permutations_one_after_the_other(
    length: int, phases: list[tuple[int, int, int]]
) -> None:
    state = None
    found: list[int] = []
    for world, batch, count in phases:
        loaders = _loaders(length, batch, world, "carry")
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        found += _phase(loaders, count)
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
    epochs = range(len(found) // length + 1)
    assert found == [sample for epoch in epochs for sample in _order(length, epoch)][: len(found)]


@examples(100)
@given(st.integers(35, 120), _PHASES, st.sampled_from(["drop", "pad"]))
def test_within_one_epoch_every_sample_comes_once_but_for_the_tail(
    length: int, phases: list[tuple[int, int, int]], tail: str
) -> None:
    state = None
    found: list[int] = []
    for world, batch, count in [*phases, (3, 2, length)]:
        loaders = _loaders(length, batch, world, tail)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        if any(loader.epoch for loader in loaders):
            break
        found += _phase(loaders, min(count, len(loaders[0])))
        state = loaders[0].state_dict()
    assert state is not None
    order = _order(length, 0)
    assert found[:length] == order[: len(found)]
    assert found[length:] == order[: max(0, len(found) - length)]  # padding
    if tail == "drop":
        assert max(Counter(found).values()) == 1
    else:
        assert len(found) >= length
