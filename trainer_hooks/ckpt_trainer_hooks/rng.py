"""Random-number streams of one rank: Python, NumPy, torch and the current device."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["capture_rng", "derive_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """Return the state of every global generator of this process as plain values."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, internal, gauss),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # a generator nobody imported has no state worth keeping
        state["numpy"] = tuple(numpy.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put back what :func:`capture_rng` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if "numpy" in state:
        import numpy  # only where the saved run used it

        numpy.random.set_state(tuple(state["numpy"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def derive_rng(state: dict[str, Any], stream: int, step: int = 0) -> None:
    """Seed this rank's generators from rank 0's saved state, the number of a stream, and the step.

    For a restore onto another number of ranks: deterministic and distinct per stream and step, but not the
    continuation of any saved stream.
    """
    material = state["torch"] + stream.to_bytes(8, "little") + step.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.sha256(material).digest()[:8], "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # seeds every device as well
    if "numpy" in state:
        import numpy  # only where the saved run used it

        numpy.random.seed(seed & 0xFFFFFFFF)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
