"""What a save gives back: completions, each a durability boundary."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId

__all__ = ["SaveHandle"]


@dataclass(slots=True, eq=False)
class SaveHandle:
    """One save of this rank.

    Attributes:
        ident: step and attempt.
        staging_completion: the state is copied; training may change it, and it survives the trainer's death.
        local_completion: sealed on NVMe; survives a reboot of the node.
        upload_completion: committed in object storage; survives the node. All ranks' parts are there.
        peer_completion: as many other nodes as ``replication_factor`` says hold a replica of this rank's
            part: it survives the node. Comes before or after the commit. None without replication.
        skipped: the save was not made, since the one before was still being written (``on_busy="skip"``).
    """

    ident: CheckpointId
    staging_completion: Future[None] = field(default_factory=Future)
    local_completion: Future[None] = field(default_factory=Future)
    upload_completion: Future[None] = field(default_factory=Future)
    skipped: bool = False
    peer_completion: Future[None] | None = None

    @property
    def step(self) -> int:
        return self.ident.step

    def fail(self, error: CkptError) -> None:
        """Fail every completion that is still open."""
        completions = (self.staging_completion, self.local_completion, self.upload_completion)
        for future in (*completions, self.peer_completion):
            if future is not None and not future.done():
                with contextlib.suppress(InvalidStateError):  # another thread was faster
                    future.set_exception(error)

    def fail_upload(self, error: CkptError) -> None:
        """Fail the last completion only."""
        if not self.upload_completion.done():
            with contextlib.suppress(InvalidStateError):
                self.upload_completion.set_exception(error)

    def fail_peer(self, error: CkptError) -> None:
        """Fail the completion of the replicas only, where there is one."""
        if self.peer_completion is not None and not self.peer_completion.done():
            with contextlib.suppress(InvalidStateError):
                self.peer_completion.set_exception(error)

    def done(self) -> bool:
        """Return whether nothing more will happen, well or badly."""
        return self.upload_completion.done()

    @staticmethod
    def settle(future: Future[None]) -> None:
        """Mark a completion as reached, unless it has an outcome already."""
        if not future.done():
            with contextlib.suppress(InvalidStateError):  # another thread was faster
                future.set_result(None)
