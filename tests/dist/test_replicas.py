"""Replicas share the writing: one copy in all, also of tensors that lie on a part of the mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.format.layout import Mesh
from ckpt.ops import catalog
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks.meshes import with_replicas
from tests.support.bits import bits_of
from tests.support.models import full_state
from tests.support.ranks import run_ranks
from tests.support.topologies import build_topology, step_on

EVERYONE = frozenset(range(8))
ROOT = Mesh.from_ranks((2, 2, 2), ("pp", "dp", "tp"), list(range(8)))


def test_slice_of_a_mesh_has_its_replicas_along_the_other_dims() -> None:
    tp = Mesh.from_ranks((2,), ("tp",), [4, 5])
    mesh, replicas = with_replicas(tp, ROOT, EVERYONE)
    assert (mesh.shape, mesh.names, replicas) == ((2, 2, 2), ("pp", "dp", "tp"), 2)
    assert mesh.ranks == tuple(range(8))


def test_pipeline_dim_leads_to_other_names_and_is_no_replica_dim() -> None:
    dp = Mesh.from_ranks((2,), ("dp",), [5, 7])
    mesh, replicas = with_replicas(dp, ROOT, frozenset({4, 5, 6, 7}))
    assert (mesh.shape, mesh.names, replicas) == ((2, 2), ("tp", "dp"), 1)
    assert mesh.ranks == (4, 6, 5, 7)


def test_every_rank_of_a_mesh_describes_it_in_the_same_way() -> None:
    slices = [Mesh.from_ranks((2,), ("dp",), [rank, rank + 2]) for rank in (0, 1, 4, 5)]
    assert len({with_replicas(mesh, ROOT, EVERYONE) for mesh in slices}) == 1


def test_flattened_dims_count_as_the_dims_they_are_made_of() -> None:
    flat = Mesh.from_ranks((4,), ("dp_tp",), [0, 1, 2, 3])
    mesh, replicas = with_replicas(flat, ROOT, EVERYONE)
    assert (mesh.shape, mesh.ranks, replicas) == ((2, 4), tuple(range(8)), 1)


@pytest.mark.parametrize("ranks", [[0], [0, 3], [0, 1, 2]])
def test_what_is_no_product_of_dims_is_left_alone(ranks: list[int]) -> None:
    own = Mesh.from_ranks((len(ranks),), ("x",), ranks)
    peers = frozenset(ranks)
    assert with_replicas(own, ROOT, peers) == (own, 0)


def _save(rank: int, world: int, root: Path, kind: str) -> tuple[int, int]:
    """Bytes of this rank's arrays, and of all tensors."""
    if kind == "large":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        model: nn.Module = nn.Sequential(*(nn.Linear(1000, 900) for _ in range(3)))
        fully_shard(model, mesh=mesh)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model, optimizer = build_topology(kind, rank, world)
        step_on(kind, world, model, optimizer, range(1))
    url = f"file://{root}/store/{kind}".replace("+", "-")
    with CheckpointManager(
        url, model=model, optimizer=optimizer, staging_dir=root / "staging", timeout_s=60
    ) as manager:
        manager.restore()
        manager.save(1)
    store = open_store(url)
    checkpoint = catalog.load_checkpoint(store, catalog.resolve(store, "1"))
    mine = sum(entry.nbytes for entry in checkpoint.segment_index(rank).tensors)
    store.close()
    assert full_state(model, optimizer)
    return mine, sum(layout.nbytes for layout in checkpoint.layouts.values())


KINDS = ("ddp+tp", "fsdp2+tp", "hsdp", "ddp", "large")


def _save_all(rank: int, world: int, root: Path) -> dict[str, tuple[int, int]]:
    return {kind: _save(rank, world, root, kind) for kind in KINDS}


def test_I52_all_ranks_together_write_one_copy(tmp_path: Path) -> None:
    per_rank = run_ranks(4, _save_all, tmp_path)
    for kind in KINDS:
        written = [outcome[kind][0] for outcome in per_rank]
        total = per_rank[0][kind][1]
        assert sum(written) == total, kind
        if kind == "large":  # small tensors go whole to one replica
            assert max(written) < 1.1 * total / 4


def _context_parallel(rank: int, world: int, root: Path) -> tuple[int, dict[str, bytes]]:
    """FSDP2 over dp; the ranks along cp have the same parameters and other parts of the sequence."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh["dp"])  # replicas over cp
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    url = f"file://{root}/store/cp"
    with CheckpointManager(
        url, model=model, optimizer=optimizer, staging_dir=root / "staging", timeout_s=60
    ) as manager:
        manager.restore()
        manager.save(1)
        expected = full_state(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        manager.restore(1)
        found = {name: bits_of(tensor) for name, tensor in full_state(model, optimizer).items()}
    assert found == {name: bits_of(tensor) for name, tensor in expected.items()}
    store = open_store(url)
    checkpoint = catalog.load_checkpoint(store, catalog.resolve(store, "1"))
    mine = sum(entry.nbytes for entry in checkpoint.segment_index(rank).tensors)
    store.close()
    return mine, found


def test_parameters_are_replicas_over_a_context_parallel_dim(tmp_path: Path) -> None:
    outcomes = run_ranks(4, _context_parallel, tmp_path)
    one_copy = sum(map(len, outcomes[0][1].values()))
    assert sum(mine for mine, _ in outcomes) == one_copy
