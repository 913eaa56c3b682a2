"""On the same layout a resumed run is bitwise the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.models import build, full_state, train
from tests.support.ranks import run_ranks

SAVED_AT, MORE = 4, 20


def _run_and_resume(rank: int, world: int, root: Path, kind: str, mode: str) -> None:
    url = f"file://{root}/store/{kind}-{mode}".replace("+", "-")
    common = {"staging_dir": root / "staging", "mode": mode, "timeout_s": 60}
    model, optimizer = build(kind, world, dropout=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SAVED_AT + MORE)
    # Data-parallel ranks have streams of their own; tensor-parallel ranks must drop the same elements.
    stream = {"tp": 0, "fsdp2+tp": rank // 2}.get(kind, rank)
    torch.manual_seed(100 + stream)
    with CheckpointManager(url, model=model, optimizer=optimizer, lr_scheduler=schedule, **common) as manager:
        assert manager.restore() == 0
        losses = []
        for step in range(SAVED_AT + MORE):
            losses += train(model, optimizer, range(step, step + 1))
            schedule.step()
            if step + 1 == SAVED_AT:
                manager.save(SAVED_AT)
        expected = full_state(model, optimizer)
    model, optimizer = build(kind, world, dropout=0.3, seed=7)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SAVED_AT + MORE)
    with CheckpointManager(url, model=model, optimizer=optimizer, lr_scheduler=schedule, **common) as manager:
        assert manager.restore() == SAVED_AT
        resumed = []
        for step in range(SAVED_AT, SAVED_AT + MORE):
            resumed += train(model, optimizer, range(step, step + 1))
            schedule.step()
        found = full_state(model, optimizer)
    assert resumed == losses[SAVED_AT:]
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("world", "kind", "mode"),
    [
        (2, "fsdp2", "overlapped"),
        (2, "fsdp2", "blocking"),
        (2, "tp", "overlapped"),
        (2, "ddp", "overlapped"),
        (4, "fsdp2+tp", "overlapped"),
        (4, "hsdp", "blocking"),
        (1, "single", "overlapped"),
    ],
)
def test_resumed_run_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, world: int, kind: str, mode: str
) -> None:
    run_ranks(world, _run_and_resume, tmp_path, kind, mode)
