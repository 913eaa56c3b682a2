"""The layout arithmetic against PyTorch's own splitting, for every rank of random meshes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.format.layout import (
    Mesh,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    local_region,
    owned_region,
    owned_stripe,
    owners,
    right_to_left,
    storing_ranks,
)
from ckpt.geometry import Region, Run
from tests.support.layouts import LARGE_SHAPES, layouts, read_region, world_of
from tests.support.properties import examples


def as_torch(placement: Placement) -> TorchPlacement:
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return TorchReplicate()


def torch_local(full: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor:
    """Split like DTensor does: each placement's own ``_split_tensor``, from left to right."""
    coord = layout.mesh.coord_of(rank)
    assert coord is not None
    local = full
    for index, count, placement in zip(coord, layout.mesh.shape, layout.placements, strict=True):
        split = as_torch(placement)
        if isinstance(split, TorchShard | _StridedShard):
            local = split._split_tensor(local, count, with_padding=False, contiguous=True)[0][index]
    return local


def counts_of_owned(layout: TensorLayout) -> np.ndarray:
    counts = np.zeros(layout.global_shape, dtype=np.int32)
    for rank in world_of(layout):
        region = owned_region(layout, rank)
        if region is not None:
            assert not region.is_empty
            for box, _ in region.boxes():
                counts[box.slices()] += 1
    return counts


@given(layouts())
@examples(200)
def test_local_region_is_what_dtensor_holds_on_every_rank(layout: TensorLayout) -> None:
    """Case I44."""
    full = torch.arange(math.prod(layout.global_shape)).reshape(layout.global_shape)
    for rank in world_of(layout):
        expected = torch_local(full, layout, rank)
        region = local_region(layout, rank)
        assert region is not None
        assert region.shape == tuple(expected.shape)
        assert np.array_equal(read_region(full.numpy(), region), expected.numpy())


@given(layouts())
@examples(150)
def test_every_element_is_owned_exactly_once(layout: TensorLayout) -> None:
    assert (counts_of_owned(layout) == 1).all()


@given(st.sampled_from(LARGE_SHAPES).flatmap(lambda s: layouts(shape=s, dtype="complex128")))
@examples(60)
def test_every_element_is_owned_exactly_once_where_replicas_share_the_work(layout: TensorLayout) -> None:
    assert (counts_of_owned(layout) == 1).all()


@given(layouts() | st.sampled_from(LARGE_SHAPES).flatmap(lambda s: layouts(shape=s, dtype="complex128")))
@examples(150)
def test_a_stripe_lies_where_it_says_in_the_local_tensor(layout: TensorLayout) -> None:
    for rank in world_of(layout):
        stripe = owned_stripe(layout, rank)
        local = local_region(layout, rank)
        if stripe is None:
            continue
        assert local is not None
        narrowed = local
        for dim, (start, size) in enumerate(zip(stripe.local_start, stripe.region.shape, strict=True)):
            narrowed = narrowed.narrow(dim, start, start + size)
        assert narrowed == stripe.region


@st.composite
def layouts_with_wants(draw: st.DrawFn) -> tuple[TensorLayout, Region]:
    large = st.sampled_from(LARGE_SHAPES).flatmap(lambda s: layouts(shape=s, dtype="complex128"))
    layout = draw(layouts() | large)
    if draw(st.booleans()):
        other = draw(layouts(shape=layout.global_shape, dtype=layout.dtype))
        region = local_region(other, draw(st.sampled_from(list(world_of(other)))))
        assert region is not None
        return layout, region
    runs = []
    for size in layout.global_shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=4, max_size=4)))
        pair = [Run(cuts[0], cuts[1] - cuts[0]), Run(cuts[2], cuts[3] - cuts[2])]
        runs.append(tuple(run for run in draw(st.permutations(pair)) if run.length))
    return layout, Region(tuple(runs))


@given(layouts_with_wants())
@examples(150)
def test_owners_finds_the_ranks_that_a_scan_of_all_ranks_finds(case: tuple[TensorLayout, Region]) -> None:
    layout, wanted = case
    expected = {}
    for rank in world_of(layout):
        region = owned_region(layout, rank)
        if region is not None and overlaps(region, wanted):
            expected[rank] = region
    found = list(owners(layout, wanted))
    assert len(found) == len(expected)
    assert dict(found) == expected


def overlaps(left: Region, right: Region) -> bool:
    return all(
        any(a.start < b.start + b.length and b.start < a.start + a.length for a in mine for b in other)
        for mine, other in zip(left.runs, right.runs, strict=True)
    )


@given(st.lists(layouts(base=0) | layouts(shape=(257, 300), dtype="complex128", base=0), max_size=4))
@examples(150)
def test_storing_ranks_are_those_that_own_something(items: list[TensorLayout]) -> None:
    expected = {rank for item in items for rank in world_of(item) if owned_region(item, rank) is not None}
    assert storing_ranks(items) == expected


@contextmanager
def pretend_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world whose collectives do nothing; local splitting needs none."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


REAL_CASES = [
    ((9, 4), (4,), (Shard(0),)),
    ((3, 4), (4,), (Shard(0),)),
    ((9, 5), (2, 2), (Shard(0), Shard(0))),
    ((9, 5), (2, 3), (Shard(1), Shard(0))),
    ((9, 2), (4, 2), (StridedShard(0, 2), Shard(0))),
    ((11, 7), (2, 2, 2), (Replicate(), StridedShard(1, 2), Shard(1))),
    ((10,), (3, 2), (Shard(0), StridedShard(0, 3))),
    ((0, 3), (2, 2), (Shard(0), Replicate())),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "chosen"), REAL_CASES)
def test_distribute_tensor_gives_every_rank_our_region(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], chosen: tuple[Placement, ...]
) -> None:
    world = math.prod(mesh_shape)
    layout = TensorLayout("w", "int64", shape, Mesh.from_ranks(mesh_shape, (), range(world)), chosen)
    full = torch.arange(math.prod(shape)).reshape(shape)
    for rank in range(world):
        with pretend_rank(rank, world):
            mesh = init_device_mesh("cpu", mesh_shape)
            tensor = distribute_tensor(full, mesh, [as_torch(p) for p in chosen], src_data_rank=None)
            local = tensor.to_local().clone()
        region = local_region(layout, rank)
        assert region is not None
        assert np.array_equal(read_region(full.numpy(), region), local.numpy())


@pytest.mark.parametrize("rows", [7, 8, 9, 10, 13])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 2), (2, 4), (3, 2)])
def test_fsdp2_over_tensor_parallel_rows_lie_as_right_to_left_says(rows: int, dp: int, tp: int) -> None:
    world = dp * tp
    full = torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2)
    mesh = Mesh.from_ranks((dp, tp), ("dp", "tp"), range(world))
    layout = TensorLayout("w", "float32", (rows, 2), mesh, (StridedShard(0, tp), Shard(0)))
    real = right_to_left(layout)
    assert real is not None
    for rank in range(world):
        with pretend_rank(rank, world):
            local, reported = fsdp_local(full, dp, tp)
        assert reported == tuple(as_torch(p) for p in layout.placements)
        region = local_region(real, rank)
        assert region is not None
        assert np.array_equal(read_region(full.numpy(), region), local.numpy())


def fsdp_local(full: torch.Tensor, dp: int, tp: int) -> tuple[torch.Tensor, tuple[TorchPlacement, ...]]:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Linear(full.shape[1], full.shape[0], bias=False)
    weight = distribute_tensor(full, mesh["tp"], [TorchShard(0)], src_data_rank=None)
    module.weight = torch.nn.Parameter(weight)
    fully_shard(module, mesh=mesh["dp"])
    sharded = module.weight
    assert isinstance(sharded, DTensor)
    return sharded.to_local().detach().clone(), sharded.placements


@given(layouts())
@examples(200)
def test_right_to_left_covers_every_element_once_with_one_box_per_rank(layout: TensorLayout) -> None:
    real = right_to_left(layout)
    if real is None:
        return
    assert (counts_of_owned(real) == 1).all()
    for rank in world_of(layout):
        region = local_region(real, rank)
        assert region is not None
        assert len(region.boxes()) <= 1


def test_right_to_left_equals_the_strided_layout_where_sizes_are_even() -> None:
    mesh = Mesh.from_ranks((2, 3, 2), ("r", "dp", "tp"), range(12))
    layout = TensorLayout("w", "int64", (24, 4), mesh, (Replicate(), StridedShard(0, 2), Shard(0)))
    real = right_to_left(layout)
    assert real is not None
    for rank in range(12):
        assert local_region(real, rank) == local_region(layout, rank)
        assert owned_region(real, rank) == owned_region(layout, rank)
