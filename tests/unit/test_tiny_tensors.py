"""20,000 tiny tensors: what a save costs the training thread grows by microseconds per tensor."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from benchmarks.tiny import STEPS, TinySaves
from ckpt_trainer_hooks.collector import collector_paused
from tests.support.bits import assert_same_bits
from tests.support.snapshot_trip import put_back, take, train_state

COUNT = 20_000


def test_first_save_takes_less_than_a_second_and_later_ones_less_than_a_tenth_of_a_millisecond_each() -> None:
    saves = TinySaves(COUNT)
    first = []
    for _ in range(3):
        saves.forget()
        first.append(saves.save())
    later = [saves.save() for _ in range(3)]
    assert min(first) < 1.0, saves.seconds
    assert min(later) < COUNT * 1e-4 / 4, saves.seconds  # a quarter of the bound, for slow machines' sake
    assert set(saves.seconds[0]) == set(STEPS)


def test_later_saves_do_not_plan_again() -> None:
    saves = TinySaves(2000)
    saves.save()
    plan = saves._plan
    saves.save()
    assert saves._plan is plan


def test_very_many_tensors_come_back_by_bits() -> None:
    def model(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        module = nn.Module()
        for number in range(2000):
            module.register_buffer(f"b{number}", torch.randn(number % 4, generator=generator))
        return module

    source, live = model(0), model(1)
    put_back(take(train_state(model=source)), train_state(model=live))
    assert_same_bits(dict(live.named_buffers()), dict(source.named_buffers()))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
            with collector_paused():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError), collector_paused():
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
