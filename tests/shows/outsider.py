"""An ordinary training script, for tools that strike at other people's scripts from outside, as ckpt-chaos.

    pip install ckpt-chaos==0.1.8
    ckpt-chaos run --modes before,torn,term --step-regex "resumed from step (\\d+)" \\
        --result-file "{out}/final.bin" -- python tests/shows/outsider.py {out}

It logs its loss at every step, so that such a tool strikes between saves and after the first one as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ckpt_trainer_hooks import CheckpointManager

STEPS, EVERY = 9, 3


def main() -> None:
    """Train, or go on training, and leave the final weights in ``OUT/final.bin``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(
        f"file://{out}/store/run",
        model=model,
        optimizer=optimizer,
        staging_dir=out / "staging",
        timeout_s=60.0,
    ) as manager:
        first = manager.restore() or 0
        print(f"resumed from step {first}", flush=True)
        for step in range(first + 1, STEPS + 1):
            batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
            loss = (model(batch) - batch.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with (out / "loss.txt").open("a") as log:
                log.write(f"{step} {loss.item()}\n")
            if step % EVERY == 0:
                manager.save(step).upload_completion.result(60)
    with (out / "final.bin").open("wb") as file:
        for value in model.state_dict().values():
            file.write(value.numpy().tobytes())


if __name__ == "__main__":
    main()
