"""The self-test of saves: finds what the checksums of chunks cannot, and costs nothing where it is off."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.digest import digest
from ckpt.errors import CorruptError
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks.selftest import digest_of
from tests.support.bits import bits_of
from tests.support.runs import Live, Place

WAIT_S = 30.0


def passed(caplog: pytest.LogCaptureFixture) -> int:
    return sum("selftest.passed" in record.getMessage() for record in caplog.records)


def damage(manager: CheckpointManager, name: str) -> None:
    """Flip a bit of the copy of a tensor in the arena, as bad memory would, before the flusher reads it."""
    pipeline = manager._pipeline
    assert pipeline._binding is not None
    array = next(array for array in pipeline._binding.plan.save.arrays if array.name == name)
    pipeline._binding.arena.view[array.start + array.nbytes - 1] ^= 1


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_R11_every_save_is_read_back_and_compared(
    place: Place, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    live = Live.new()
    live.model.register_buffer("brain", torch.randn(5, 4).to(torch.bfloat16).t())
    live.model.register_buffer("wave", torch.randn(3, dtype=torch.complex64).conj())
    live.model.register_buffer("none", torch.zeros(0, 2))
    with caplog.at_level(logging.INFO, "ckpt"), place.started(live, mode=mode, selftest=True) as manager:
        for step in (1, 2):
            live.train(range(step - 1, step))
            manager.save(step)
    assert passed(caplog) == 2


@pytest.mark.parametrize("mode", ["blocking", "overlapped"])
def test_R11_a_copy_that_went_wrong_is_an_error_that_names_the_tensor(place: Place, mode: Any) -> None:
    live = Live.new()
    manager = place.started(live, mode=mode, selftest=True)
    with manager:
        live.train(range(1))
        flusher = manager._pipeline._flusher.pid
        os.kill(flusher, signal.SIGSTOP)
        try:
            handle = manager.save(1)
            handle.staging_completion.result(WAIT_S)
            damage(manager, "model.up.weight")
        finally:
            os.kill(flusher, signal.SIGCONT)
        with pytest.raises(CorruptError, match="self-test failed") as raised:
            handle.local_completion.result(WAIT_S)
        assert raised.value.code == "selftest"
        assert raised.value.context["tensor"] == "model.up.weight"
        assert raised.value.context["step"] == 1
        with pytest.raises(CorruptError):  # also for those who keep no handle
            manager.wait_until_finished(WAIT_S)
        live.train(range(1, 2))
        manager.save(2).local_completion.result(WAIT_S)


def test_without_it_nobody_would_know(place: Place) -> None:
    live = Live.new()
    with place.started(live, mode="blocking") as manager:
        live.train(range(1))
        flusher = manager._pipeline._flusher.pid
        os.kill(flusher, signal.SIGSTOP)
        try:
            handle = manager.save(1)
            damage(manager, "model.up.weight")
        finally:
            os.kill(flusher, signal.SIGCONT)
        handle.upload_completion.result(WAIT_S)


def test_the_environment_switches_it_on(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live.new()
    for value, expected in (("0", 0), ("1", 1)):
        monkeypatch.setenv("CKPT_SELFTEST", value)
        caplog.clear()
        with caplog.at_level(logging.INFO, "ckpt"), place.manager(live) as manager:
            step = manager.restore()
            live.train(range(step, step + 1))
            manager.save(step + 1)
        assert passed(caplog) == expected


def test_a_save_whose_check_was_not_made_is_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    live = Live.new()
    manager = place.started(live, mode="blocking", selftest=True)
    live.train(range(1))
    flusher = manager._pipeline._flusher.pid
    os.kill(flusher, signal.SIGSTOP)
    try:
        manager.save(1)
        with caplog.at_level(logging.WARNING, "ckpt"):
            manager.close()
    finally:
        os.kill(flusher, signal.SIGCONT)
    assert "selftest.not_checked" in caplog.text


def test_digest_is_of_the_elements_in_row_major_order() -> None:
    tensor = torch.randn(4, 6)
    for view in (
        tensor.t(),
        tensor[:, ::2],
        tensor[1],
        tensor[0, 0],
        tensor[:0],
        torch.view_as_complex(tensor.view(4, 3, 2)).conj(),
        nn.Parameter(tensor),
    ):
        assert digest_of(view) == digest(bits_of(view.detach().resolve_conj()))
