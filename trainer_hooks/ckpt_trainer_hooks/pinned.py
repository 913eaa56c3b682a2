"""Page-locking of the arena for CUDA, so that copies run at link speed and asynchronously."""

from __future__ import annotations

import torch

from ckpt.errors import UnavailableError
from ckpt_trainer_hooks.arena import Arena

__all__ = ["pin", "unpin"]


def pin(arena: Arena) -> None:
    """Page-lock the arena if CUDA is in use in this process; otherwise do nothing.

    Raises:
        UnavailableError: the driver refuses (usually the limit of locked memory).
    """
    if _in_use():
        _check(torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 0), "cudaHostRegister")


def unpin(arena: Arena) -> None:
    """Undo :func:`pin`."""
    if _in_use():
        _check(torch.cuda.cudart().cudaHostUnregister(arena.address), "cudaHostUnregister")


def _in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _check(code: object, call: str) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise UnavailableError("the CUDA driver refused to page-lock the arena", call=call, error=int(code))  # type: ignore[call-overload]
