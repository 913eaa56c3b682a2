"""Sizes that nothing divides, empty shards, one tensor dim over two mesh dims: onto any other layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import bits_of
from tests.support.models import barrier
from tests.support.ranks import run_ranks

# I42: rows over 4; I44, I54: two mesh dims; I47: parameters with one row.
SHAPES = [
    *((rows, 2) for rows in (0, 1, 2, 3, 5, 6, 7)),
    (5, 3),
    (7, 1),
    (1, 7),
    (3, 17),
    (1, 5),
    (7,),
    (1, 4, 3),
]
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()

# World size: mesh shape and placements; the last dim of a one-dimensional tensor is its first.
Layout = tuple[tuple[int, ...], tuple[Shard | Replicate, ...]]
LAYOUTS: dict[int, list[Layout]] = {
    1: [],  # plain tensors
    2: [((2,), (ROWS,)), ((2,), (COLUMNS,))],
    3: [((3,), (ROWS,))],
    4: [
        ((4,), (ROWS,)),
        ((2, 2), (ROWS, ROWS)),
        ((2, 2), (ROWS, COLUMNS)),
        ((2, 2), (COLUMNS, ROWS)),
    ],
    5: [((5,), (ROWS,))],
    6: [((2, 3), (ROWS, ROWS)), ((3, 2), (ROWS, ROWS))],
    8: [((8,), (ROWS,))],
}
NUMBERED = [(world, number) for world, found in LAYOUTS.items() for number in range(max(1, len(found)))]


def _full(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Uneven(nn.Module):
    """One parameter per shape, laid out as asked for; a seed for its values."""

    def __init__(self, world: int, number: int, seed: int) -> None:
        super().__init__()
        self._layout = LAYOUTS[world][number] if world > 1 else None
        self._mesh = init_device_mesh("cpu", self._layout[0]) if self._layout else None
        self.parts = nn.ParameterList(nn.Parameter(part) for part in self.laid_out(seed))

    def laid_out(self, seed: int) -> list[torch.Tensor]:
        """The values of a seed, as torch lays them out."""
        made = [_full(shape, seed) for shape in SHAPES]
        if self._layout is None:
            return made
        return [self._distribute(part, self._layout[1]) for part in made]

    def _distribute(self, part: torch.Tensor, placements: tuple[Shard | Replicate, ...]) -> torch.Tensor:
        here = [Shard(0) if p == COLUMNS and part.ndim == 1 else p for p in placements]
        # Every rank has the whole; none sends it.
        return distribute_tensor(part, self._mesh, here, src_data_rank=None)

    def bits(self) -> list[bytes]:
        return [_local_bits(part.detach()) for part in self.parts]


def _local_bits(tensor: torch.Tensor) -> bytes:
    return bits_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _manager(root: Path, model: nn.Module, world: int) -> CheckpointManager:
    """Over the one run of all layouts: the step says which of them it was."""
    return CheckpointManager(
        f"file://{root}/store/run", model=model, staging_dir=root / f"staging-{world}", timeout_s=60
    )


def _save(rank: int, world: int, root: Path) -> None:
    for step, (_, number) in ((s, n) for s, n in enumerate(NUMBERED, 1) if n[0] == world):
        with _manager(root, Uneven(world, number, step), world) as manager:
            manager.restore(start_over=True)
            manager.save(step)
        barrier()


def _restore(rank: int, world: int, root: Path) -> int:
    compared = 0
    for number in range(max(1, len(LAYOUTS[world]))):
        model = Uneven(world, number, seed=99)
        with _manager(root, model, world) as manager:
            for step in range(1, len(NUMBERED) + 1):
                assert manager.restore(step) == step
                assert model.bits() == [_local_bits(part) for part in model.laid_out(step)], (number, step)
                compared += 1
    barrier()  # rank 0 has the store that the others may still read
    return compared


def test_I42_I44_I47_I54_uneven_and_empty_shards_restore_onto_any_other_layout(tmp_path: Path) -> None:
    for world in LAYOUTS:
        run_ranks(world, _save, tmp_path)
    pairs = sum(run_ranks(world, _restore, tmp_path)[0] for world in LAYOUTS)
    assert pairs == len(NUMBERED) ** 2
