"""``python -m ckpt_server``."""

from __future__ import annotations

from ckpt_server.main import run

run()
