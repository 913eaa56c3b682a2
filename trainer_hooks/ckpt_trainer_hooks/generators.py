"""Random-number generators that the user holds: of torch, NumPy and Python, as items of the state.

Each rank's generator is a stream of its own, like the global ones (see ckpt_trainer_hooks.rng).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_trainer_hooks.data import mixed_seed

__all__ = ["capture_generator", "generator_type", "is_same_state", "reseed_generator", "restore_generator"]


def generator_type(item: object) -> str | None:
    """Return what kind of generator ``item`` is, such as "torch:cpu" or "numpy:PCG64"; None: not one.

    The state of one kind means nothing to another.
    """
    if isinstance(item, torch.Generator):
        return f"torch:{item.device.type}"
    if type(item) is random.Random:  # a subclass may have another state, or none (SystemRandom)
        return "python"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(item, numpy.random.Generator):
        return f"numpy:{item.bit_generator.state['bit_generator']}"
    if numpy is not None and isinstance(item, numpy.random.RandomState):
        return f"numpy-legacy:{item.get_state(legacy=False)['bit_generator']}"
    return None


def capture_generator(item: Any) -> Any:
    """Return the state of a generator as plain values."""
    kind = generator_type(item) or ""
    if kind.startswith("torch"):
        return item.get_state().numpy().tobytes()
    if kind == "python":
        return item.getstate()
    return item.bit_generator.state if kind.startswith("numpy:") else item.get_state(legacy=False)


def restore_generator(item: Any, state: Any) -> None:
    """Put back what :func:`capture_generator` returned, into a generator of the same type."""
    kind = generator_type(item) or ""
    if kind.startswith("torch"):
        item.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif kind == "python":
        version, internal, gauss = state
        item.setstate((version, tuple(internal), gauss))
    elif kind.startswith("numpy:"):
        item.bit_generator.state = state
    else:
        item.set_state(state)


def reseed_generator(item: Any, seed: int, *parts: int) -> None:
    """Begin a new stream that depends on ``seed`` (63 bits) and ``parts`` alone."""
    fresh = mixed_seed(seed, *parts)
    kind = generator_type(item) or ""
    if kind.startswith("torch"):
        item.manual_seed(fresh)
    elif kind == "python":
        item.seed(fresh)
    elif kind.startswith("numpy:"):
        item.bit_generator.state = type(item.bit_generator)(fresh).state
    else:
        item.seed(fresh & 0xFFFFFFFF)


def is_same_state(one: Any, other: Any) -> bool:
    """Whether two captured states are one stream at one place."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same_state(one[key], other[key]) for key in one)
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, list | tuple):
        if set(map(type, one)) == {int}:  # Python's 625 numbers, at every save: not one call for each
            return list(one) == list(other)
        return len(one) == len(other) and all(map(is_same_state, one, other))
    return bool(one == other)
