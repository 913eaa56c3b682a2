"""What comes from the store damaged is read once more: it may have been damaged on its way here only.

Without that a bit that flips in transit makes a restore fall back to an older checkpoint, or sends somebody
to repair a checkpoint that is whole.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckpt.errors import CorruptError
from ckpt.events import event, get_logger

__all__ = ["read_again"]

_log = get_logger("fetch")
P = ParamSpec("P")
T = TypeVar("T")

_OF_BYTES = frozenset(
    {"digest", "magic", "version", "kind", "truncated", "trailing", "decode", "codec", "decrypt"}
)
"""Codes of damage that bytes show by themselves; what is gone, or contradicts something else, stays so."""


def read_again(read: Callable[P, T]) -> Callable[P, T]:
    """Make ``read`` (from the store, checked; CorruptError where it is damaged) try a second time."""

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except CorruptError as error:
            if error.code not in _OF_BYTES:
                raise
            event(_log, logging.WARNING, "fetch.read_again", error=error)
        return read(*args, **kwargs)

    return reading
