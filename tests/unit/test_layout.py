from __future__ import annotations

import zlib
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CkptError, CorruptError, InvalidInputError
from ckpt.format.layout import (
    LayoutSet,
    Mesh,
    Replicate,
    Shard,
    StridedShard,
    TensorLayout,
    local_region,
    merge_layout_sets,
    owned_region,
    owned_stripe,
    owners,
    right_to_left,
)
from ckpt.geometry import Box, Region, Run
from ckpt_proto.v1 import common_pb2
from tests.support.layouts import layouts, meshes
from tests.support.properties import examples


def line(count: int, base: int = 0) -> Mesh:
    return Mesh.from_ranks((count,), ("dp",), range(base, base + count))


def sharded(name: str = "w", rows: int = 8, mesh: Mesh | None = None) -> TensorLayout:
    return TensorLayout(name, "float32", (rows, 2), mesh or line(4), (Shard(0),))


@given(meshes())
@examples()
def test_mesh_finds_coordinates_and_ranks_of_each_other(mesh: Mesh) -> None:
    coords = list(product(*map(range, mesh.shape)))
    assert [mesh.rank_at(coord) for coord in coords] == list(mesh.ranks)
    assert [mesh.coord_of(rank) for rank in mesh.ranks] == coords
    others = set(range(max(mesh.ranks) + 30)) - set(mesh.ranks)
    assert all(mesh.coord_of(rank) is None for rank in others)


@given(meshes())
@examples()
def test_mesh_survives_its_stored_form(mesh: Mesh) -> None:
    assert Mesh.from_proto(common_pb2.Mesh.FromString(mesh.to_proto().SerializeToString())) == mesh


@given(meshes(), st.data())
@examples()
def test_a_permuted_mesh_keeps_every_rank_at_its_place(mesh: Mesh, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(mesh.ndim)))
    permuted = mesh.permute(order)
    for rank in mesh.ranks:
        coord = mesh.coord_of(rank)
        assert coord is not None
        assert permuted.coord_of(rank) == tuple(coord[dim] for dim in order)


def test_regular_meshes_are_stored_without_a_list_of_ranks() -> None:
    assert len(Mesh.from_ranks((64, 64), ("a", "b"), range(4096)).to_proto().SerializeToString()) < 32
    transposed = [i + 2 * j for i in range(2) for j in range(3)]
    assert Mesh.from_ranks((2, 3), (), transposed).strides == (1, 2)
    assert Mesh.from_ranks((1, 3), (), (5, 7, 9)).strides == (0, 2)
    assert Mesh.from_ranks((), (), (3,)).strides == ()


def test_irregular_meshes_keep_their_ranks() -> None:
    mesh = Mesh.from_ranks((4,), (), (0, 1, 3, 2))
    assert mesh.strides is None
    assert mesh.coord_of(3) == (2,)


def test_descending_ranks_are_found_too() -> None:
    mesh = Mesh.from_ranks((3,), (), (2, 1, 0))
    assert [mesh.coord_of(rank) for rank in range(4)] == [(2,), (1,), (0,), None]


@pytest.mark.parametrize(
    ("shape", "names", "ranks"),
    [((2,), (), (0,)), ((2,), (), (1, 1)), ((2,), ("a", "b"), (0, 1)), ((2,), (), (-1, 0)), ((0,), (), ())],
)
def test_malformed_meshes_are_refused(
    shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidInputError):
        Mesh.from_ranks(shape, names, ranks)


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Mesh(shape=[2], ranks=[0]),
        common_pb2.Mesh(shape=[2], ranks=[1, 1]),
        common_pb2.Mesh(shape=[2], strides=[0]),
        common_pb2.Mesh(shape=[2, 2], strides=[1, 1]),
        common_pb2.Mesh(shape=[2], strides=[-1]),
        common_pb2.Mesh(shape=[0], strides=[1]),
        common_pb2.Mesh(shape=[2]),
    ],
)
def test_a_malformed_stored_mesh_is_corrupt(message: common_pb2.Mesh) -> None:
    with pytest.raises(CorruptError):
        Mesh.from_proto(message)


@pytest.mark.parametrize(
    "arguments",
    [
        ("w", "float32", (8, 2), line(4), ()),
        ("w", "float32", (8, 2), line(4), (Shard(2),)),
        ("w", "float32", (8, 2), line(4), (Shard(-1),)),
        ("w", "float32", (8, 2), line(4), (StridedShard(0, 0),)),
        ("w", "float32", (-1,), line(4), (Shard(0),)),
        ("w", "float33", (8, 2), line(4), (Shard(0),)),
        ("\ud800", "float32", (8, 2), line(4), (Shard(0),)),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(InvalidInputError):
        TensorLayout(*arguments)  # type: ignore[arg-type]


def test_an_uneven_strided_shard_keeps_all_of_its_runs() -> None:
    mesh = Mesh.from_ranks((4,), (), range(4))
    layout = TensorLayout("w", "float32", (9,), mesh, (StridedShard(0, 2),))
    # The example in the docstring of DTensor's _StridedShard.
    assert [local_region(layout, rank) for rank in range(4)] == [
        Region(((Run(0, 2), Run(5, 1)),)),
        Region(((Run(2, 2), Run(6, 1)),)),
        Region(((Run(4, 1), Run(7, 1)),)),
        Region(((Run(8, 1),),)),
    ]


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    assert local_region(sharded(), 4) is None
    assert owned_region(sharded(), 4) is None


def test_uneven_shards_leave_the_last_ranks_empty() -> None:
    layout = sharded(rows=5)
    assert [r.shape for rank in range(4) if (r := local_region(layout, rank))] == [
        (2, 2),
        (2, 2),
        (1, 2),
        (0, 2),
    ]
    assert owned_region(layout, 3) is None


def test_a_small_replicated_tensor_goes_to_one_replica_by_its_name() -> None:
    layout = TensorLayout("model.norm.weight", "float32", (64,), line(4), (Replicate(),))
    keeper = zlib.crc32(b"model.norm.weight") % 4
    assert [owned_region(layout, rank) for rank in range(4)] == [
        Region.whole((64,)) if rank == keeper else None for rank in range(4)
    ]


def test_a_large_replicated_tensor_is_cut_in_rows() -> None:
    layout = TensorLayout("w", "float32", (1026, 256), line(4), (Replicate(),))
    stripes = [owned_stripe(layout, rank) for rank in range(4)]
    assert [s.local_start for s in stripes if s] == [(0, 0), (256, 0), (513, 0), (769, 0)]
    assert [s.region.shape for s in stripes if s] == [(256, 256), (257, 256), (256, 256), (257, 256)]


def test_a_tensor_with_few_rows_is_cut_along_its_first_dim_that_is_long_enough() -> None:
    layout = TensorLayout("w", "float32", (2, 3, 65536), line(3), (Replicate(),))
    stripe = owned_stripe(layout, 1)
    assert stripe is not None
    assert stripe.region.boxes() == [(Box((0, 1, 0), (2, 1, 65536)), (0, 0, 0))]
    assert stripe.local_start == (0, 1, 0)


def test_more_replicas_than_rows_leave_some_with_nothing() -> None:
    mesh = line(48)
    layout = TensorLayout("w", "complex128", (41, 41, 41), mesh, (Replicate(),))
    shares = [owned_region(layout, rank) for rank in range(48)]
    assert sum(share is None for share in shares) == 7
    assert {rank for rank, _ in owners(layout, Region.whole((41, 41, 41)))} == {
        rank for rank in range(48) if shares[rank] is not None
    }


def test_hsdp_replica_index_is_row_major_over_the_replicate_dims() -> None:
    mesh = Mesh.from_ranks((2, 2, 2), ("a", "dp", "b"), range(8))
    layout = TensorLayout("w", "float32", (4096, 512), mesh, (Replicate(), Shard(0), Replicate()))
    starts = {rank: stripe.local_start[0] for rank in range(8) if (stripe := owned_stripe(layout, rank))}
    assert starts == {0: 0, 1: 512, 4: 1024, 5: 1536, 2: 0, 3: 512, 6: 1024, 7: 1536}


def test_owners_refuses_a_region_of_another_ndim() -> None:
    with pytest.raises(InvalidInputError):
        list(owners(sharded(), Region.whole((8,))))


def test_right_to_left_has_no_answer_for_a_foreign_split_factor() -> None:
    mesh = Mesh.from_ranks((2, 2), (), range(4))
    assert right_to_left(TensorLayout("w", "int8", (9,), mesh, (StridedShard(0, 3), Shard(0)))) is None


def test_right_to_left_leaves_plain_layouts_alone() -> None:
    layout = sharded()
    assert right_to_left(layout) is layout


def test_right_to_left_puts_fsdp_after_tensor_parallel() -> None:
    mesh = Mesh.from_ranks((4, 2), ("dp", "tp"), range(8))
    real = right_to_left(TensorLayout("w", "int8", (9,), mesh, (StridedShard(0, 2), Shard(0))))
    assert real is not None
    assert real.mesh.names == ("tp", "dp")
    assert real.placements == (Shard(0), Shard(0))
    # Rank 7 is the last of FSDP on the second half; DTensor's own arithmetic leaves it empty.
    assert local_region(real, 7) == Region(((Run(8, 1),),))


@given(st.lists(layouts(), max_size=6, unique_by=lambda item: item.name))
@examples()
def test_a_layout_set_survives_its_stored_form_in_any_order(items: list[TensorLayout]) -> None:
    one, other = LayoutSet(items), LayoutSet(reversed(items))
    assert one.encode() == other.encode()
    assert one.digest == other.digest
    decoded = LayoutSet.decode(one.encode())
    assert decoded == one
    assert list(decoded) == sorted(item.name for item in items)
    assert list(decoded.values()) == sorted(items, key=lambda item: item.name)


def test_meshes_are_stored_once() -> None:
    items = [sharded(f"w{i}", mesh=Mesh.from_ranks((4,), ("dp",), range(4))) for i in range(9)]
    message = common_pb2.LayoutSet.FromString(LayoutSet(items).encode())
    assert len(message.meshes) == 1


def test_the_stored_form_does_not_grow_with_the_ranks() -> None:
    small = LayoutSet([sharded(f"w{i}", mesh=line(4)) for i in range(50)]).encode()
    large = LayoutSet([sharded(f"w{i}", mesh=line(100_000)) for i in range(50)]).encode()
    assert len(large) < len(small) + 8


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInputError):
        LayoutSet([sharded("w"), sharded("w")])


@pytest.mark.parametrize("change", ["mesh", "dim", "kind", "dtype", "count", "bytes"])
def test_a_damaged_layout_set_is_corrupt(change: str) -> None:
    message = common_pb2.LayoutSet.FromString(LayoutSet([sharded()]).encode())
    tensor = message.tensors[0]
    if change == "mesh":
        tensor.mesh = 1
    elif change == "dim":
        tensor.placements[0].dim = 7
    elif change == "kind":
        tensor.placements[0].kind = common_pb2.Placement.KIND_UNSPECIFIED
    elif change == "dtype":
        tensor.dtype = "float31"
    elif change == "count":
        del tensor.placements[:]
    data = b"\xff\xff" if change == "bytes" else message.SerializeToString()
    with pytest.raises(CkptError) as caught:
        LayoutSet.decode(data)
    assert isinstance(caught.value, CorruptError)


def test_merging_unites_by_name_in_any_order() -> None:
    shared_low, shared_high = sharded("emb", mesh=line(2)), sharded("emb", mesh=line(2, base=2))
    first = LayoutSet([shared_low, sharded("a", mesh=line(2))])
    last = LayoutSet([shared_high, sharded("z", mesh=line(2, base=2))])
    merged = merge_layout_sets([first, last, first])
    assert merged == merge_layout_sets([last, first])
    assert list(merged) == ["a", "emb", "z"]
    assert merged["emb"] == shared_low


@pytest.mark.parametrize(
    "other",
    [
        TensorLayout("w", "float32", (8, 3), line(4, base=4), (Shard(0),)),
        TensorLayout("w", "bfloat16", (8, 2), line(4, base=4), (Shard(0),)),
        TensorLayout("w", "float32", (8, 2), line(4), (Shard(1),)),
        TensorLayout("w", "float32", (8, 2), line(8), (Shard(0),)),
    ],
    ids=["shape", "dtype", "same-mesh", "overlapping-mesh"],
)
def test_ranks_that_disagree_on_a_tensor_are_named(other: TensorLayout) -> None:
    with pytest.raises(CorruptError) as caught:
        merge_layout_sets([LayoutSet([sharded("w")]), LayoutSet([other])])
    assert caught.value.code == "layout-mismatch"
    assert caught.value.context["tensor"] == "w"
