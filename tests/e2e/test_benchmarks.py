"""The benchmarks run: smallest sizes, ours beside one library, every row measured or named as absent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import Report
from benchmarks.s3_sink import Sink
from ckpt.errors import ConflictError, NotFoundError
from ckpt.storage.open import open_store

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(
    600
)  # a dozen processes that import torch: minutes where the machine does other work, too
def test_reduced_set_measures_every_row_and_writes_json_and_plots(tmp_path: Path) -> None:
    names = ["cost", "upload", "restore"]
    command = [sys.executable, "-m", "benchmarks", *names, "--quick", "--on", "disk", "--threads", "1"]
    command += [
        "--only",
        "overlapped,from the store,safetensors",
        "--results",
        str(tmp_path),
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        body = json.loads((tmp_path / f"{name}.json").read_text())
        assert body.keys() == {"name", "conditions", "machine", "measured_at", "rows"}
        rows = Report.from_json(body).rows
        assert [row.what for row in rows if row.absent] == []
        assert [row.what for row in rows if not row.values] == []
        assert [row.what for row in rows if row.over and row.ratio is None] == []
        assert any("ckpt" in row.what for row in rows)
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    assert list(tmp_path.glob("ckpt-bench-*")) == []  # nothing is left behind


def test_sink_keeps_small_objects_and_the_sizes_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Sink.environment().items():
        monkeypatch.setenv(name, value)
    with Sink() as sink:
        store = open_store("s3://bench/run", sink.options)
        assert store.probe_conditional()
        store.put_new("b/manifest", b"first")
        with pytest.raises(ConflictError):
            store.put_new("b/manifest", b"second")
        assert bytes(store.get("b/manifest")) == b"first"
        assert bytes(store.get_range("b/manifest", 1, 3)) == b"irs"
        pieces = [bytes(6 << 20), bytes(6 << 20)]
        store.put_parts("a/segment", pieces, most_nbytes=12 << 20, part_nbytes=5 << 20, concurrency=2)
        assert [(info.key, info.nbytes) for info in store.list_keys("")] == [
            ("a/segment", 12 << 20),
            ("b/manifest", 5),
        ]
        assert list(store.list_dirs("")) == ["a", "b"]
        store.delete(["b/manifest"])
        with pytest.raises(NotFoundError):
            store.head("b/manifest")
