from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import InvalidInputError
from ckpt.geometry import (
    Box,
    Region,
    Run,
    Runs,
    flat_range,
    flat_range_boxes,
    intersect_regions,
    intersect_runs,
    merge_runs,
    narrow_runs,
)
from tests.support.properties import examples


def elements(runs: Runs) -> list[int]:
    return [i for run in runs for i in range(run.start, run.start + run.length)]


@st.composite
def disjoint_runs(draw: st.DrawFn, size: int = 20) -> Runs:
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
    pieces = [Run(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return merge_runs(draw(st.permutations(pieces)))


def test_boxes_intersect_in_the_coordinates_they_share() -> None:
    assert Box((0, 2), (4, 4)).intersect(Box((3, 0), (5, 3))) == Box((3, 2), (1, 1))


def test_boxes_that_only_touch_share_nothing() -> None:
    assert Box((0,), (4,)).intersect(Box((4,), (4,))) is None


def test_an_empty_box_shares_nothing() -> None:
    assert Box((1,), (0,)).is_empty
    assert Box((1,), (0,)).intersect(Box((0,), (4,))) is None


def test_a_scalar_is_one_element() -> None:
    scalar = Box((), ())
    assert scalar.nelements == 1
    assert not scalar.is_empty
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices() == ()


def test_boxes_of_different_ndim_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))
    with pytest.raises(InvalidInputError):
        Box((0,), (1, 1))


def test_shift_moves_and_slices_select() -> None:
    box = Box((1, 2), (2, 1)).shift((1, -1))
    assert box == Box((2, 1), (2, 1))
    assert box.slices() == (slice(2, 4), slice(1, 2))


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
@examples()
def test_flat_range_boxes_are_the_range_in_order_and_each_contiguous(
    shape: list[int], data: st.DataObject
) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    flat = np.arange(total).reshape(shape)
    boxes = flat_range_boxes(shape, start, stop)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    covered = [int(i) for box in boxes for i in flat[box.slices()].reshape(-1)]
    assert covered == list(range(start, stop))


def test_flat_range_boxes_of_a_whole_array_are_one_box() -> None:
    assert flat_range_boxes((3, 4, 5), 0, 60) == [Box((0, 0, 0), (3, 4, 5))]
    assert flat_range_boxes((), 0, 1) == [Box((), ())]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 7)])
def test_a_range_outside_the_array_is_refused(start: int, stop: int) -> None:
    with pytest.raises(InvalidInputError):
        flat_range_boxes((2, 3), start, stop)


@given(disjoint_runs(), st.integers(0, 25), st.integers(0, 25))
@examples()
def test_narrow_runs_keeps_the_local_elements(runs: Runs, start: int, stop: int) -> None:
    assert elements(narrow_runs(runs, start, stop)) == elements(runs)[start:stop]


@given(disjoint_runs(), disjoint_runs())
@examples()
def test_intersect_runs_pairs_each_common_element_once(src: Runs, dst: Runs) -> None:
    pairs = [(s + i, d + i) for s, d, n in intersect_runs(src, dst) for i in range(n)]
    common = set(elements(src)) & set(elements(dst))
    assert len(pairs) == len(common)
    assert {(elements(src)[s], elements(dst)[d]) for s, d in pairs} == {(x, x) for x in common}
    assert [d for _, d in pairs] == sorted(d for _, d in pairs)


def test_intersect_runs_merges_what_continues_on_both_sides() -> None:
    src = (Run(0, 3), Run(6, 3))
    assert intersect_runs(src, src) == [(0, 0, 6)]


def test_region_boxes_are_the_product_of_the_runs_with_their_local_places() -> None:
    region = Region(((Run(0, 2), Run(5, 1)), (Run(3, 4),)))
    assert region.shape == (3, 4)
    assert region.nelements == 12
    assert region.boxes() == [(Box((0, 3), (2, 4)), (0, 0)), (Box((5, 3), (1, 4)), (2, 0))]


def test_region_of_a_box_and_back() -> None:
    box = Box((1, 2), (3, 4))
    assert Region.of_box(box).boxes() == [(box, (0, 0))]
    assert Region.of_box(Box((1, 2), (3, 0))).is_empty
    assert Region.whole((3, 0)).shape == (3, 0)
    assert Region.whole(()).nelements == 1
    assert Region.whole(()).boxes() == [(Box((), ()), ())]


def test_narrow_cuts_in_local_coordinates_across_runs() -> None:
    region = Region(((Run(0, 2), Run(5, 2)),)).narrow(0, 1, 3)
    assert region == Region(((Run(1, 1), Run(5, 1)),))


def test_intersect_regions_gives_local_boxes_of_both_sides() -> None:
    src = Region(((Run(4, 4),), (Run(0, 10),)))
    dst = Region(((Run(0, 6),), (Run(8, 2), Run(0, 2))))
    assert intersect_regions(src, dst) == [
        (Box((0, 8), (2, 2)), Box((4, 0), (2, 2))),
        (Box((0, 0), (2, 2)), Box((4, 2), (2, 2))),
    ]


def test_regions_of_different_ndim_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        intersect_regions(Region.whole((2,)), Region.whole((2, 2)))


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
@examples(150)
def test_a_box_is_one_flat_range_exactly_when_its_elements_are_consecutive(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, offsets, strict=True))
    flat = np.arange(math.prod(shape)).reshape(shape)[Box(offsets, sizes).slices()].ravel()
    found = flat_range(shape, Box(offsets, sizes))
    is_one = bool((np.diff(flat) == 1).all())
    assert found == ((int(flat[0]), int(flat[-1]) + 1) if is_one else None)
