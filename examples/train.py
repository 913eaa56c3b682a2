"""Train the small GPT, with checkpoints. One process, or any number of them under torchrun:

    python examples/train.py --url file:///tmp/runs/first --steps 40 --save-every 10
    torchrun --standalone --nproc-per-node 4 examples/train.py --url s3://bucket/first --kind fsdp2

Run it again with another --kind or another number of ranks: it goes on where the newest checkpoint ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, KINDS, GPTConfig, TextStream, data_shard, global_mean, make_mesh, parallelize
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

WARMUP = 10  # steps until the learning rate is at its highest


class Trainer:
    """Model, optimizer, schedule and data, and one step of all of them."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh | None) -> None:
        config = GPTConfig(vocab=0)
        self.stream = TextStream(args.seed, args.batch, config.context)
        torch.manual_seed(args.seed)  # the same weights on every rank, whatever the topology
        model = GPT(GPTConfig(vocab=self.stream.vocab))
        self.mesh = mesh
        self.model = parallelize(model, mesh, args.kind)
        self.optimizer = AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate(step, args.steps))

    def train_step(self, step: int) -> float:
        """Run iteration ``step`` and return its loss: the mean over the global batch."""
        inputs, targets = self.stream.batch(step, *data_shard(self.mesh))
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return global_mean(loss, self.mesh)


def learning_rate(step: int, total: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / max(1, total - WARMUP))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


class Report:
    """Rank 0's progress: one line on the terminal and one JSON line in the loss file per step."""

    def __init__(self, rank: int, world: int, loss_file: Path | None) -> None:
        self._rank, self._world, self._path = rank, world, loss_file
        self._since = time.perf_counter()

    def __call__(self, step: int, loss: float, attempt: int = 0) -> None:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        if self._rank:
            return
        print(f"step {step:4d}  loss {loss:.6f}  {seconds * 1000:4.0f} ms", flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                line = {"step": step, "loss": loss, "ranks": self._world, "attempt": attempt}
                file.write(json.dumps(line) + "\n")  # json writes repr(loss): exact


def train(args: argparse.Namespace, rank: int, world: int, mesh: DeviceMesh | None) -> None:
    """Build everything and run iterations up to ``args.until``."""
    trainer = Trainer(args, mesh)
    report = Report(rank, world, args.loss_file)
    if args.no_checkpoint:
        for step in range(args.until):
            report(step, trainer.train_step(step))
        return

    from ckpt_trainer_hooks import CheckpointManager

    with CheckpointManager(
        args.url,
        model=trainer.model,
        optimizer=trainer.optimizer,
        lr_scheduler=trainer.scheduler,
        save_interval_steps=args.save_every,
        mode=args.mode,
        replication_factor=args.replication_factor,
        staging_dir=args.staging,
    ) as ckpt:
        start = ckpt.restore()
        for step in range(start, args.until):
            began = time.monotonic()
            report(step, trainer.train_step(step), ckpt.attempt or 0)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
            ckpt.step(step)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url", help="where the run's checkpoints are, e.g. s3://bucket/run or file:///path/run"
    )
    parser.add_argument("--kind", choices=KINDS, default="none", help="how the model is split over the ranks")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks of fsdp2+tp")
    parser.add_argument(
        "--steps", type=int, default=100, help="iterations of the whole run; the schedule ends there"
    )
    parser.add_argument("--until", type=int, help="stop after this many iterations (default: --steps)")
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--save-every", type=int, default=10, help="iterations between checkpoints")
    parser.add_argument(
        "--replication-factor",
        type=int,
        default=1,
        help="copies on nodes; see docs/replication.md",
    )
    parser.add_argument("--mode", choices=("overlapped", "blocking"), default="overlapped")
    parser.add_argument("--staging", help="local directory for snapshots on their way to the store")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loss-file", type=Path, help="append one JSON line per step: step, loss")
    parser.add_argument("--pid-dir", type=Path, help="write the process id of each rank to rank<N>.pid there")
    parser.add_argument("--no-checkpoint", action="store_true", help="only train")
    args = parser.parse_args()
    args.until = args.steps if args.until is None else min(args.until, args.steps)
    if not args.no_checkpoint and not args.url:
        parser.error("--url is required (or --no-checkpoint)")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if (args.kind == "none") != (world == 1):
        raise SystemExit(f"--kind {args.kind} does not fit {world} rank(s); start several with torchrun")
    if args.pid_dir is not None:
        (args.pid_dir / f"rank{rank}.pid").write_text(str(os.getpid()))
    if world > 1:
        dist.init_process_group("gloo")
    try:
        train(args, rank, world, make_mesh(args.kind, args.tp))
    finally:
        if world > 1:
            # A gloo thread that drops the last reference to a tensor while Python shuts down aborts the
            # process (pytorch issue 190489); collect the model's reference cycles while it is alive.
            gc.collect()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
