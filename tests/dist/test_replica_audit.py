"""Replicas that differ keep a step from being committed, and are named (case I46)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt.errors import CkptError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.models import build, train
from tests.support.ranks import run_ranks


def _save_with_a_flipped_bit(rank: int, world: int, root: Path, kind: str, victim: int, mode: str) -> str:
    model, optimizer = build(kind, world)
    inner = model.module if kind == "ddp" else model
    url = f"file://{root}/store/run"
    manager = CheckpointManager(
        url, model=model, optimizer=optimizer, staging_dir=root / "staging", mode=mode, audit_every=1
    )
    try:
        manager.restore()
        list(train(model, optimizer, range(2)))
        if rank == victim:
            with torch.no_grad():
                bits = inner.norm.weight.view(torch.int32)
                bits[3] ^= 1  # the lowest mantissa bit of one element
        handle = manager.save(2)
        try:
            handle.upload_completion.result(60)
        except CkptError as error:
            return f"{error.code} {error.context.get('tensor')} {error.context.get('ranks')}"
        return "committed"
    finally:
        dist.barrier()
        manager.close()


@pytest.mark.parametrize("mode", ["overlapped", "blocking"])
@pytest.mark.parametrize(("world", "kind", "victim"), [(3, "ddp", 0), (3, "ddp", 2), (2, "tp", 1)])
def test_I46_a_flipped_bit_in_one_replica_is_found_before_the_commit(
    tmp_path: Path, world: int, kind: str, victim: int, mode: str
) -> None:
    told = run_ranks(world, _save_with_a_flipped_bit, tmp_path, kind, victim, mode)
    named = [victim] if world > 2 else [0, 1]
    assert set(told) == {f"replicas-differ model.norm.weight {named}"}


def test_equal_replicas_are_committed(tmp_path: Path) -> None:
    assert set(run_ranks(3, _save_with_a_flipped_bit, tmp_path, "ddp", -1, "overlapped")) == {"committed"}


class Meter:
    """A stateful object with a tensor that the ranks never reduced."""

    def __init__(self, rank: int) -> None:
        self.total = torch.tensor([1.0, float(rank)])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


def _save_a_meter(rank: int, world: int, root: Path, per_rank: tuple[str, ...]) -> str:
    model, optimizer = build("ddp", world)
    manager = CheckpointManager(
        f"file://{root}/store/run",
        model=model,
        optimizer=optimizer,
        state={"meter": Meter(rank)},
        per_rank=per_rank,
        staging_dir=root / "staging",
    )
    try:
        manager.restore()
        handle = manager.save(1)
        try:
            handle.upload_completion.result(60)
        except CkptError as error:
            return f"{error.code} {error.context.get('tensor')}"
        return "committed"
    finally:
        dist.barrier()
        manager.close()


def test_I46_a_tensor_in_plain_state_that_differs_from_rank_to_rank_is_found(tmp_path: Path) -> None:
    assert set(run_ranks(3, _save_a_meter, tmp_path, ())) == {"replicas-differ meter.total"}


def test_I46_declared_per_rank_it_is_kept_for_each_rank(tmp_path: Path) -> None:
    assert set(run_ranks(3, _save_a_meter, tmp_path, ("meter",))) == {"committed"}
