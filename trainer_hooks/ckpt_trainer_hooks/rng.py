"""Random-number streams of one rank: Python, NumPy, torch and the current device."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from typing import Any

import torch

from ckpt.events import event, get_logger

__all__ = ["capture_rng", "derive_rng", "restore_rng"]

_log = get_logger("rng")


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
    device = _device_module()
    if device is not None and device[1].is_initialized():
        state[device[0]] = device[1].get_rng_state().numpy().tobytes()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put back what :func:`capture_rng` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if "numpy" in state:
        import numpy  # only where the saved run used it

        numpy.random.set_state(tuple(state["numpy"]))
    device = _device_module()
    if device is not None and device[0] in state:
        device[1].set_rng_state(_byte_tensor(state[device[0]]))
    if left := state.keys() - {"python", "torch", "numpy"} - ({device[0]} if device is not None else set()):
        event(
            _log,
            logging.WARNING,
            "restore.rng_of_absent_device",
            devices=sorted(left),
            reason="the stream of a device that is not here was left out",
        )


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


def _device_module() -> tuple[str, Any] | None:
    """(type, module such as torch.cuda) of the accelerator, where it is here and has a stream.

    By its current device: a rank's stream is the rank's, whatever number its device has.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(accelerator)
    found = all(hasattr(module, name) for name in ("get_rng_state", "set_rng_state", "is_initialized"))
    return (accelerator.type, module) if found else None


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
