"""Jagged shards: saved in one cut, restored in another, on other numbers of ranks; gaps are named (I45,
I46)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import CheckpointManager, ExplicitShards
from tests.support.models import barrier
from tests.support.ranks import run_ranks

ROWS = {1: [[(0, 11)]], 2: [[(0, 1), (6, 11)], [(1, 6)]], 3: [[(0, 4)], [], [(4, 5), (5, 11)]]}


def _full() -> torch.Tensor:
    return torch.arange(33, dtype=torch.float64).reshape(11, 3) / 7


def _shards(rank: int, world: int, *, filled: bool) -> ExplicitShards:
    pieces = []
    for start, stop in ROWS[world][rank]:
        part = _full()[start:stop].clone()
        pieces.append(((start, 0), part if filled else torch.zeros_like(part)))
    return ExplicitShards((11, 3), pieces, dtype=torch.float64)


def _manager(root: Path, shards: ExplicitShards, node: str) -> CheckpointManager:
    return CheckpointManager(
        f"file://{root}/store/run", model=nn.Linear(2, 2), state={"table": shards}, staging_dir=root / node
    )


def _save(rank: int, world: int, root: Path) -> None:
    with _manager(root, _shards(rank, world, filled=True), "save") as manager:
        manager.restore()
        manager.save(1)


def _restore(rank: int, world: int, root: Path) -> None:
    shards = _shards(rank, world, filled=False)
    with _manager(root, shards, f"restore-{world}") as manager:
        assert manager.restore(1) == 1
        barrier()
    for box, tensor in shards.pieces:
        assert torch.equal(tensor, _full()[box.slices()])


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_pieces_restore_onto_any_other_cut(tmp_path: Path, saved: int) -> None:
    """Case I45."""
    run_ranks(saved, _save, tmp_path)
    for world in ROWS:
        run_ranks(world, _restore, tmp_path)


def test_elements_that_nobody_saved_are_named_before_anything_changes(tmp_path: Path) -> None:
    part = ExplicitShards((11, 3), [((2, 0), _full()[2:7].clone())])
    with _manager(tmp_path, part, "a") as manager:
        manager.restore()
        manager.save(1)
    whole = _shards(0, 1, filled=False)
    with _manager(tmp_path, whole, "b") as manager, pytest.raises(InvalidInputError) as caught:
        manager.restore(1)
    assert "no saved piece has the [2, 3] elements at [0, 0]" in str(caught.value)
    assert not whole.pieces[0][1].any()


@pytest.mark.parametrize(
    "pieces",
    [
        [((8, 0), torch.zeros(4, 3))],
        [((0, 0), torch.zeros(4, 3)), ((3, 0), torch.zeros(2, 3))],
        [((0, 0), torch.zeros(4, 3)), ((5, 0), torch.zeros(2, 3, dtype=torch.float16))],
        [((0,), torch.zeros(4))],
    ],
    ids=["beyond", "overlapping", "other-dtype", "other-ndim"],
)
def test_pieces_that_cannot_be_right_are_refused(pieces: list[tuple[tuple[int, ...], torch.Tensor]]) -> None:
    with pytest.raises(InvalidInputError):
        ExplicitShards((11, 3), pieces)
