"""Every saved topology restores onto every other one bit by bit, parameters and optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import barrier, full_state
from tests.support.ranks import run_ranks
from tests.support.topologies import LAYOUTS, Topology, build_topology, label, step_on, trains

TOPOLOGIES: list[Topology] = [(kind, world) for world, kinds in LAYOUTS.items() for kind in kinds]
STEPS_BEFORE = 2
CONTINUED = ("ddp-x3", "fsdp2-x4", "pp-x2")  # I49

State = dict[str, torch.Tensor]


def _manager(root: Path, kind: str, rank: int, world: int, seed: int) -> tuple[Any, nn.Module, Any]:
    """A manager over the one run that all topologies save to: the step says which topology it was."""
    model, optimizer = build_topology(kind, rank, world, seed=seed)
    manager = CheckpointManager(
        f"file://{root}/store/run",
        model=model,
        optimizer=optimizer,
        staging_dir=root / f"staging-{world}",
        timeout_s=100,
    )
    return manager, model, optimizer


def _number(kind: str, world: int) -> int:
    return TOPOLOGIES.index((kind, world)) + 1


def _save_all(rank: int, world: int, root: Path) -> None:
    for kind in LAYOUTS[world]:
        number = _number(kind, world)
        manager, model, optimizer = _manager(root, kind, rank, world, seed=number)
        with manager:
            manager.restore(start_over=True)
            step_on(kind, world, model, optimizer, range(STEPS_BEFORE))
            manager.save(number)
            state = full_state(model, optimizer)
            if rank == 0 or kind == "pp":
                torch.save(state, root / f"{number}-{rank}.pt")
        barrier()


def _expected(root: Path, number: int) -> State:
    found: State = {}
    for path in root.glob(f"{number}-*.pt"):
        found |= torch.load(path)
    return found


def _restore_all(rank: int, world: int, root: Path) -> dict[str, tuple[set[str], dict[str, list[float]]]]:
    """For each layout: names that were compared, and the losses after the restore."""
    outcomes = {}
    for kind in LAYOUTS[world]:
        manager, model, optimizer = _manager(root, kind, rank, world, seed=99)
        names: set[str] = set()
        losses: dict[str, list[float]] = {}
        with manager:
            for saved in TOPOLOGIES:
                number = _number(*saved)
                assert manager.restore(number) == number
                found, expected = full_state(model, optimizer), _expected(root, number)
                here = expected if kind != "pp" else {name: expected[name] for name in found}
                assert_same_bits(found, here)
                names |= found.keys()
                if label(*saved) in CONTINUED and trains(kind, world):
                    losses[label(*saved)] = step_on(
                        kind, world, model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + 2)
                    )
        outcomes[kind] = names, losses
    barrier()  # rank 0 has the store that the others may still read
    return outcomes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    for world in LAYOUTS:
        run_ranks(world, _save_all, root)
    return root


@pytest.mark.slow
def test_I42_I44_I47_I49_I54_every_topology_restores_onto_every_other_bit_by_bit(saved: Path) -> None:
    assert len(TOPOLOGIES) >= 12
    names = _expected(saved, 1).keys()
    losses: dict[str, dict[str, list[float]]] = {}
    for world, kinds in LAYOUTS.items():
        per_rank = run_ranks(world, _restore_all, saved)
        for kind in kinds:
            compared: set[str] = set().union(*(outcome[kind][0] for outcome in per_rank))
            assert compared == names, (kind, world)
            for origin, found in per_rank[0][kind][1].items():
                losses.setdefault(origin, {})[label(kind, world)] = found
    assert losses.keys() == set(CONTINUED)
    for origin, by_layout in losses.items():
        for onto, found in by_layout.items():
            # bfloat16 arithmetic after an exact restore is not that of float32.
            close = 0.02 if "mixed" in onto else 1e-4
            assert found == pytest.approx(by_layout["single-x1"], rel=close), (origin, onto)
