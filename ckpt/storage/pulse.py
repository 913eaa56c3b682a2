"""The pulse: shared memory in which a trainer shows how far it is, and which its flusher reads.

The training thread only stores a few words here, with no lock, no system call and no disk behind it (the
memory belongs to a memfd). A reader that meets a half-written record tries again, and keeps the last good one
where the writer was stopped in the middle.

Layout, little-endian: two records, each behind a guard that is odd while the record is being written.

====== ==== ==========================================================
offset size content
====== ==== ==========================================================
0      4    guard of the progress record; written by the training thread
8      8    steps completed
16     8    changes of phase
24     8    when that was, CLOCK_MONOTONIC in nanoseconds
32     24   name of the phase, UTF-8, padded with zeros
64     4    guard of the details; written by another thread of the trainer
68     4    size of the details
72     8    when they were written, CLOCK_MONOTONIC in nanoseconds
80     ..   a RankPulse message: what changes slowly, and stacks
====== ==== ==========================================================
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ckpt.errors import InvalidInputError
from ckpt_proto.v1 import staging_pb2

__all__ = ["PHASE_NAME_MAX", "PULSE_NBYTES", "STACKS_SIGNAL", "Progress", "PulseReader", "PulseWriter"]

PULSE_NBYTES = 16 << 10
PHASE_NAME_MAX = 24  # bytes
# Makes a trainer write the stacks of its threads. A real-time signal, which hardly anybody uses.
STACKS_SIGNAL = signal.SIGRTMIN + 5
_PROGRESS = struct.Struct("<QQQ24s")
_GUARD = struct.Struct("<I")
_DETAILS = struct.Struct("<IQ")
_PROGRESS_AT = 8
_DETAILS_GUARD_AT = 64
_DETAILS_AT = 68
_BLOB_AT = 80
_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the training thread is.

    Attributes:
        step: optimizer steps completed.
        moves: changes of phase so far; a thread that stands still changes nothing.
        moved_ns: CLOCK_MONOTONIC of the last change.
        phase: its name.
    """

    step: int
    moves: int
    moved_ns: int
    phase: str


class PulseWriter:
    """The trainer's side: :meth:`progress` for the training thread, :meth:`details` for one other thread.

    Attributes:
        fd: the memfd, close-on-exec; owned by this object.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("ckpt-pulse", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, PULSE_NBYTES)
        self._memory = mmap.mmap(self.fd, PULSE_NBYTES)
        self._guard = self._details_guard = 0

    def progress(self, step: int, moves: int, moved_ns: int, phase: bytes) -> None:
        """Store where the training thread is; ``phase`` is UTF-8 of at most PHASE_NAME_MAX bytes."""
        self._guard += 1
        _GUARD.pack_into(self._memory, 0, self._guard & 0xFFFFFFFF)
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, step, moves, moved_ns, phase)
        self._guard += 1
        _GUARD.pack_into(self._memory, 0, self._guard & 0xFFFFFFFF)

    def details(self, pulse: staging_pb2.RankPulse, at_ns: int) -> None:
        """Store the slow part. Raises InvalidInputError where it does not fit; then the old one stays."""
        data = pulse.SerializeToString()
        if len(data) > PULSE_NBYTES - _BLOB_AT:
            raise InvalidInputError(
                "the pulse is too large", nbytes=len(data), largest=PULSE_NBYTES - _BLOB_AT
            )
        self._details_guard += 1
        _GUARD.pack_into(self._memory, _DETAILS_GUARD_AT, self._details_guard & 0xFFFFFFFF)
        _DETAILS.pack_into(self._memory, _DETAILS_AT, len(data), at_ns)
        self._memory[_BLOB_AT : _BLOB_AT + len(data)] = data
        self._details_guard += 1
        _GUARD.pack_into(self._memory, _DETAILS_GUARD_AT, self._details_guard & 0xFFFFFFFF)

    def close(self) -> None:
        """Release the memory; what a reader has mapped stays."""
        self._memory.close()
        os.close(self.fd)


class PulseReader:
    """The flusher's side.

    Args:
        fd: of the memfd; closed here, once it is mapped.

    Raises:
        InvalidInputError: not a pulse.
    """

    def __init__(self, fd: int) -> None:
        try:
            if os.fstat(fd).st_size != PULSE_NBYTES:
                raise InvalidInputError("not a pulse", nbytes=os.fstat(fd).st_size)
            self._memory = mmap.mmap(fd, PULSE_NBYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._progress = Progress(step=0, moves=0, moved_ns=0, phase="")
        self._details = (staging_pb2.RankPulse(), 0)

    def progress(self) -> Progress:
        """Where the training thread is, or was when it could last be read."""
        for _ in range(_TRIES):
            before = self._guard(0)
            step, moves, moved_ns, phase = _PROGRESS.unpack_from(self._memory, _PROGRESS_AT)
            if before % 2 == 0 and self._guard(0) == before:
                name = phase.rstrip(b"\0").decode(errors="replace")
                self._progress = Progress(step=step, moves=moves, moved_ns=moved_ns, phase=name)
                break
        return self._progress

    def details(self) -> tuple[staging_pb2.RankPulse, int]:
        """The slow part and when it was written (CLOCK_MONOTONIC, nanoseconds; 0: never)."""
        for _ in range(_TRIES):
            before = self._guard(_DETAILS_GUARD_AT)
            nbytes, at_ns = _DETAILS.unpack_from(self._memory, _DETAILS_AT)
            data = self._memory[_BLOB_AT : _BLOB_AT + min(nbytes, PULSE_NBYTES - _BLOB_AT)]
            if before % 2 == 0 and self._guard(_DETAILS_GUARD_AT) == before:
                try:
                    self._details = (staging_pb2.RankPulse.FromString(data), at_ns)
                except DecodeError:
                    continue
                break
        return self._details

    def _guard(self, at: int) -> int:
        guard: int = _GUARD.unpack_from(self._memory, at)[0]
        return guard
