"""A job on several nodes: real ranks in a process group, a real server and a staging directory per node."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import FLUSHER, end_node, processes
from tests.support.models import barrier, full_state
from tests.support.ranks import run_ranks
from tests.support.server import Server, eventually

__all__ = ["TIERS", "Job", "Life", "Told", "open_job", "read"]

TIERS = ("local", "replica", "peer", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What every rank does in one start of the run.

    Attributes:
        url: of the run.
        stagings: staging directory of each rank's node.
        kind: how the model is split: "fsdp2", "tp", "fsdp2+tp".
        width, blocks: of the model: 8 * width**2 parameters per block.
        until: train so far.
        saves: after these steps.
        wait: for each save: "local", "peer" or "upload".
        dies: (rank, step): the flusher of ``rank`` stands still from the save of ``step`` on, and the rank
            kills itself, and its flusher, as soon as that has been handed over.
        factor: copies of each segment.
        environment: added.
    """

    url: str
    stagings: tuple[Path, ...]
    kind: str = "fsdp2"
    width: int = 48
    blocks: int = 1
    until: int = 0
    saves: tuple[int, ...] = ()
    wait: str = "upload"
    dies: tuple[int, int] | None = None
    factor: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a rank has to say. ``state``: digests of the whole state, by tensor, as restored."""

    start: int
    attempt: int
    state: Any
    losses: dict[int, float]
    done: Mapping[str, Any]
    lost: list[Mapping[str, Any]]


class Job:
    """Nodes by name, and a store.

    Args:
        root: folder.
        url: of the run; default: a directory in ``root``.
        environment: of the servers and the ranks.
    """

    def __init__(
        self, root: Path, stack: ExitStack, *, url: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self.store = root / "store" / "run"
        self.store.mkdir(parents=True)
        self.url = url or f"file://{self.store}"
        self.run_key = keys.run_key(self.url)
        self.environment = dict(environment or {})
        self.servers: dict[str, Server] = {}
        self._stack = stack

    def staging(self, name: str) -> StagingDir:
        return StagingDir(self.root / f"node-{name}")

    def boot(self, *names: str) -> None:
        """Start the servers of nodes, on empty disks where there are none."""
        for name in names:
            options = ("--insecure", "--peer-listen", "127.0.0.1:0", "--failure-domain", f"rack-{name}")
            server = Server(self.staging(name).path, *options, environment=self.environment)
            self.servers[name] = self._stack.enter_context(server)

    def lose(self, name: str) -> None:
        """The node is gone with its disk, and so is everything that works on it."""
        self.servers.pop(name).kill()
        end_node(self.staging(name).path)
        shutil.rmtree(self.staging(name).path)

    def run(self, nodes: str, **life: Any) -> list[Told]:
        """One start of the run: a rank per letter of ``nodes``, on the node of that name. None: it died."""
        stagings = tuple(self.staging(name).path for name in nodes)
        plan = Life(url=self.url, stagings=stagings, environment=self.environment, **life)
        may_die = frozenset(range(len(nodes)) if plan.dies else ())
        return run_ranks(len(nodes), _live, plan, may_die=may_die, env=dict(self.environment))

    def nbytes(self, ident: CheckpointId, rank: int) -> int:
        """Of the segment, as a node has it."""
        for name in self.servers:
            for place in (self.staging(name), replicas_dir(self.staging(name))):
                if place.index_path(self.run_key, ident, rank).is_file():
                    return place.read_index(self.run_key, ident, rank).nbytes
        raise AssertionError(f"no node has the segment of rank {rank}")

    def holders(self, ident: CheckpointId, rank: int) -> list[str]:
        """Nodes with a replica of the segment."""
        return [
            name
            for name in self.servers
            if replicas_dir(self.staging(name)).index_path(self.run_key, ident, rank).is_file()
        ]

    @contextmanager
    def store_without_uploads(self) -> Iterator[None]:
        """No data gets into the store; attempts and manifests could. What is in it stays."""
        data, aside = self.store / "data", self.root / "data"
        if data.exists():
            data.rename(aside)
        data.symlink_to(data)  # a loop: whoever writes fails, as with a store that is away, and tries again
        yield
        data.unlink()
        if aside.exists():
            aside.rename(data)


@contextmanager
def open_job(root: Path, **more: Any) -> Iterator[Job]:
    """A job whose servers end with the block."""
    with ExitStack() as stack:
        yield Job(root, stack, **more)


def read(told: Sequence[Told], tier: str) -> int:
    """Bytes that these ranks read from a tier."""
    return sum(int(one.done[f"{tier}_nbytes"]) for one in told)


# --- in the ranks ---


class _Events(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "event"):
            fields = {
                name: value if isinstance(value, int | float) else str(value)
                for name, value in record.fields.items()  # type: ignore[attr-defined]
            }
            self.seen.append((record.event, fields))

    def of(self, name: str) -> list[Mapping[str, Any]]:
        return [fields for event, fields in self.seen if event == name]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _build(life: Life, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    width = life.width
    model = nn.Sequential(*(_Block(width) for _ in range(life.blocks)))
    if world == 1:
        dp, tp = None, None
    elif life.kind == "fsdp2":
        dp, tp = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), None
    elif life.kind == "tp":
        dp, tp = None, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    else:
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = both["dp"], both["tp"]
    for block in model:
        if tp is not None:
            parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if dp is not None:
            fully_shard(block, mesh=dp)
    if dp is not None:
        fully_shard(model, mesh=dp)
    # Everything that it keeps is sharded like the parameters, so that ranks share nothing.
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, width: int) -> float:
    """One step on a batch that is a function of the step, the same on every rank."""
    data = torch.randn(8, width, generator=torch.Generator().manual_seed(1000 + step))
    loss = (model(data) - data.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _live(rank: int, world: int, life: Life) -> Told:
    """Restore, train, save, and leave without a word, as a rank that was killed does."""
    events = _Events()
    logger = logging.getLogger("ckpt")
    logger.addHandler(events)
    logger.setLevel(logging.INFO)
    model, optimizer = _build(life, world)
    staging = StagingDir(life.stagings[rank])
    manager = CheckpointManager(
        life.url,
        model=model,
        optimizer=optimizer,
        staging_dir=staging.path,
        server=staging.socket_target(),
        replication_factor=life.factor,
        mode="blocking",
        compression="off",
        stop_signals=(),
        timeout_s=60.0,
        pending_wait_s=0.0,
    )
    start = manager.restore()
    # Not the bits themselves: some shows have a large state.
    state = (
        {
            name: hash(tensor.numpy().tobytes()) if life.width > 64 else tensor.tolist()
            for name, tensor in full_state(model, optimizer).items()
        }
        if start
        else {}
    )
    losses = {}
    for step in range(start, life.until):
        losses[step] = _step(model, optimizer, step, life.width)
        if step + 1 in life.saves:
            _save(manager, life, rank, step + 1)
    if life.dies is None:
        barrier()  # no rank leaves before all have saved
    done = events.of("restore.done")
    return Told(
        start=start,
        attempt=manager.attempt or 0,
        state=state,
        losses=losses,
        done=done[-1] if done else {f"{tier}_nbytes": 0 for tier in TIERS},
        lost=events.of("restore.step_lost"),
    )


def _save(manager: CheckpointManager, life: Life, rank: int, step: int) -> None:
    dies_here = life.dies == (rank, step)
    if dies_here:
        flushers = processes(FLUSHER, life.stagings[rank], parent=os.getpid())
        for pid in flushers:
            os.kill(pid, signal.SIGSTOP)
    handle = manager.save(step)
    if dies_here:
        handle.staging_completion.result(60)
        for pid in (*flushers, os.getpid()):
            os.kill(pid, signal.SIGKILL)
    if life.dies is not None and life.dies[1] == step:
        handle.local_completion.result(60)
        return
    names = {"local": "local_completion", "peer": "peer_completion", "upload": "upload_completion"}
    getattr(handle, names[life.wait]).result(60)


def until(condition: Any, what: str) -> None:
    """Wait for what servers do in the background."""
    eventually(condition, timeout_s=60, what=what)
