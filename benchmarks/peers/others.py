"""Libraries from PyPI. Each is imported in the process of its own contestant only."""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.peers.base import Synchronous, single_process_group
from benchmarks.peers.native import Dcp
from benchmarks.training import Training

__all__ = ["NVRX_FOLDER", "OTHERS"]

# Its wheel of that version is for a newer Python, of which the part used here needs nothing: the bench
# environment keeps it apart, outside of what pip resolves.
NVRX_FOLDER = Path(sys.prefix) / "nvrx"


class Safetensors(Synchronous):
    title = "safetensors"
    needs = ("safetensors",)

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.training.tensors(), path)

    def load(self, path: Path) -> None:
        from safetensors.torch import load_file

        found = load_file(path)
        for name, tensor in self.training.tensors().items():
            tensor.copy_(found[name])


class TorchCheckpointing(Synchronous):
    """Meta's, in the set-up that its documentation gives for CPUs."""

    title = "torch_checkpointing"
    needs = ("torch_checkpointing",)

    def __init__(self, training: Training, folder: Path) -> None:
        from torch_checkpointing import (
            AsyncCheckpointSaverConfig,
            CheckpointLoaderConfig,
            CheckpointManager,
            CheckpointStagerConfig,
        )
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(training, folder)
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            load=CheckpointLoaderConfig(use_mmap=False),
            # Its direct writes are not aligned; ext4 and xfs answer EINVAL when the file is closed.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        ).build()
        self._manager.prewarm_staging(training.plain_state())
        self._saved: Future[Any] | None = None

    def save(self, path: Path) -> None:
        self._saved = self._manager.save(str(path), self.training.plain_state())

    def before_update(self) -> None:
        with self._manager.lock():
            pass

    def done(self) -> bool:
        if self._saved is None or not self._saved.done():
            return self._saved is None
        self._saved.result()
        self._saved = None
        return True

    def load(self, path: Path) -> None:
        found: Any = self._manager.load(str(path), into=self.training.plain_state())
        self.training.load_plain_state(found)

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot(Synchronous):
    title = "torchsnapshot async_take"
    needs = ("torchsnapshot",)

    def __init__(self, training: Training, folder: Path) -> None:
        import torchsnapshot

        super().__init__(training, folder)
        single_process_group()
        self._library = torchsnapshot
        self._pending: Any = None

    def _state(self) -> dict[str, Any]:
        return {"model": self.training.model, "optimizer": self.training.optimizer}

    def save(self, path: Path) -> None:
        self._pending = self._library.Snapshot.async_take(str(path), self._state())

    def done(self) -> bool:
        if self._pending is None or not self._pending.done():
            return self._pending is None
        self._pending.wait()
        self._pending = None
        return True

    def load(self, path: Path) -> None:
        self._library.Snapshot(str(path)).restore(self._state())


class Dlrover(Synchronous):
    """Flash checkpoint: shared memory and a saver process."""

    title = "DLRover flash checkpoint"
    needs = ("dlrover",)

    def __init__(self, training: Training, folder: Path) -> None:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", ELASTIC_JOB_NAME=f"bench{os.getpid()}")
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        super().__init__(training, folder)
        self._root = folder / "dlrover"
        self._root.mkdir()
        self._disk = StorageType.DISK
        self._saver = DdpCheckpointer(str(self._root))
        self._number = 0

    def save(self, path: Path) -> None:
        self._number += 1
        path.mkdir()
        self._saver.save_checkpoint(
            self._number,
            self.training.plain_state(),
            path=str(path / "rank_0.pt"),
            storage_type=self._disk,
        )
        if self._saver._engine.latest_step != self._number:
            raise RuntimeError("dlrover skipped a save, as it does while the one before is being written")

    def done(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return int((self._root / "dlrover_latest.txt").read_text()) >= self._number
        return False

    def load(self, path: Path) -> None:
        self.training.load_plain_state(torch.load(path / "rank_0.pt", map_location="cpu"))

    def close(self) -> None:
        process = self._saver._engine.saver_proc
        self._saver._engine.close()
        if process is not None:
            process.terminate()


class Nvrx(Dcp):
    """nvidia-resiliency-ext: snapshot in shared memory kept between saves, persistent writer process."""

    title = "NVRx FileSystemWriterAsync"
    needs = ("nvidia_resiliency_ext",)
    niceness: ClassVar[int] = 10

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        # The library calls these without asking whether there is a GPU.
        torch.cuda.synchronize = lambda *a, **k: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[return-value,assignment]
        single_process_group()
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        self._core, self._files, self._saver = core, filesystem_async, state_dict_saver
        self._queue = core.AsyncCallsQueue(persistent=True, cpu_shm_mode=True, cpu_priority=self.niceness)
        state_dict_saver.init_checkpoint_metadata_cache()
        self._running = False

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        writer = self._files.FileSystemWriterAsync(
            path, thread_count=2, use_cached_data_structure=True, use_cpu_shm_for_gpu_tensors=True
        )
        plan = self._saver.save_state_dict_async_plan(
            self._state(), writer, planner=dcp.DefaultSavePlanner(), enable_cache=True
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finish = [lambda: self._saver.save_state_dict_async_finalize(*plan)]
        self._queue.schedule_async_request(
            self._core.AsyncRequest(function, arguments, finish, preload_fn=preload)
        )
        self._running = True

    def done(self) -> bool:
        if self._running and self._queue.maybe_finalize_async_calls(blocking=False, no_dist=False):
            self._running = False
        return not self._running

    def close(self) -> None:
        """Nothing: its own close() waits for ever on a gloo group of one; the process is killed."""


OTHERS = (Safetensors, TorchCheckpointing, TorchSnapshot, Dlrover, Nvrx)
