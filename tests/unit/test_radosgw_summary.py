from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_machine_without_radosgw_says_so_in_one_line_of_the_summary(tmp_path: Path, processes: str) -> None:
    arguments = ["-q", "-n", processes, "-p", "no:cacheprovider"]
    (tmp_path / "bin").mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *arguments,
            "tests/contract/test_stores.py",
            "-k",
            "Radosgw and takes",
        ],
        cwd=ROOT,
        env=dict(os.environ) | {"PATH": str(tmp_path / "bin"), "CEPH_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("radosgw cannot be had here")]
    assert said == ["radosgw cannot be had here, its tests were skipped: no apt-get on this machine"]
