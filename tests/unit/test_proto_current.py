"""The generated code that is checked in is what the .proto files say."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATOR = ROOT / ".venv-proto" / "bin" / "python"


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    assert GENERATOR.exists(), "run `make test` or `make proto` once: they set up the generator"
    subprocess.run([GENERATOR, ROOT / "proto" / "generate.py", "--out", tmp_path], check=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "ckpt_proto" / "v1").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto/ckpt_proto/v1").glob("*_pb2*")}
    assert fresh.keys() == kept.keys()
    assert [name for name in fresh if fresh[name] != kept[name]] == []
