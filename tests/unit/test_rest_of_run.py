"""Loss scaling, averaged weights and schedules go on where they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.bits import assert_same_bits
from tests.support.models import OddNet, train
from tests.support.snapshot_trip import put_back, take, train_state


def _scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def _scaled_steps(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, count: int) -> None:
    for number in range(count):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 3), 0.5 + number)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_scaler_goes_on_where_it_was() -> None:
    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters()), _scaler(init_scale=8.0, growth_interval=3)

    model, optimizer, scaler = built(0)
    _scaled_steps(model, optimizer, scaler, 5)
    taken = take(train_state(model=model, optimizer=optimizer, scaler=scaler))
    for stepped in (0, 2):
        other, fresh, live = built(1)
        _scaled_steps(other, fresh, live, stepped)
        put_back(taken, train_state(model=other, optimizer=fresh, scaler=live))
        assert live.state_dict() == {
            "scale": 16.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 2,
        }
        _scaled_steps(other, fresh, live, 1)
        assert live.get_scale() == 32.0


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("live", [True, False])
def test_scaler_that_was_or_is_disabled_does_not_stop_the_restore(
    saved: bool, live: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    taken = take(train_state(model=model, scaler=_scaler(enabled=saved, init_scale=4.0)))
    scaler = _scaler(enabled=live, init_scale=64.0)
    put_back(taken, train_state(model=model, scaler=scaler))

    assert scaler.get_scale() == (1.0 if not live else 4.0 if saved else 64.0)
    assert ("restore.state_not_used" in caplog.text) is (saved is not live)


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("ema", [True, False])
def test_averaged_model_comes_back_with_its_count_under_its_own_names(use_buffers: bool, ema: bool) -> None:
    def built(seed: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = OddNet()
        average = torch.optim.swa_utils.AveragedModel(
            model,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9) if ema else None,
            use_buffers=use_buffers,
        )
        return model, average, torch.optim.SGD(model.parameters(), lr=0.1)

    def run(live: tuple[nn.Module, Any, torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            list(train(live[0], live[2], range(step, step + 1)))
            live[1].update_parameters(live[0])

    saved = built(0)
    run(saved, range(3))
    taken = take(train_state(model=saved[0], ema=saved[1], optimizer=saved[2]))
    assert {"ema.n_averaged", "ema.module.up.weight"} <= set(taken.layouts)
    live = built(1)
    put_back(taken, train_state(model=live[0], ema=live[1], optimizer=live[2]))
    assert live[1].n_averaged == 3

    run(saved, range(3, 6))
    run(live, range(3, 6))
    assert_same_bits(live[1].state_dict(), saved[1].state_dict())
    assert_same_bits(live[0].state_dict(), saved[0].state_dict())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1, factor=0.5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            lr_scheduler.ExponentialLR(o, 0.9),
            lr_scheduler.CosineAnnealingLR(o, 5),
        ],
        milestones=[2, 5],
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("save_at", [0, 1, 4])
def test_schedule_goes_on_where_it_was(kind: str, save_at: int) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[tuple[float, float]]:
        seen = []
        for step in steps:
            optimizer.step()
            scheduler.step(*((1.0 + step % 3,) if kind == "plateau" else ()))
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return seen

    model, optimizer, scheduler = built()
    run(optimizer, scheduler, range(save_at))
    taken = take(train_state(model=model, optimizer=optimizer, lr_scheduler=scheduler))
    expected = run(optimizer, scheduler, range(save_at, save_at + 9))

    for stepped in (0, 3):
        other, fresh, live = built()
        run(fresh, live, range(stepped))
        put_back(taken, train_state(model=other, optimizer=fresh, lr_scheduler=live))
        assert run(fresh, live, range(save_at, save_at + 9)) == expected
