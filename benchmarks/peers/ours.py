"""This project, and three rows that are no library: nothing, a bare copy, and the raw writer (the floor)."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.limits import WriterProcess
from benchmarks.peers.base import Synchronous
from benchmarks.training import Training, state_nbytes
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import run_key
from ckpt.storage.spares import retire_checkpoint
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks.handle import SaveHandle

__all__ = [
    "NO_LIBRARY",
    "OURS",
    "BlockingCommitted",
    "Copy",
    "Floor",
    "Nothing",
    "StoreOnly",
    "ToObjectStore",
]


class _Ours(Synchronous):
    """One manager; ``mode`` is its own, ``until`` the completion that counts as done."""

    durable = True
    mode: ClassVar[Any]
    until: ClassVar[str]
    url: ClassVar[str] = ""  # of the run; default a directory in the contestant's folder

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._url = self.url or (folder / "store" / "run").as_uri()
        # A named server that is not there: nothing is uploaded, everything else is as always.
        server = "unix:" + str(folder / "no-server.sock") if self.until == "local_completion" else None
        self._manager = CheckpointManager(
            self._url,
            model=training.model,
            optimizer=training.optimizer,
            staging_dir=folder / "staging",
            mode=self.mode,
            server=server,
            store_options=json.loads(os.environ.get("CKPT_BENCH_STORE_OPTIONS", "{}")) if self.url else None,
            keep_last=1,
            keep_local=1,
            pending_wait_s=0.0,
            on_error="warn" if server else "raise",
        )
        self._manager.restore()
        self._number = 0
        self._handle: Any = None
        self._idents: dict[Path, CheckpointId] = {}

    def save(self, path: Path) -> None:
        self._number += 1
        self._handle = self._manager.save(self._number)
        self._idents[path] = self._handle.ident

    def before_update(self) -> None:
        with self._manager.lock():  # what the optimizer's hook does, here so that the wait is seen
            pass

    def done(self) -> bool:
        if self._handle is None:
            return True
        future = getattr(self._handle, self.until)
        if not future.done():
            return False
        future.result()
        self._handle = None
        return True

    def load(self, path: Path) -> None:
        self._manager.restore(self._idents[path].step)

    def discard(self, path: Path) -> None:
        """Retire the local parts as the staging server's retention would; where there is one, it has."""
        if self.until == "local_completion":
            ident = self._idents.pop(path)
            retire_checkpoint(StagingDir(self.folder / "staging"), run_key(self._url), ident)

    def close(self) -> None:
        self._manager.close()


class BlockingSealed(_Ours):
    title = "ckpt, blocking, sealed"
    durability = "sealed"
    mode = "blocking"
    until = "local_completion"


class OverlappedSealed(_Ours):
    title = "ckpt, overlapped, sealed"
    durability = "sealed"
    mode = "overlapped"
    until = "local_completion"


class BlockingCommitted(_Ours):
    title = "ckpt, blocking, committed"
    durability = "committed"
    mode = "blocking"
    until = "upload_completion"


class OverlappedCommitted(_Ours):
    title = "ckpt, overlapped, committed"
    durability = "committed"
    mode = "overlapped"
    until = "upload_completion"


class StoreOnly(BlockingCommitted):
    """Restores on a node that has nothing of the run: everything comes from the store, a directory here."""

    title = "ckpt, from the store (directory)"
    _other: CheckpointManager | None = None

    def before_load(self, path: Path) -> None:
        if self._other is not None:
            self._other.close()
        shutil.rmtree(self.folder / "other", ignore_errors=True)
        self._other = CheckpointManager(
            self._url,
            model=self.training.model,
            optimizer=self.training.optimizer,
            staging_dir=self.folder / "other",
            server="unix:" + str(self.folder / "no-server.sock"),
            on_error="warn",
        )

    def load(self, path: Path) -> None:
        assert self._other is not None
        self._other.restore(self._idents[path].step)

    def close(self) -> None:
        if self._other is not None:
            self._other.close()
        super().close()


class ToObjectStore(BlockingCommitted):
    """Commits to s3:// (where $CKPT_BENCH_STORE_OPTIONS says) by way of the real staging server."""

    title = "ckpt, to an object store"
    url = "s3://bench/run"

    def save_now(self) -> SaveHandle:
        self._number += 1
        return self._manager.save(self._number)

    def server_pid(self) -> int:
        """Return the process id of the staging server; wait until it is up."""
        said = self.folder / "staging" / "server.json"
        deadline = time.monotonic() + 30
        while not said.exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the staging server did not start")
            time.sleep(0.01)
        return int(json.loads(said.read_text())["pid"])


class Nothing(Synchronous):
    """The same loop without a save: what the measurement itself costs, and its noise."""

    title = "nothing"
    durability = "-"
    durable = True

    def save(self, path: Path) -> None:
        pass

    def discard(self, path: Path) -> None:
        pass


class Copy(Synchronous):
    """One copy of the state into warm memory, tensor by tensor, with all threads of the training."""

    title = "one warmed copy, not written"
    durability = "-"
    durable = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        source = list(training.tensors().values())
        target = [torch.zeros_like(tensor) for tensor in source]
        self._kept = source, target
        self._pairs = [(a.data_ptr(), b.data_ptr(), a.nbytes) for a, b in zip(target, source, strict=True)]
        threads = torch.get_num_threads()
        # Each thread has every so-many-th tensor, largest first, so that all have about as much.
        self._pairs.sort(key=lambda pair: -pair[2])
        self._shares = [self._pairs[number::threads] for number in range(threads)]
        self._pool = ThreadPoolExecutor(threads)

    def save(self, path: Path) -> None:
        self._copy(self._shares)

    def load(self, path: Path) -> None:
        self._copy([[(b, a, n) for a, b, n in share] for share in self._shares])

    def _copy(self, shares: list[list[tuple[int, int, int]]]) -> None:
        def one(share: list[tuple[int, int, int]]) -> None:
            for target, source, nbytes in share:
                ctypes.memmove(target, source, nbytes)  # faster than Tensor.copy_; releases the GIL

        list(self._pool.map(one, shares))

    def discard(self, path: Path) -> None:
        pass


class Floor(Synchronous):
    """As many bytes of something else, written by a process that does nothing else. No copy is made."""

    title = "floor: raw writer beside the training"
    durability = "fsync file+dir"
    durable = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._writer = WriterProcess(state_nbytes(training), niceness=5)
        self._running = False

    def save(self, path: Path) -> None:
        self._writer.begin(path, 4, 8 << 20)
        self._running = True

    def done(self) -> bool:
        if self._running and self._writer.ready():
            self._writer.finish()
            self._running = False
        return not self._running

    def close(self) -> None:
        self._writer.close()


OURS = (BlockingSealed, OverlappedSealed, BlockingCommitted, OverlappedCommitted)
NO_LIBRARY = (Nothing, Copy, Floor)
