"""Live pieces are filled from whatever saved pieces they meet: each element once, or named as missing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.geometry import Box
from ckpt_trainer_hooks import ExplicitShards
from ckpt_trainer_hooks.shards import SavedShards, plan_fills

SHAPE = (7, 5)


@st.composite
def cuts(draw: st.DrawFn) -> list[Box]:
    """Random guillotine cuts of the whole into boxes."""
    boxes = [Box((0, 0), SHAPE)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, 1))
        at = draw(st.integers(0, box.sizes[dim]))
        first, second = list(box.sizes), list(box.sizes)
        first[dim], second[dim] = at, box.sizes[dim] - at
        start = list(box.offsets)
        start[dim] += at
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(start), tuple(second))]
    return [box for box in boxes if not box.is_empty]


@settings(max_examples=200, deadline=None)
@given(cuts(), cuts(), st.data())
def test_every_element_comes_from_a_saved_piece_or_is_reported(
    saved: list[Box], live: list[Box], data: st.DataObject
) -> None:
    full = torch.arange(35, dtype=torch.int64).reshape(SHAPE)
    lost = data.draw(st.sets(st.integers(0, len(saved) - 1), max_size=1))
    # Twice: replicas of a piece must not be read twice.
    there = [(box, str(number)) for number, box in enumerate(saved) if number not in lost] * 2
    stored = {name: full[box.slices()] for box, name in there}
    pieces = [(box.offsets, torch.full(box.sizes, -1, dtype=torch.int64)) for box in live]
    shards = ExplicitShards(SHAPE, pieces, dtype=torch.int64)
    fills, uncovered = plan_fills(shards, SavedShards(SHAPE, "int64", tuple(there)))
    for fill in fills:
        assert (fill.target == -1).all()  # nothing is written twice
        fill.target.copy_(stored[fill.stored][fill.source.slices()])
    missing = torch.zeros(SHAPE, dtype=torch.bool)
    for box in uncovered:
        missing[box.slices()] = True
    expected_missing = torch.zeros(SHAPE, dtype=torch.bool)
    for number in lost:
        expected_missing[saved[number].slices()] = True
    assert torch.equal(missing, expected_missing)
    for box, tensor in shards.pieces:
        want = torch.where(expected_missing, torch.tensor(-1), full)[box.slices()]
        assert torch.equal(tensor, want)
