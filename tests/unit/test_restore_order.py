"""The order in which a restore puts things back, and that nothing is passed over (I26, I27, I31)."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError
from tests.support.bits import bits_of
from tests.support.snapshot_trip import put_back, take, train_state


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    """Notes what the optimizer's groups held when its own state was loaded, and whether it was stepped."""

    seen: list[float]
    stepped: ClassVar[list[int]] = []  # not of the instance, whose attributes are its state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = [group["weight_decay"] for group in self.optimizer.param_groups]
        super().load_state_dict(state_dict)

    def step(self, epoch: int | None = None) -> None:
        self.stepped.append(id(self))
        super().step(epoch)


def _live(weight_decay: float) -> tuple[nn.Linear, torch.optim.Optimizer, Scheduler]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=weight_decay)
    return model, optimizer, Scheduler(optimizer, lambda step: 1 / (1 + step))


def test_I26_optimizers_are_restored_before_schedulers_whatever_the_order_of_registration() -> None:
    model, optimizer, scheduler = _live(0.5)
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        scheduler.step()
    taken = take(train_state(model=model, optimizer=optimizer, lr_scheduler=scheduler))

    other, fresh, later = _live(0.125)
    before = later.stepped.count(id(later))
    put_back(taken, train_state(lr_scheduler=later, optimizer=fresh, model=other))
    assert later.seen == [0.5]  # the optimizer was in place
    assert later.stepped.count(id(later)) == before  # and nothing of the user's was stepped
    assert [dict(g, params=None) for g in fresh.param_groups] == [
        dict(g, params=None) for g in optimizer.param_groups
    ]
    assert later.last_epoch == 3


def test_I27_what_was_saved_and_not_asked_for_and_the_reverse_are_both_named() -> None:
    model, optimizer, scheduler = _live(0.5)
    taken = take(train_state(model=model, optimizer=optimizer, lr_scheduler=scheduler))
    other, fresh, _ = _live(0.5)
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(model=other, optimizer=fresh, progress={"tokens": 0}))
    assert "lr_scheduler" in str(caught.value.context["unexpected"])
    assert "progress" in str(caught.value.context["missing"])


class WorkingCopy:
    """A bf16 copy of a model that has to follow it: refreshed when its own state is loaded."""

    def __init__(self, model: nn.Linear) -> None:
        self._model = model
        self.refresh()

    def refresh(self) -> None:
        self.weight = self._model.weight.detach().to(torch.bfloat16)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refresh()


def test_I31_stateful_objects_are_loaded_when_every_tensor_is_in_so_derived_copies_can_follow() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    taken = take(train_state(model=model, copy=WorkingCopy(model)))
    other = nn.Linear(3, 2)
    working = WorkingCopy(other)
    put_back(taken, train_state(copy=working, model=other))
    assert bits_of(working.weight) == bits_of(model.weight.detach().to(torch.bfloat16))
