"""Very many tiny tensors: what a save does grows in proportion to them, and later saves do little."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.tiny import STEPS, TinySaves
from ckpt.collector import collector_paused, heap_set_aside
from tests.support.bits import assert_same_bits
from tests.support.snapshot_trip import put_back, take, train_state

SMALL = 500


def calls_of(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, built-in ones included: a cost that no other process changes."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_what_a_save_does_grows_in_proportion_to_the_tensors() -> None:
    """Case I115."""
    first, later = [], []
    for count in (SMALL, 4 * SMALL):
        saves = TinySaves(count)
        saves.save()  # imports, caches
        saves.forget()
        first.append(calls_of(saves.save))
        later.append(calls_of(saves.save))
        assert set(saves.seconds[0]) == set(STEPS)
    for small, large in (first, later):
        assert large <= 4 * small
    print(f"calls per tensor: first {first[1] / SMALL / 4:.1f}, later {later[1] / SMALL / 4:.1f}")
    assert first[1] <= 150 * 4 * SMALL
    assert later[1] <= 60 * 4 * SMALL


def test_later_saves_do_not_plan_again() -> None:
    """Case I115."""
    saves = TinySaves(2000)
    saves.save()
    plan = saves._plan
    saves.save()
    assert saves._plan is plan


def test_very_many_tensors_come_back_by_bits() -> None:
    """Case I64."""

    def model(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        module = nn.Module()
        for number in range(2000):
            module.register_buffer(f"b{number}", torch.randn(number % 4, generator=generator))
        return module

    source, live = model(0), model(1)
    put_back(take(train_state(model=source)), train_state(model=live))
    assert_same_bits(dict(live.named_buffers()), dict(source.named_buffers()))


def test_heap_that_is_set_aside_is_not_looked_at_and_comes_back() -> None:
    class Node:
        pass

    old, new = Node(), Node()
    old.itself, new.itself = old, new  # type: ignore[attr-defined]
    gone_old, gone_new = weakref.ref(old), weakref.ref(new)
    del new
    gc.collect()
    assert gone_new() is None  # what is collected outside
    with heap_set_aside():
        del old
        new = Node()
        new.itself = new  # type: ignore[attr-defined]
        gone_new = weakref.ref(new)
        del new
        with heap_set_aside():
            gc.collect()
        assert gone_new() is None
        assert gone_old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone_old() is None


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
