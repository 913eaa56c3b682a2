"""Any saved topology restores onto any other, bit by bit; training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import barrier, build, full_state, train
from tests.support.ranks import run_ranks

SAVED = {
    4: ("fsdp2", "fsdp2+tp", "hsdp", "ddp"),
    3: ("fsdp2", "ddp"),
    2: ("fsdp2", "tp", "ddp"),
    1: ("single",),
}
STEPS_BEFORE = 3


def _manager(root: Path, name: str, kind: str, world: int, **more: object):  # type: ignore[no-untyped-def]
    model, optimizer = build(kind, world)
    manager = CheckpointManager(
        f"file://{root}/store/{name}",
        model=model,
        optimizer=optimizer,
        staging_dir=root / f"staging-{world}",
        timeout_s=60,
        **more,  # type: ignore[arg-type]
    )
    return manager, model, optimizer


def _name(kind: str, world: int) -> str:
    return f"{kind}-{world}".replace("+", "-")


def _save_all(rank: int, world: int, root: Path) -> None:
    for kind in SAVED[world]:
        name = _name(kind, world)
        manager, model, optimizer = _manager(root, name, kind, world)
        with manager:
            manager.restore()
            list(train(model, optimizer, range(STEPS_BEFORE)))
            manager.save(STEPS_BEFORE)
            state = full_state(model, optimizer)
            if rank == 0:
                torch.save(state, root / f"{name}.pt")
        barrier()


def _restore_all(rank: int, world: int, root: Path, names: list[str]) -> dict[str, dict[str, list[float]]]:
    losses: dict[str, dict[str, list[float]]] = {}
    for name in names:
        expected = torch.load(root / f"{name}.pt")
        for kind in SAVED[world]:
            manager, model, optimizer = _manager(root, name, kind, world)
            with manager:
                assert manager.restore(STEPS_BEFORE) == STEPS_BEFORE
                state = full_state(model, optimizer)
            assert_same_bits(state, expected)
            found = list(train(model, optimizer, range(STEPS_BEFORE, STEPS_BEFORE + 5)))
            losses.setdefault(name, {})[f"{kind}-{world}"] = found
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("topologies")
    for world in SAVED:
        run_ranks(world, _save_all, root)
    return root, [_name(kind, world) for world, kinds in SAVED.items() for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("world", list(SAVED))
def test_every_topology_restores_onto_every_other_bit_by_bit(
    saved: tuple[Path, list[str]], world: int
) -> None:
    root, names = saved
    per_rank = run_ranks(world, _restore_all, root, names, timeout_s=170)
    for name, kinds in per_rank[0].items():
        reference = next(iter(kinds.values()))
        for kind, losses in kinds.items():
            assert losses == pytest.approx(reference, rel=1e-5), (name, kind)
