"""How much two arrays of bits differ, as numbers. Blocks of bounded size; NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt import dtypes
from ckpt.format.numbers import to_numbers
from ckpt.format.tensor_data import numpy_dtype

__all__ = ["Difference", "Tolerance"]

_BLOCK_ELEMENTS = 1 << 20  # of which some float64 temporaries are made


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A counts as equal to B where ``abs(a - b) <= atol + rtol * abs(b)``, or both are NaN."""

    atol: float = 0.0
    rtol: float = 0.0

    def holds(self, gap: float, right: float) -> bool:
        """Whether a difference of ``gap`` to ``right`` is within it."""
        return gap <= self.atol + self.rtol * abs(right)


@dataclass(slots=True)
class Difference:
    """What is known of the differences of two arrays; :meth:`add` adds parts of them.

    Attributes:
        differing: elements whose bits differ.
        beyond: those of them that a tolerance does not cover; all of them without one.
        nans: those that are NaN on one side only.
        max_abs: largest absolute difference of two numbers; inf where one is infinite; 0 for elements
            that differ in bits alone (0.0 and -0.0, or two NaN).
        max_rel: largest absolute difference over the larger magnitude of the two.
    """

    differing: int = 0
    beyond: int = 0
    nans: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def add(
        self, left: NDArray[Any], right: NDArray[Any], dtype: str, tolerance: Tolerance | None = None
    ) -> None:
        """Add two C-contiguous arrays of bits of one shape.

        Args:
            left, right: elements of the item size of ``dtype``.
            dtype: torch's name.
            tolerance: see :class:`Tolerance`; None: bits must be equal.
        """
        wanted = numpy_dtype(dtype)
        a, b = (side.reshape(-1).view(_bits(dtype)) for side in (left, right))
        width = len(a) // max(1, left.size)  # words per element
        step = _BLOCK_ELEMENTS * width
        for start in range(0, len(a), step):
            mine, theirs = a[start : start + step], b[start : start + step]
            unequal = mine != theirs
            if not unequal.any():
                continue
            if width > 1:
                unequal = np.repeat(unequal.reshape(-1, width).any(axis=1), width)
            self._add_unequal(
                to_numbers(mine[unequal].view(wanted), dtype),
                to_numbers(theirs[unequal].view(wanted), dtype),
                tolerance,
            )

    def _add_unequal(self, a: NDArray[Any], b: NDArray[Any], tolerance: Tolerance | None) -> None:
        count = len(a)
        self.differing += count
        with np.errstate(all="ignore"):
            gap, size, size_b = _gaps(a, b)
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            one_nan, both_nan = nan_a ^ nan_b, nan_a & nan_b
            numbers = ~(nan_a | nan_b)
            gap = np.where(numbers & np.isnan(gap), np.inf, gap)  # of infinities
            rel = np.where(size > 0, gap / np.where(size > 0, size, 1), 0.0)
            rel = np.where(np.isinf(gap), np.inf, rel)
            if tolerance is None:
                beyond = count
            else:
                limit = tolerance.atol + tolerance.rtol * size_b
                within = (numbers & (gap <= limit) & ~np.isinf(gap)) | both_nan
                beyond = int((~within).reshape(count, -1).any(axis=1).sum())
        self.beyond += beyond
        self.nans += int(one_nan.reshape(count, -1).any(axis=1).sum())
        if numbers.any():
            self.max_abs = max(self.max_abs, float(gap[numbers].max()))
            self.max_rel = max(self.max_rel, float(rel[numbers].max()))


def _bits(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"u{min(8, dtypes.itemsize(dtype))}")


def _gaps(a: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return |a - b|, max(|a|, |b|) and |b| as float64."""
    if a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        # Exact before it is rounded: subtracted as unsigned, which wraps to the right result.
        gap = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
        size_b = np.abs(b.astype(np.float64))
        return gap.astype(np.float64), np.maximum(np.abs(a.astype(np.float64)), size_b), size_b
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    left, right = a.astype(kind), b.astype(kind)
    size_b = np.abs(right)
    return np.abs(left - right), np.maximum(np.abs(left), size_b), size_b
