"""A real trainer that is asked to stop: exit codes, and what a restart finds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.format.keys import run_key
from tests.support.chain import FLUSHER, Life, Plan, Zygote, end_node, processes


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "store").mkdir()
    yield tmp_path
    end_node(tmp_path / "staging")


def live(zygote: Zygote, root: Path, name: str = "life", **more: object) -> Life:
    usual = {
        "url": f"file://{root}/store/run",
        "staging": str(root / "staging"),
        "report": str(root / name),
    }
    return zygote.fork(Plan(**{**usual, **more}))  # type: ignore[arg-type]


def reason(root: Path) -> dict[str, object]:
    key = run_key(f"file://{root}/store/run")
    folder = root / "staging" / "runs" / key / "stop" / "a000001"
    found: dict[str, object] = json.loads((folder / "reason-00000.json").read_text())
    return found


@pytest.mark.fault(
    "Hangs and stops",
    "signal {number} to a training process",
    "kill",
    "saves, commits, leaves with 75; the restart resumes there",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_in_training_saves_and_leaves_with_75(zygote: Zygote, root: Path, number: int) -> None:
    """Case I59."""
    life = live(zygote, root)
    life.wait_for("committed", step=3)

    life.kill(number)

    assert life.wait() == 75
    found = reason(root)
    assert (found["achieved"], found["exit_code"]) == ("committed", 75)
    second = live(zygote, root, "second", last_step=0)
    assert second.wait_for("restored")["step"] == found["step"]


@pytest.mark.fault(
    "Hangs and stops",
    "asked to stop while no hook is called",
    "SIGTERM",
    "ends with the grace time and says what was achieved",
)
def test_training_thread_that_never_comes_ends_with_the_grace_time(zygote: Zygote, root: Path) -> None:
    """I61: a long phase that calls no hook. All of its steps are saved, so that nothing is lost: 75."""
    life = live(zygote, root, last_step=2, environment={"CKPT_STOP_GRACE_S": "1.5"})
    life.wait_for("committed", step=2)
    life.wait_for("idle")

    life.kill(signal.SIGTERM)

    assert life.wait() == 75
    found = reason(root)
    assert (found["achieved"], found["step"]) == ("committed", 2)
    assert "training thread did not come" in str(found["message"])


@pytest.mark.fault(
    "Hangs and stops",
    "asked to stop while the flusher hangs",
    "SIGTERM, SIGSTOP of the flusher",
    "ends with the grace time: 76",
)
def test_nothing_sealed_in_the_grace_time_is_76(zygote: Zygote, root: Path) -> None:
    life = live(zygote, root, last_step=2, freezes_flusher_at=2, environment={"CKPT_STOP_GRACE_S": "1.5"})
    life.wait_for("idle")

    life.kill(signal.SIGTERM)

    assert life.wait() == 76
    assert reason(root)["achieved"] in ("copied", "nothing")
    for pid in processes(FLUSHER, root / "staging"):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.fault(
    "Hangs and stops",
    "crash loop without a save",
    "SIGKILL after each restore",
    "the launcher is told to stop: 93",
)
def test_run_that_starts_again_and_again_without_saving_is_told_not_to_restart(
    zygote: Zygote, root: Path
) -> None:
    more = {
        "last_step": 0,
        "environment": {"CKPT_MAX_NO_PROGRESS": "2", "CKPT_REASON_FILE": str(root / "why")},
    }
    for number in range(2):
        life = live(zygote, root, f"life-{number}", **more)
        life.wait_for("restored")
        life.kill()
        life.wait()

    assert live(zygote, root, "third", **more).wait() == 93

    found = json.loads((root / "why").read_text())
    assert (found["exit_code"], found["cause"], found["achieved"]) == (93, "no-progress", "nothing")
