"""Save plans, segments and read plans together, on real bytes, from any layout to any other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.errors import CorruptError
from ckpt.format.layout import LayoutSet, TensorLayout, local_region
from ckpt.geometry import Region
from ckpt.plan.read import PieceRead, Want, plan_chunks, plan_read
from ckpt.plan.save import plan_save
from ckpt_proto.v1 import disk_pb2
from tests.support.layouts import LARGE_SHAPES, layouts, read_region, shapes, world_of
from tests.support.properties import examples

Array = NDArray[np.generic]
NUMPY = {"int64": np.int64, "int16": np.int16, "complex128": np.complex128, "uint8": np.uint8}


def full_tensor(layout: TensorLayout) -> Array:
    values = np.arange(math.prod(layout.global_shape)).reshape(layout.global_shape)
    return values.astype(NUMPY[layout.dtype])


def write_segment(
    layouts_: LayoutSet, full: dict[str, Array], rank: int
) -> tuple[bytes, dict[str, disk_pb2.TensorEntry]]:
    """Build a segment as a rank does: from its local tensors alone."""
    plan = plan_save(layouts_.values(), rank)
    data = bytearray(plan.nbytes)
    data[: len(plan.header)] = plan.header
    position = len(plan.header)
    for item in plan.arrays:
        region = local_region(layouts_[item.name], rank)
        assert region is not None
        stripe = read_region(full[item.name], region)[item.local_slices()]
        assert stripe.shape == item.shape
        assert item.start == position
        data[item.start : item.start + item.nbytes] = stripe.tobytes()
        position += item.nbytes
    assert position == plan.nbytes
    return bytes(data), {entry.name: entry for entry in plan.tensor_entries()}


def execute(
    saved: LayoutSet, full: dict[str, Array], wants: Sequence[Want], targets: list[Array], chunk_nbytes: int
) -> None:
    plan = plan_read(saved, wants)
    copied = 0
    for rank, pieces in plan.by_rank.items():
        segment, entries = write_segment(saved, full, rank)
        for chunk, copies in plan_chunks(entries, pieces, chunk_nbytes, len(segment)).items():
            data = segment[chunk * chunk_nbytes : (chunk + 1) * chunk_nbytes]
            assert copies
            for copy in copies:
                held: Array = np.frombuffer(data, NUMPY[copy.dtype], copy.count, copy.offset).reshape(
                    copy.shape
                )
                targets[copy.target][copy.dst_slices()] = held[copy.src_slices()]
                copied += copy.nbytes
    assert copied == plan.nbytes == sum(item.nbytes for item in targets)


def check_restore(saved: LayoutSet, wanted: Sequence[TensorLayout], *, chunk_nbytes: int) -> None:
    full = {name: full_tensor(layout) for name, layout in saved.items()}
    for rank in sorted({rank for layout in wanted for rank in world_of(layout)}):
        wants: list[Want] = []
        targets: list[Array] = []
        for layout in wanted:
            region = local_region(layout, rank)
            if region is not None:
                wants.append(Want(layout.name, region, len(targets)))
                # Poison that no small arange holds: what is not written shows.
                targets.append(np.full(region.shape, -7).astype(NUMPY[layout.dtype]))
        execute(saved, full, wants, targets, chunk_nbytes)
        for want, target in zip(wants, targets, strict=True):
            assert np.array_equal(target, read_region(full[want.name], want.region))


@st.composite
def two_layouts(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: str, sizes: tuple[int | None, int | None]
) -> tuple[TensorLayout, TensorLayout]:
    saved = draw(layouts(shape=shape, dtype=dtype, size=sizes[0]))
    wanted = draw(layouts(shape=shape, dtype=dtype, size=sizes[1]))
    return saved, TensorLayout(saved.name, dtype, shape, wanted.mesh, wanted.placements)


@given(
    shapes().flatmap(lambda s: two_layouts(s, "int64", (None, None))),
    st.sampled_from([8, 24, 64, 4096, 1 << 20]),
)
@examples(150)
def test_any_layout_restores_onto_any_other(
    pair: tuple[TensorLayout, TensorLayout], chunk_nbytes: int
) -> None:
    check_restore(LayoutSet([pair[0]]), [pair[1]], chunk_nbytes=chunk_nbytes)


@pytest.mark.parametrize(("before", "after"), [(4, 4), (3, 5), (7, 3), (5, 7), (8, 2), (1, 6)])
@given(data=st.data())
@examples(20)
def test_any_layout_restores_onto_another_world_size(before: int, after: int, data: st.DataObject) -> None:
    shape = data.draw(shapes())
    saved, wanted = data.draw(two_layouts(shape, "int16", (before, after)))
    check_restore(LayoutSet([saved]), [wanted], chunk_nbytes=32)


@given(st.sampled_from(LARGE_SHAPES).flatmap(lambda s: two_layouts(s, "complex128", (None, 4))))
@examples(25)
def test_striped_replicas_restore_onto_any_other_layout(pair: tuple[TensorLayout, TensorLayout]) -> None:
    check_restore(LayoutSet([pair[0]]), [pair[1]], chunk_nbytes=1 << 16)


@given(st.data())
@examples(60)
def test_many_tensors_of_many_dtypes_share_the_segments(data: st.DataObject) -> None:
    saved, wanted = [], []
    for index in range(data.draw(st.integers(0, 5))):
        dtype = data.draw(st.sampled_from(sorted(NUMPY)))
        one, other = data.draw(two_layouts(data.draw(shapes()), dtype, (4, 3)))
        saved.append(TensorLayout(f"t{index}", dtype, one.global_shape, one.mesh, one.placements))
        wanted.append(TensorLayout(f"t{index}", dtype, other.global_shape, other.mesh, other.placements))
    check_restore(LayoutSet(saved), wanted, chunk_nbytes=48)


@given(shapes().flatmap(lambda s: two_layouts(s, "int64", (None, None))))
@examples(60)
def test_each_chunk_and_each_owner_is_named_once_and_only_where_needed(
    pair: tuple[TensorLayout, TensorLayout],
) -> None:
    saved, wanted = pair
    region = local_region(wanted, world_of(wanted)[0])
    assert region is not None
    plan = plan_read(LayoutSet([saved]), [Want(saved.name, region, 0)])
    assert list(plan.by_rank) == sorted(plan.by_rank)
    for pieces in plan.by_rank.values():
        assert len(pieces) == 1
        assert all(not src.is_empty and src.sizes == dst.sizes for src, dst in pieces[0].pairs)
    if region.is_empty:
        assert not plan.by_rank


@given(shapes().flatmap(lambda s: layouts(shape=s)))
@examples(60)
def test_an_index_that_contradicts_the_layout_is_refused(layout: TensorLayout) -> None:
    whole = Region.whole(layout.global_shape)
    plan = plan_read(LayoutSet([layout]), [Want(layout.name, whole, 0)])
    for rank, pieces in plan.by_rank.items():
        save = plan_save([layout], rank)
        entries = {entry.name: entry for entry in save.tensor_entries()}
        entries[layout.name].shape.append(1)
        expect_mismatch(entries, pieces, save.nbytes)
        del entries[layout.name].shape[-1]
        entries[layout.name].start += 1
        expect_mismatch(entries, pieces, save.nbytes + 1)
        expect_mismatch({}, pieces, save.nbytes)


def expect_mismatch(
    entries: dict[str, disk_pb2.TensorEntry], pieces: Sequence[PieceRead], nbytes: int
) -> None:
    with pytest.raises(CorruptError) as caught:
        plan_chunks(entries, pieces, 4096, nbytes)
    assert caught.value.code == "index-mismatch"
