"""What a benchmark asks of a checkpoint library."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import ClassVar, Protocol

from benchmarks.training import Training

__all__ = ["Peer", "Synchronous", "single_process_group"]


class Peer(Protocol):
    """One library, set up for one training run in this process.

    ``save`` may return while the library still works. The training loop calls ``before_update`` before the
    optimizer writes to the state, and ``done`` after each step.

    Attributes:
        title: of its rows.
        needs: importable names without which it is "not installed".
        durability: what the library has reached when it says that it is done.
        durable: whether that is as much as ours (files and their folder synced), so that nothing is added.
    """

    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    durability: ClassVar[str]
    durable: ClassVar[bool]

    def __init__(self, training: Training, folder: Path) -> None: ...

    def save(self, path: Path) -> None:
        """Begin to save the live state as ``path``, which does not exist."""

    def before_update(self) -> None:
        """Block until the optimizer may write."""

    def done(self) -> bool:
        """Return whether the save is complete as the library sees it. Raises what went wrong."""

    def before_load(self, path: Path) -> None:
        """Get ready for ``load``, off the clock."""

    def load(self, path: Path) -> None:
        """Restore what was saved as ``path`` into the live state."""

    def discard(self, path: Path) -> None:
        """Remove a save from the disk."""

    def close(self) -> None: ...


class Synchronous:
    """Defaults for a library whose save returns when all is written. Base of the others, too."""

    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    durability: ClassVar[str] = "none"
    durable: ClassVar[bool] = False

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.folder = folder

    def before_update(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def before_load(self, path: Path) -> None:
        pass

    def load(self, path: Path) -> None:
        raise NotImplementedError(f"{self.title} does not restore")

    def discard(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def close(self) -> None:
        pass


def single_process_group() -> None:
    """Start a gloo group of this process alone, which some libraries insist on."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo")
