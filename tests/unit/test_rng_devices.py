"""The stream of a device: of the current one, whatever its kind; a device that is gone is named."""

from __future__ import annotations

import types

import pytest
import torch

from ckpt_trainer_hooks.rng import capture_rng, restore_rng


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """An accelerator of torch's reserved kind, whose stream is a generator on the CPU."""
    generator = torch.Generator().manual_seed(4)
    module = types.SimpleNamespace(
        get_rng_state=generator.get_state, set_rng_state=generator.set_state, is_initialized=lambda: True
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("privateuseone"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return generator


def test_stream_of_any_device_goes_on(device: torch.Generator) -> None:
    state = capture_rng()
    expected = torch.rand(5, generator=device)
    device.manual_seed(9)
    restore_rng(state)
    assert torch.equal(torch.rand(5, generator=device), expected)


def test_device_that_is_not_here_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state = {**capture_rng(), "privateuseone": b""}
    restore_rng(state)
    assert "restore.rng_of_absent_device" in caplog.text
    assert "privateuseone" in caplog.text
