"""Whether compressing an upload pays, decided by measurement: the rate of the link against that of the codec.

Compression pays where a byte is compressed in less time than the bytes it spares take on the link:
1 / (codec * threads) < (1 - ratio) / link, with ``codec`` the raw bytes per second of one thread and
``ratio`` stored over raw size. The link is measured by uploads that go out raw; the codec by the chunks that
are compressed, or by a few samples where none are. Every so-many-th upload goes out raw, with samples, so
that a verdict does not outlive its reasons.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.clock import Clock
from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger

__all__ = ["COMPRESSION", "Compression", "Sending", "pays"]

_log = get_logger("server.compression")

COMPRESSION = ("auto", "on", "off")

_LEAST_SENT_NBYTES = 4 << 20  # below, a rate says more about latency than about the link
_REMEASURE_EVERY = 16  # uploads
_OLD_WEIGHT = 0.5  # of what was known, when something new is measured


def pays(*, link: float, codec: float, threads: int, ratio: float) -> bool:
    """Return whether compression pays.

    Args:
        link: bytes per second that the node's uploads get together.
        codec: raw bytes per second that one thread encodes.
        threads: threads that encode at once.
        ratio: stored size / raw size.
    """
    return 1.0 / (codec * threads) < (1.0 - ratio) / link


@dataclass(slots=True)
class Sending:
    """One upload under way. ``nbytes`` is set to what was sent when that is known."""

    compressed: bool
    nbytes: int = 0


class Compression:
    """Decides for the uploads of one run, and learns from them. Thread-safe.

    Args:
        threads: that encode at once.
        clock: to measure with.
        name: of the run, for the log.
    """

    def __init__(self, *, threads: int, clock: Clock, name: str) -> None:
        self.threads = threads
        self._clock = clock
        self._name = name
        self._lock = threading.Lock()
        self._link: float | None = None  # all below guarded by self._lock
        self._codec: float | None = None
        self._ratio: float | None = None
        self._verdict = False
        self._uploads = 0
        self._active = 0
        self._window_began = 0.0
        self._window_nbytes = 0
        self._window_raw = True

    def choose(self, wanted: str) -> bool:
        """Return whether the next upload is to be compressed, as ``wanted`` ("auto", "on", "off") has it."""
        if wanted not in COMPRESSION:
            raise InvalidInputError("not one of the allowed values", option="compression", value=wanted)
        if wanted != "auto":
            return wanted == "on"
        with self._lock:
            verdict = self._judge()
            self._uploads += 1
            return verdict and self._uploads % _REMEASURE_EVERY != 0

    def _judge(self) -> bool:
        if self._link is None or self._codec is None or self._ratio is None:
            return False
        verdict = pays(link=self._link, codec=self._codec, threads=self.threads, ratio=self._ratio)
        if verdict != self._verdict:
            self._verdict = verdict
            event(
                _log,
                logging.INFO,
                "compression.on" if verdict else "compression.off",
                run=self._name,
                link_mb_s=round(self._link / 1e6, 1),
                codec_mb_s=round(self._codec / 1e6, 1),
                threads=self.threads,
                ratio=round(self._ratio, 3),
            )
        return verdict

    @property
    def wants_samples(self) -> bool:
        """Whether raw uploads should encode a few chunks for the measurement."""
        with self._lock:
            return self._codec is None or self._uploads % _REMEASURE_EVERY == 0

    def encoded(self, *, raw_nbytes: int, stored_nbytes: int, seconds: float) -> None:
        """Learn from a chunk that was encoded."""
        if not raw_nbytes:
            return
        with self._lock:
            self._codec = _blend(self._codec, raw_nbytes / max(seconds, 1e-9))
            self._ratio = _blend(self._ratio, stored_nbytes / raw_nbytes)

    @contextlib.contextmanager
    def sending(self, *, compressed: bool) -> Iterator[Sending]:
        """Around an upload: learns the rate of the link from uploads that are raw, alone or side by side."""
        with self._lock:
            if self._active == 0:
                self._window_began, self._window_nbytes, self._window_raw = self._clock.monotonic(), 0, True
            self._active += 1
            self._window_raw &= not compressed
        current = Sending(compressed)
        try:
            yield current
        finally:
            with self._lock:
                self._active -= 1
                self._window_nbytes += current.nbytes
                if self._active == 0:  # side by side they share the link: the rate is that of all together
                    self._measure_link(self._clock.monotonic() - self._window_began)

    def _measure_link(self, elapsed_s: float) -> None:
        if self._window_raw and self._window_nbytes >= _LEAST_SENT_NBYTES and elapsed_s > 0:
            self._link = _blend(self._link, self._window_nbytes / elapsed_s)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else _OLD_WEIGHT * old + (1 - _OLD_WEIGHT) * new
