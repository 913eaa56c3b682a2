"""A trainer that forks while everything is up, run as a program.

``python -m tests.support.forking URL STAGING``: trains, saves in the middle of a loader whose workers are
forked, forks a child that stays, saves again, and prints what it did as JSON. The child ends with stdin.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from ckpt.client import StagingClient
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager

_ITEMS = 24


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


def main() -> None:
    url, staging = sys.argv[1:]
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of fork() beside threads
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(_Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    manager = CheckpointManager(url, model=model, optimizer=optimizer, staging_dir=staging)
    manager.restore()
    run_key = next((Path(staging) / "runs").iterdir()).name
    manager.save(1).upload_completion.result(60)
    seen, step = 0, 1
    # gRPC of this process is up and used, before and while the workers run.
    with StagingClient(StagingDir(Path(staging)).socket_target()) as client:
        client.status(run_key)
        for _ in range(2):
            for batch in loader:
                seen += len(batch)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                step += 1
                if step in (3, 9):  # one while workers of each epoch live
                    manager.save(step)
                    client.status(run_key)
        child = os.fork()
        if child == 0:
            sys.stdin.read()
            os._exit(0)
        manager.save(step + 1).upload_completion.result(60)
        client.status(run_key)
    manager.wait_until_finished(60)
    weight = model.weight.detach().numpy().tobytes().hex()
    print(json.dumps({"seen": seen, "child": child, "step": step + 1, "weight": weight}), flush=True)
    manager.close()


if __name__ == "__main__":
    main()
