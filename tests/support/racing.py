"""Somebody who prunes, sweeps or restores a run over and over, in a process whose clock may be wrong.

``python -m tests.support.racing FOLDER SHIFT_S WHAT URL``: until FOLDER/stop exists; a round adds a byte to
FOLDER/WHATSHIFT_S. The clock of the process is SHIFT_S seconds ahead. WHAT is "prune" (the ckpt command:
prune, then sweep) or "restore". Prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_REAL = time.time


def _command(*arguments: str) -> int:
    from ckpt.cli.main import app

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app([*arguments], prog_name="ckpt")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def prune(url: str, rounds: Iterator[None]) -> object:
    """Exit codes, counted."""
    codes: Counter[str] = Counter()
    for _ in rounds:
        codes[f"prune {_command('prune', url, '--keep-last', '2', '--yes')}"] += 1
        codes[f"sweep {_command('sweep', url, '--older-than', '1h', '--yes')}"] += 1
    return codes


def restore(url: str, rounds: Iterator[None]) -> object:
    """How often the latest came, by step; each restore is compared bit by bit with what was saved."""
    from ckpt.repository import Repository
    from tests.support.sealing import make_world

    steps: Counter[int] = Counter()
    for _ in rounds:
        with Repository(url) as run:
            found = run.load()
        weight = found["weight"]
        world = make_world(seed=weight.ident.step)
        for name, expected in world.tensors.items():
            assert found[name].ident == weight.ident
            assert bytes(found[name].data) == expected.tobytes(), name
        steps[weight.ident.step] += 1
    return steps


def _rounds(folder: Path, name: str) -> Iterator[None]:
    with (folder / name).open("ab", buffering=0) as done:
        while not (folder / "stop").exists():
            yield
            done.write(b".")


if __name__ == "__main__":
    _folder, _shift, _what, _url = sys.argv[1:]
    time.time = lambda: _REAL() + float(_shift)
    _told = {"prune": prune, "restore": restore}[_what](_url, _rounds(Path(_folder), f"{_what}{_shift}"))
    print(json.dumps(_told))
