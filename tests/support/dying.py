"""A process that is killed (SIGKILL, by itself) right before a given call of a given boundary.

The kernel kills it: no handler, no ``finally``, no buffer is flushed. Where it stands is told by tracing the
lines of the boundaries that tests.support.boundaries has found in the source.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ckpt.format.ids import CheckpointId
from tests.support.boundaries import Site

__all__ = ["Death", "lead"]

Said = Callable[[str, CheckpointId], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a life went.

    Attributes:
        status: of waitpid: a signal, or 0.
        promised: what it had said until then.
        passed: the boundaries it came to, in order: each with those that it was called from, innermost first.
    """

    status: int
    promised: dict[str, set[CheckpointId]]
    passed: tuple[tuple[str, ...], ...]


def lead(live: Callable[[Said], None], sites: Sequence[Site], *, at: int = 0) -> Death:
    """Run ``live`` in a forked child; at the ``at``-th boundary (from 1; 0: never) it is killed.

    The census of what it passed is complete only where it was not killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _live(live, sites, at, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    promised: dict[str, set[CheckpointId]] = {}
    passed: list[tuple[str, ...]] = []
    for kind, *rest in map(json.loads, lines):
        if kind == "passed":
            passed += [tuple(labels) for labels in rest[0]]
        else:
            promised.setdefault(kind, set()).add(CheckpointId(*rest))
    return Death(status=status, promised=promised, passed=tuple(passed))


def _live(live: Callable[[Said], None], sites: Sequence[Site], at: int, writer: int) -> None:
    """The child. Never returns."""
    code = 1
    try:
        tracer = _Tracer(sites, at)
        if sites:
            threading.settrace(tracer.enter)
            sys.settrace(tracer.enter)
        live(lambda what, ident: _tell(writer, [what, ident.step, ident.attempt]))
        sys.settrace(None)
        _tell(writer, ["passed", tracer.passed])
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(code)


def _tell(writer: int, message: list[Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


class _Tracer:
    def __init__(self, sites: Sequence[Site], at: int) -> None:
        self._at = at
        self._lock = threading.Lock()
        self._labels: dict[str, dict[int, str]] = {}
        for site in sites:
            self._labels.setdefault(site.path, {})[site.first] = site.label
        self.passed: list[list[str]] = []

    def _of(self, frame: FrameType) -> dict[int, str]:
        return self._labels.get(frame.f_code.co_filename, {})

    def enter(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self._line if self._of(frame) else None

    def _line(self, frame: FrameType, event: str, _argument: object) -> Any:
        label = self._of(frame).get(frame.f_lineno) if event == "line" else None
        if label is not None:
            labels = [label]
            outer = frame.f_back
            while outer is not None:
                if (found := self._of(outer).get(outer.f_lineno)) is not None:
                    labels.append(found)
                outer = outer.f_back
            with self._lock:
                self.passed.append(labels)
                if len(self.passed) == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self._line
