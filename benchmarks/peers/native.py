"""What torch brings along: torch.save, torch.distributed.checkpoint in its modes, its _experimental one."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.peers.base import Synchronous, single_process_group
from benchmarks.training import Training

__all__ = ["NATIVE", "Dcp", "TorchSave"]


def _without_crc(*_: object) -> None:
    """torch.save without the zip checksum, its largest cost. Called in writer processes too."""
    torch.serialization.set_crc32_options(False)


class TorchSave(Synchronous):
    title = "torch.save"
    crc: ClassVar[bool] = True

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        if not self.crc:
            _without_crc()

    def save(self, path: Path) -> None:
        torch.save(self.training.plain_state(), path)

    def load(self, path: Path) -> None:
        self.training.load_plain_state(torch.load(path, map_location="cpu"))


class TorchSaveNoCrc(TorchSave):
    title = "torch.save, no crc32"
    crc = False


class Dcp(Synchronous):
    title = "DCP save"
    durability = "fsync file"
    crc: ClassVar[bool] = True
    cached_plans: ClassVar[bool] = False

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        if not self.crc:
            _without_crc()
        self._planner = dcp.DefaultSavePlanner(enable_plan_caching=True) if self.cached_plans else None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        dcp.save(
            self._state(), storage_writer=dcp.FileSystemWriter(path), planner=self._planner, no_dist=True
        )

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path, no_dist=True)
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DcpNoCrc(Dcp):
    title = "DCP save, no crc32"
    crc = False


class _DcpAsync(Dcp):
    """async_save with a stager that keeps its buffers, and cached plans: its fastest set-up."""

    cached_plans = True
    kind: ClassVar[AsyncCheckpointerType]
    staged_in_thread: ClassVar[bool] = False

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        single_process_group()
        self._staged: Future[Any] | None = None
        self._saved: Future[Any] | None = None
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,  # both need an accelerator
                use_non_blocking_copy=False,
                use_shared_memory=self.kind is AsyncCheckpointerType.PROCESS,
                use_async_staging=self.staged_in_thread,
            )
        )

    def save(self, path: Path) -> None:
        response: Any = dcp.async_save(
            self._state(),
            storage_writer=dcp.FileSystemWriter(path),
            planner=self._planner,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        self._staged = getattr(response, "staging_completion", None)
        self._saved = getattr(response, "upload_completion", response)

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def done(self) -> bool:
        if self._saved is None or not self._saved.done():
            return self._saved is None
        self._saved.result()
        self._saved = None
        return True

    def close(self) -> None:
        self._stager.close()


class DcpThread(_DcpAsync):
    title = "DCP async, thread"
    kind = AsyncCheckpointerType.THREAD


class DcpThreadNoCrc(DcpThread):
    title = "DCP async, thread, no crc32"
    crc = False


class DcpProcess(_DcpAsync):
    title = "DCP async, process, staged in a thread"
    kind = AsyncCheckpointerType.PROCESS
    staged_in_thread = True


class Experimental(Synchronous):
    """Staging thread and writer process; one torch.save file, no sync, no resharding."""

    title = "torch _experimental"
    crc: ClassVar[bool] = True

    def __init__(self, training: Training, folder: Path) -> None:
        from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
        from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig

        super().__init__(training, folder)
        staging = CheckpointStagerConfig(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        more = {} if self.crc else {"subprocess_init_fn": _without_crc}
        self._saver = make_async_checkpointer(CheckpointerConfig(staging_config=staging), **more)
        self._staged: Any = None
        self._saved: Any = None

    def save(self, path: Path) -> None:
        self._staged, self._saved = self._saver.save(str(path), self.training.plain_state())

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def done(self) -> bool:
        if self._saved is None or not self._saved.done():
            return self._saved is None
        self._saved.result()
        self._saved = None
        return True

    def load(self, path: Path) -> None:
        self.training.load_plain_state(torch.load(path / "checkpoint_0.pt", map_location="cpu"))

    def close(self) -> None:
        self._saver.close()


class ExperimentalNoCrc(Experimental):
    title = "torch _experimental, no crc32"
    crc = False


NATIVE = (
    TorchSave,
    TorchSaveNoCrc,
    Dcp,
    DcpNoCrc,
    DcpThread,
    DcpThreadNoCrc,
    DcpProcess,
    Experimental,
    ExperimentalNoCrc,
)
