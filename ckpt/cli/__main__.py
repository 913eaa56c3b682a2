"""``python -m ckpt.cli``: the ckpt command where no script is installed."""

from __future__ import annotations

from ckpt.cli.main import run

if __name__ == "__main__":
    run()
