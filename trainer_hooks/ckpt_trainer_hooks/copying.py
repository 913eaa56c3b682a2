"""Copies of tensors in host memory at the speed of memory.

The C library's ``memmove`` is quicker than ``Tensor.copy_`` (8 against 6 GB/s on one thread, 12 against 10 on
two; 11 on one where a single range is large enough for it to store past the caches). What it cannot do (other
devices, strides, conversions) torch does.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence

import torch

__all__ = ["copy_tensors"]

_SPAN_MIN_NBYTES = 128 << 10  # below it, one call of torch for all is quicker than one call for each
_PIECE_NBYTES = 8 << 20  # of a span that threads share
_THREADS_MAX = 4  # a few saturate a socket's memory

_Span = tuple[int, int, int]  # address of the destination, of the source, bytes


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, threads: int) -> None:
    """Copy each source into the target of the same place, bit by bit. Releases the GIL while bytes move.

    Args:
        targets: contiguous, each of its source's shape and dtype; none overlaps another.
        sources: of any device and strides. Copies from devices are enqueued on the current stream.
        threads: how many may copy at once, this one included.
    """
    spans: list[_Span] = []
    rest: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if source.nbytes >= _SPAN_MIN_NBYTES and _is_span(target, source):
            spans.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            rest[0].append(target)
            rest[1].append(source)
    if rest[0]:
        with torch.no_grad():
            torch._foreach_copy_(*rest, non_blocking=True)
    _copy_spans(spans, min(threads, _THREADS_MAX))


def _is_span(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether ``source`` is one range of host memory that may be copied as it is."""
    return (
        source.device.type == "cpu"
        and target.device.type == "cpu"
        and source.dtype == target.dtype
        and source.is_contiguous()
        and target.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
        and source.data_ptr() != 0
    )


def _copy_spans(spans: list[_Span], threads: int) -> None:
    total = sum(nbytes for _, _, nbytes in spans)
    threads = min(threads, total // _PIECE_NBYTES)
    if threads <= 1:
        for span in spans:
            ctypes.memmove(*span)
        return
    pieces = iter([piece for span in spans for piece in _pieces(span)])
    lock = threading.Lock()

    def drain() -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            ctypes.memmove(*piece)

    helpers = [threading.Thread(target=drain, name="ckpt-copy") for _ in range(threads - 1)]
    with contextlib.suppress(RuntimeError):  # no more threads to be had: those there are do it all
        for helper in helpers:
            helper.start()
    drain()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()


def _pieces(span: _Span) -> list[_Span]:
    target, source, nbytes = span
    return [
        (target + start, source + start, min(_PIECE_NBYTES, nbytes - start))
        for start in range(0, nbytes, _PIECE_NBYTES)
    ]
