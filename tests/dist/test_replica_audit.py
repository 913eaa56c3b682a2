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
