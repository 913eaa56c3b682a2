"""Copies into the arena: exact for every kind of tensor, whole spans shared by threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from ckpt_trainer_hooks import copying
from ckpt_trainer_hooks.copying import copy_tensors

LARGE = 3 * (64 << 10) + 5  # elements; as float32 well above what is copied tensor by tensor


def _strided() -> torch.Tensor:
    return torch.randn(2 * LARGE)[::2]


def _transposed() -> torch.Tensor:
    return torch.randn(512, 384).t()


def _conjugated() -> torch.Tensor:
    return torch.randn(LARGE, dtype=torch.complex64).conj()


def _negated() -> torch.Tensor:
    return torch.randn(LARGE, dtype=torch.complex64).conj().imag


SOURCES: list[Callable[[], torch.Tensor]] = [
    lambda: torch.randn(LARGE),
    lambda: torch.randn(LARGE, dtype=torch.float64)[7:],  # contiguous, not at the start of its storage
    lambda: torch.randn(LARGE).to(torch.bfloat16),
    lambda: torch.randint(0, 255, (LARGE,), dtype=torch.uint8),
    lambda: torch.randn(3),
    lambda: torch.tensor(2.5),
    lambda: torch.empty(0),
    _strided,
    _transposed,
    _conjugated,
    _negated,
]


@pytest.mark.parametrize("threads", [1, 3])
def test_every_source_arrives_bit_by_bit(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(copying, "_PIECE_NBYTES", 100_000)
    sources = [make() for make in SOURCES]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    copy_tensors(targets, sources, threads=threads)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.resolve_conj().resolve_neg())


def test_threads_share_the_work_and_no_more_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PIECE_NBYTES", 100_000)
    real = ctypes.memmove
    seen: set[int] = set()
    both = threading.Barrier(2, timeout=30)

    def watched(*span: int) -> int:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait()  # a piece each, or neither goes on
        return real(*span)

    monkeypatch.setattr(ctypes, "memmove", watched)
    source = torch.randn(LARGE)
    target = torch.zeros(LARGE)
    copy_tensors([target], [source], threads=2)
    assert torch.equal(target, source)
    assert len(seen) == 2


def test_copy_goes_on_alone_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying, "_PIECE_NBYTES", 100_000)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    source = torch.randn(LARGE)
    target = torch.zeros(LARGE)
    copy_tensors([target], [source], threads=4)
    assert torch.equal(target, source)
