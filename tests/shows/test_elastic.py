"""The example of elastic restart keeps its promises: 4 nodes, 3, 2, spares with prefetch, 4; same losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chain import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)  # 60 to 80 s on two cores: every start of a rank loads torch
def test_nodes_are_lost_replaced_and_added_and_the_losses_go_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "elastic.py"),
            "--quick",
            "--out",
            str(tmp_path / "out"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=390,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "PASS: elastic restart" in done.stdout
