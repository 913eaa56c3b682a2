from __future__ import annotations

import pytest

from ckpt.errors import InvalidInputError
from ckpt.format.layout import LayoutSet, Mesh, Replicate, Shard, TensorLayout
from ckpt.format.segment import DATA_ALIGN, read_safetensors_header
from ckpt.geometry import Region, Run
from ckpt.plan.save import plan_save

MESH = Mesh.from_ranks((4,), ("dp",), range(4))


def layout(name: str, dtype: str, shape: tuple[int, ...], placement: Shard | Replicate) -> TensorLayout:
    return TensorLayout(name, dtype, shape, MESH, (placement,))


STATE = LayoutSet(
    [
        layout("a", "bfloat16", (9, 4), Shard(0)),
        layout("b", "float32", (2, 4), Shard(0)),
        layout("freqs", "complex64", (8,), Shard(0)),
        layout("norm", "float32", (16,), Replicate()),
        layout("step", "int64", (), Replicate()),
        layout("wide", "float32", (1 << 10, 1 << 10), Replicate()),
    ]
)


def test_the_plan_lists_this_ranks_share_in_file_order() -> None:
    plan = plan_save(STATE.values(), 1)
    assert [(item.name, item.shape) for item in plan.arrays if item.name not in {"norm", "step"}] == [
        ("freqs", (2,)),
        ("b", (1, 4)),
        ("wide", (256, 1024)),
        ("a", (3, 4)),
    ]
    by_name = {item.name: item for item in plan.arrays}
    assert by_name["a"].region == Region(((Run(3, 3),), (Run(0, 4),)))
    assert by_name["a"].local_slices() == (slice(0, 3), slice(0, 4))
    assert by_name["wide"].local_slices() == (slice(256, 512), slice(0, 1024))


def test_arrays_follow_the_header_without_a_gap() -> None:
    plan = plan_save(STATE.values(), 2)
    position = len(plan.header)
    assert position % DATA_ALIGN == 0
    for item in plan.arrays:
        assert item.start == position
        position += item.nbytes
    assert position == plan.nbytes


def test_header_and_index_entries_agree() -> None:
    plan = plan_save(STATE.values(), 0)
    placed = read_safetensors_header(plan.header, nbytes=plan.nbytes, where="plan")
    entries = plan.tensor_entries()
    assert [(e.name, e.start, e.nbytes) for e in entries] == [
        (p.head.name, p.start, p.nbytes) for p in placed
    ]
    assert {e.name: e.dtype for e in entries}["freqs"] == "complex64"
    assert {e.name: tuple(e.shape) for e in entries}["freqs"] == (2,)


def test_replicated_small_tensors_are_stored_by_one_rank() -> None:
    plans = [plan_save(STATE.values(), rank) for rank in range(4)]
    for name in ("norm", "step"):
        assert sum(item.name == name for plan in plans for item in plan.arrays) == 1


def test_the_plans_of_all_ranks_hold_all_bytes_once() -> None:
    plans = [plan_save(STATE.values(), rank) for rank in range(4)]
    stored = sum(item.nbytes for plan in plans for item in plan.arrays)
    assert stored == sum(item.nbytes for item in STATE.values())


def test_a_rank_without_a_share_writes_a_segment_without_tensors() -> None:
    plan = plan_save(STATE.values(), 9)
    assert plan.arrays == ()
    assert plan.nbytes == len(plan.header) == DATA_ALIGN
    assert plan.tensor_entries() == []


def test_empty_shares_are_left_out() -> None:
    plan = plan_save(STATE.values(), 3)
    assert {"a", "b"}.isdisjoint(item.name for item in plan.arrays)


def test_equal_states_give_equal_plans() -> None:
    assert plan_save(STATE.values(), 1) == plan_save(reversed(list(STATE.values())), 1)


def test_a_name_that_safetensors_reserves_is_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        plan_save([layout("__metadata__", "int8", (4,), Shard(0))], 0)
    assert caught.value.code == "segment"
