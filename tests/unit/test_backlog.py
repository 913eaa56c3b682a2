"""Saves that wait for their commit are a warning in the training log, once they wait for long."""

from __future__ import annotations

import logging

import pytest

from ckpt.format.ids import CheckpointId
from ckpt_trainer_hooks.backlog import Backlog
from ckpt_trainer_hooks.handle import SaveHandle
from tests.support.builders import FakeClock


def test_oldest_save_that_waits_is_named_and_again_when_it_has_waited_twice_as_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case I62."""

    def said() -> list[tuple[int, int, float]]:
        found = [r.fields for r in caplog.records if getattr(r, "event", "") == "save.behind"]  # type: ignore[attr-defined]
        caplog.clear()
        return [(fields["oldest_step"], fields["waiting"], fields["waited_s"]) for fields in found]

    caplog.set_level(logging.WARNING, "ckpt")
    clock = FakeClock()
    backlog = Backlog(behind_s=100.0, clock=clock)
    handles = [SaveHandle(CheckpointId(step, 1)) for step in (10, 20, 30)]
    backlog.look(handles[:1])
    clock.sleep(99.0)
    backlog.look(handles[:2])
    assert said() == []
    clock.sleep(1.0)
    backlog.look(handles[:2])
    assert said() == [(10, 2, 100.0)]
    clock.sleep(99.0)
    backlog.look(handles)
    assert said() == []
    clock.sleep(1.0)
    backlog.look(handles)
    assert said() == [(10, 3, 200.0)]
    handles[0].settle(handles[0].upload_completion)  # 20 has waited for 101 s
    backlog.look(handles)
    assert said() == []  # that is less than what was said already, so it gets better
    handles[1].settle(handles[1].upload_completion)
    backlog.look(handles)  # 30 is young: all is well, and the next trouble is a new one
    clock.sleep(100.0)
    backlog.look(handles)
    assert said() == [(30, 1, 101.0)]
