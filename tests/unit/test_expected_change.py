"""What the hooks expect to change from save to save, and the plan that follows from it."""

from __future__ import annotations

import torch
from torch import nn

from ckpt.format.segment import Change
from ckpt_trainer_hooks.snapshot import plan_snapshot
from tests.support.snapshot_trip import train_state


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    return model


def test_frozen_parameters_seldom_change_and_the_state_of_the_optimizer_always_does() -> None:
    model = _model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    leaves = train_state(model=model, optimizer=optimizer, extra={"noise": torch.zeros(2)}).flatten().leaves
    found = {leaf.placed.layout.name: leaf.change for leaf in leaves}
    assert found.pop("model.0.weight") is Change.SELDOM
    buffers = {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"}
    assert {found.pop(name) for name in buffers} == {Change.UNKNOWN}
    assert {"model.0.bias", "optimizer.0.bias.exp_avg", "extra.noise"} < found.keys()
    assert set(found.values()) == {Change.ALWAYS}


def test_a_plan_lasts_until_a_parameter_is_frozen_or_thawed() -> None:
    model = _model()
    state = train_state(model=model)
    plan = plan_snapshot(state.flatten().leaves, 0)
    assert plan.fits(state.flatten().leaves)
    assert plan.save.arrays[0].name == "model.0.weight"
    model[0].weight.requires_grad_(True)
    assert not plan.fits(state.flatten().leaves)
    thawed = plan_snapshot(state.flatten().leaves, 0)
    assert thawed.save.arrays[0].name != "model.0.weight"
    assert thawed.layout_digest == plan.layout_digest
