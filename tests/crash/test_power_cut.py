"""The power fails between any two system calls of a run's whole life, and the disk keeps what it likes.

The calls are recorded with strace; tests/support/powercut.py says which states of the disk each cut allows.
Of all of them (CKPT_POWER_CUTS=0 takes all) a sample is laid on a directory and looked at: a sealed marker
never names bytes that are not there, a committed manifest never names objects that are not there, and what
was promised (sealed, replicated, committed) is there.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.format.ids import CheckpointId
from tests.support.boundaries import found
from tests.support.dying import lead
from tests.support.lifecycle import Life, check, check_clean
from tests.support.powercut import Disk, State, record, states

SEED = int(os.environ.get("CKPT_SEED") or random.SystemRandom().randrange(10**6))
SAMPLE = int(os.environ.get("CKPT_POWER_CUTS", "250"))
GO_ON_EVERY = 25
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory: which disk it is makes no difference, the model says what is kept."""
    path = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"ckpt-power-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


def promised(state: State) -> dict[str, set[CheckpointId]]:
    found: dict[str, set[CheckpointId]] = {}
    for what, ident in state.said:
        found.setdefault(what, set()).add(ident)
    return found


@pytest.mark.fault(
    "Power cut",
    "un-synced data and names lost in any combination, at any instant of a run's life",
    "strace of seal, replicate, upload, commit, prune and sweep; states of the disk replayed",
    "no sealed marker without its bytes, no manifest without its objects, every promise kept",
)
@pytest.mark.skipif(shutil.which("strace") is None, reason="power cuts: strace cannot be had here")
def test_whatever_a_power_cut_leaves_is_consistent(
    root: Path, tmp_path: Path, tried: Callable[[int], None]
) -> None:
    """Case I05."""
    print(f"CKPT_SEED={SEED}")
    dice = random.Random(SEED)
    life = [sys.executable, "-m", "tests.support.lifecycle", str(root)]
    calls = record(life, tmp_path / "calls", cwd=PROJECT)
    end = {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")
    }
    known = list(states(calls, root, dice))
    assert end in [dict(state.tree) for state in known], "the model does not follow the file system"
    assert len(known[-1].said) == 12  # four steps: sealed, replicated, committed
    chosen = dice.sample(known, SAMPLE) if 0 < SAMPLE < len(known) else known
    tried(len(chosen))
    for number, state in enumerate(chosen):
        state.write(root)
        check(root, promised(state))
        if number % GO_ON_EVERY == 0:
            again = lead(lambda said: Life(root, said).lead(), [])
            assert again.status == 0
            check(root, again.promised)
            check_clean(root)


@pytest.mark.fault(
    "Power cut",
    "a process is killed before it has synced a name, and in the life of the next one the power fails",
    "SIGKILL before a drawn sync of a directory, then as above",
    "no sealed marker without its bytes, no manifest without its objects, every promise of both kept",
)
@pytest.mark.skipif(shutil.which("strace") is None, reason="power cuts: strace cannot be had here")
def test_names_that_a_dead_process_left_unsynced_are_not_built_on(
    root: Path, tmp_path: Path, tried: Callable[[int], None]
) -> None:
    print(f"CKPT_SEED={SEED}")
    dice = random.Random(SEED)
    passed = lead(lambda said: Life(root, said).lead(), found()).passed
    shutil.rmtree(root)
    # The folders and the layout first of all: the next process finds them and has no need to write them.
    folders = [n for n, labels in enumerate(passed, 1) if labels[0] == "storage.durable.make_dirs: fsync_dir"]
    names = [n for n, labels in enumerate(passed, 1) if labels[0].endswith(": fsync_dir")]
    layouts = [n for n in names if any("write_layout" in label for label in passed[n - 1])]
    at = dice.choice([dice.choice(folders), layouts[0], dice.choice(names)])
    root.mkdir()
    life = [sys.executable, "-m", "tests.support.lifecycle", str(root), str(at)]
    known = list(states(record(life, tmp_path / "calls", cwd=PROJECT), root, dice))
    chosen = dice.sample(known, min(len(known), SAMPLE // 4 or len(known)))
    tried(len(chosen))
    for state in chosen:
        state.write(root)
        check(root, promised(state))


@pytest.mark.skipif(shutil.which("strace") is None, reason="power cuts: strace cannot be had here")
def test_model_loses_what_was_not_synced(tmp_path: Path) -> None:
    """The model itself: rename before fsync is caught, after fsync it is not."""
    program = """
import os, sys
root = sys.argv[1]
def put(name, sync):
    fd = os.open(f"{root}/{name}.part", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"0123456789")
    if sync:
        os.fsync(fd)
    os.close(fd)
    os.rename(f"{root}/{name}.part", f"{root}/{name}")
put("bad", False)
put("good", True)
fd = os.open(root, os.O_RDONLY)
os.fsync(fd)
"""
    root = tmp_path / "root"
    root.mkdir()
    calls = record([sys.executable, "-c", program, str(root)], tmp_path / "calls", cwd=PROJECT)
    known = list(states(calls, root, random.Random(0)))
    contents = {name: {state.tree.get(name) for state in known} for name in ("bad", "good")}
    assert contents["bad"] == {None, b"", bytes(10), b"01234" + bytes(5), b"0123456789"}
    assert contents["good"] == {None, b"0123456789"}
    disk = Disk(root)
    for call in calls:
        disk.apply(call)
    assert disk.folders[0].durable.keys() == {"bad", "good"}
