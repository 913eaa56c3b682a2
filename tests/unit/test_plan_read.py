from __future__ import annotations

import pytest

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.layout import LayoutSet, Mesh, Shard, StridedShard, TensorLayout, local_region, storing_ranks
from ckpt.geometry import Box, Region, Run
from ckpt.plan.read import ChunkCopy, Want, plan_chunks, plan_read
from ckpt.plan.save import plan_save

MESH = Mesh.from_ranks((4,), ("dp",), range(4))
LAYOUT = TensorLayout("w", "float32", (8, 6), MESH, (Shard(0),))
SAVED = LayoutSet([LAYOUT])


def want(box: Box, target: int = 0, name: str = "w") -> Want:
    return Want(name, Region.of_box(box), target)


def test_only_ranks_that_hold_a_part_are_read() -> None:
    """Case I119."""
    plan = plan_read(SAVED, [want(Box((3, 0), (2, 6)))])
    assert list(plan.by_rank) == [1, 2]
    assert plan.by_rank[1][0].pairs == ((Box((1, 0), (1, 6)), Box((0, 0), (1, 6))),)
    assert plan.by_rank[2][0].pairs == ((Box((0, 0), (1, 6)), Box((1, 0), (1, 6))),)
    assert plan.nbytes == 2 * 6 * 4


def test_one_tensor_can_go_to_several_targets() -> None:
    plan = plan_read(SAVED, [want(Box((0, 0), (1, 6)), 0), want(Box((0, 2), (2, 2)), 1)])
    assert [piece.target for piece in plan.by_rank[0]] == [0, 1]


def test_an_empty_want_reads_nothing() -> None:
    assert plan_read(SAVED, [want(Box((8, 0), (0, 6)))]).by_rank == {}


def test_a_tensor_that_was_not_saved_is_named() -> None:
    with pytest.raises(NotFoundError) as caught:
        plan_read(SAVED, [want(Box((0,), (1,)), name="v")])
    assert caught.value.context["tensor"] == "v"


@pytest.mark.parametrize("box", [Box((7, 0), (2, 6)), Box((-1, 0), (1, 6)), Box((0,), (8,))])
def test_a_region_beyond_the_tensor_is_refused(box: Box) -> None:
    with pytest.raises(InvalidInputError):
        plan_read(SAVED, [want(box)])


def test_each_run_lands_where_the_target_has_it() -> None:
    region = Region(((Run(4, 2), Run(0, 2)), (Run(0, 6),)))
    plan = plan_read(SAVED, [Want("w", region, 0)])
    assert {rank: pieces[0].pairs[0][1].offsets for rank, pieces in plan.by_rank.items()} == {
        0: (2, 0),
        2: (0, 0),
    }


def test_a_target_is_never_left_half_filled() -> None:
    repeated = Region(((Run(0, 2), Run(1, 2)), (Run(0, 6),)))
    with pytest.raises(CorruptError) as caught:
        plan_read(SAVED, [Want("w", repeated, 0)])
    assert caught.value.code == "coverage"


def test_a_copy_is_cut_where_a_chunk_ends() -> None:
    layout = TensorLayout("w", "int64", (4, 4), Mesh.from_ranks((1,), (), (0,)), (Shard(0),))
    save = plan_save([layout], 0)
    entries = {entry.name: entry for entry in save.tensor_entries()}
    pieces = plan_read(LayoutSet([layout]), [want(Box((0, 1), (4, 2)))]).by_rank[0]
    # 4096 bytes of header, then 16 elements; chunks of 48 bytes end in the middle of a row.
    chunks = plan_chunks(entries, pieces, 48, save.nbytes)
    assert sum(copy.nbytes for copies in chunks.values() for copy in copies) == 8 * 8
    assert list(chunks) == sorted(chunks)
    first = chunks[4096 // 48][0]
    assert first == ChunkCopy(
        target=0,
        dtype="int64",
        offset=4096 % 48 + 8,
        shape=(1, 3),
        src=Box((0, 0), (1, 2)),
        dst=Box((0, 0), (1, 2)),
    )
    assert first.count == 3
    assert (first.src_slices(), first.dst_slices()) == (
        (slice(0, 1), slice(0, 2)),
        (slice(0, 1), slice(0, 2)),
    )


def test_chunks_between_the_wanted_parts_are_not_read() -> None:
    """Cases I110, I119."""
    layout = TensorLayout("w", "int64", (2, 4096), Mesh.from_ranks((1,), (), (0,)), (Shard(0),))
    save = plan_save([layout], 0)
    entries = {entry.name: entry for entry in save.tensor_entries()}
    pieces = plan_read(LayoutSet([layout]), [want(Box((0, 0), (2, 8)))]).by_rank[0]
    assert list(plan_chunks(entries, pieces, 4096, save.nbytes)) == [1, 9]


def test_a_rank_of_3000_reads_from_a_handful_of_4096() -> None:
    saver = Mesh.from_ranks((512, 8), ("dp", "tp"), range(4096))
    loader = Mesh.from_ranks((3000,), ("dp",), range(3000))
    sizes = (4096, 11008, 32000, 50257)
    saved = LayoutSet(
        TensorLayout(f"w{i}", "float32", (sizes[i % 4] + i % 5, 4096), saver, (StridedShard(0, 8), Shard(0)))
        for i in range(300)
    )
    assert storing_ranks(saved.values()) == set(range(4096))
    wants = []
    for index, layout in enumerate(saved.values()):
        target = TensorLayout(layout.name, layout.dtype, layout.global_shape, loader, (Shard(0),))
        region = local_region(target, 1234)
        assert region is not None
        wants.append(Want(layout.name, region, index))
    plan = plan_read(saved, wants)  # raises unless every element is found
    assert plan.nbytes == sum(item.region.nelements * 4 for item in wants)
    assert len(plan.by_rank) < 100
    assert sum(len(pieces) for pieces in plan.by_rank.values()) < 300 * 8
