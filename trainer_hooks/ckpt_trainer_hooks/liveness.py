"""How far this rank is, shown to its flusher through shared memory, so that a hang or a slow rank is seen.

The training thread stores a few words at each change of phase. A thread looks at the training thread a few
times per second: where it is, and whether it waits in a collective. So the last place is known even if the
process is stopped in the next moment. Nothing here blocks the training thread or calls the kernel for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from types import FrameType

from ckpt.digest import digest_hex
from ckpt.errors import InvalidInputError
from ckpt.storage.procfs import thread_cpu_ticks
from ckpt.storage.pulse import PHASE_NAME_MAX, STACKS_SIGNAL, PulseWriter
from ckpt_proto.v1 import staging_pb2
from ckpt_trainer_hooks.compat import collective_sequence

__all__ = ["TICK_S", "Pulse"]

TICK_S = 0.25
_KEPT_STEPS = 16
_KEPT_SAMPLES = 60  # 15 s
_FRAMES = 12
_FRAMES_SHOWN_SHORT = 3
_COMPUTES = 0.3  # share of a core from which on a thread is said to compute
# The innermost Python frame of a thread that waits for other ranks. Source: torch 2.6 to 2.13.
_COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    "torch/distributed/algorithms/join.py",
)
_AUTOGRAD_FILE = "torch/autograd/graph.py"  # DDP and FSDP wait inside backward, in C++
_stacks_fd: int | None = None


class Pulse:
    """Written by the training thread (:meth:`enter`, :meth:`completed`) and a ticking one (:meth:`tick`).

    Args:
        run_key: folder of the run in the staging directory.
        rank: global rank.
        world_size: number of ranks.

    Attributes:
        fds: (pulse, stacks) for the flusher; the second is None where stacks cannot be had.
    """

    def __init__(self, *, run_key: str, rank: int, world_size: int) -> None:
        self._writer = PulseWriter()
        self.fds: tuple[int, int | None] = (self._writer.fd, _register_stacks())
        self._details = staging_pb2.RankPulse(
            run_key=run_key, rank=rank, world_size=world_size, pid=os.getpid(), node=socket.gethostname()
        )
        self._names: dict[str, bytes] = {}
        self._phase, self._step, self._moves = "start", 0, 0
        self._moved_ns = time.monotonic_ns()
        self._spent: dict[str, int] = {}  # ns by phase, of the step under way
        self._whole: dict[str, int] = {}  # of all steps but the first, which is in the time of a restart
        self._under_way: tuple[str, int, dict[str, int]] | None = (
            None  # phase, since when, _whole; read as one
        )
        self._steps: deque[dict[str, int]] = deque(maxlen=_KEPT_STEPS)
        self._counts = False  # whether the step under way is to be measured
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self._samples: deque[bool] = deque(maxlen=_KEPT_SAMPLES)
        self._cpu = (time.monotonic(), thread_cpu_ticks(self._native))
        self._lock = threading.Lock()  # of the writer's end
        self._is_closed = False  # guarded by self._lock
        self.enter("start")

    # --- the training thread ---

    def begin(self, attempt: int, step: int, peers: tuple[int, ...]) -> None:
        """A new attempt starts at ``step``; ``peers`` are the ranks that do the same work as this one."""
        self._step = step
        self._details.attempt = attempt
        self._details.cohort = digest_hex(repr(peers).encode())[:8]
        self._steps.clear()
        self._samples.clear()
        self._whole, self._under_way = {}, None
        self._counts = False
        self._thread, self._native = threading.get_ident(), threading.get_native_id()
        self.enter("train")

    def enter(self, phase: str) -> None:
        """The training thread begins ``phase``."""
        now = time.monotonic_ns()
        ended, spent = self._phase, now - self._moved_ns
        self._spent[ended] = self._spent.get(ended, 0) + spent
        if self._counts:
            self._whole = {**self._whole, ended: self._whole.get(ended, 0) + spent}
            self._under_way = (phase, now, self._whole)
        self._phase, self._moved_ns = phase, now
        self._moves += 1
        name = self._names.get(phase) or self._names.setdefault(phase, _encoded(phase))
        if not self._is_closed:
            self._writer.progress(self._step, self._moves, now, name)

    def completed(self, step: int, phase: str) -> None:
        """``step`` optimizer steps are complete; the thread goes on with ``phase``."""
        self._step = step
        self.enter(phase)
        if self._counts:  # the time before the first step was not one
            self._steps.append(self._spent)
        self._spent, self._counts = {}, True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is phase ``name``; afterwards the phase before goes on."""
        before = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    @property
    def step_s(self) -> float:
        """Median duration of the last steps in seconds; 0.0 before the second."""
        steps = list(self._steps)
        return median(sum(step.values()) for step in steps) * 1e-9 if steps else 0.0

    # --- another thread ---

    def tick(self) -> None:
        """Look at the training thread and show what is seen."""
        frame = sys._current_frames().get(self._thread)
        stack = _stack(frame)
        del frame
        computes = self._computes()
        waits = bool(stack) and (
            stack[0][0].endswith(_COLLECTIVE_FILES) or (stack[0][0].endswith(_AUTOGRAD_FILE) and not computes)
        )
        self._samples.append(waits)
        pulse = self._details
        pulse.waits, pulse.computes = waits, computes
        pulse.collectives = collective_sequence()
        pulse.where = _text(stack[:_FRAMES_SHOWN_SHORT])
        pulse.stacks = "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in stack)
        self._add_durations(pulse)
        with self._lock:
            if not self._is_closed:
                self._writer.details(pulse, time.monotonic_ns())

    def close(self) -> None:
        """Release the memory. The flusher hears of the end elsewhere."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._writer.close()

    def _computes(self) -> bool:
        before_s, before = self._cpu
        self._cpu = (time.monotonic(), thread_cpu_ticks(self._native))
        elapsed = (self._cpu[0] - before_s) * os.sysconf("SC_CLK_TCK")
        return elapsed > 0 and (self._cpu[1] - before) / elapsed > _COMPUTES

    def _add_durations(self, pulse: staging_pb2.RankPulse) -> None:
        steps, samples = list(self._steps), list(self._samples)
        pulse.step_s = self.step_s
        pulse.busy_s = pulse.step_s * (1 - sum(samples) / len(samples))
        pulse.phase_s.clear()
        for name in {name for step in steps for name in step}:
            pulse.phase_s[name] = median(step.get(name, 0) for step in steps) * 1e-9
        pulse.spent_s.clear()
        if self._under_way is not None:
            phase, since, whole = self._under_way
            for name, spent in {**whole, phase: whole.get(phase, 0) + time.monotonic_ns() - since}.items():
                pulse.spent_s[name] = spent * 1e-9


def _stack(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of the innermost frames of a running thread, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _FRAMES:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found


def _text(frames: list[tuple[str, int, str]]) -> str:
    return " < ".join(f"{name} ({os.path.basename(file)}:{line})" for file, line, name in frames)  # noqa: PTH119


def _encoded(phase: str) -> bytes:
    name = phase.encode()
    if not 0 < len(name) <= PHASE_NAME_MAX:
        raise InvalidInputError(
            "a phase needs a name, and a short one", phase=phase, largest_nbytes=PHASE_NAME_MAX
        )
    return name


def _register_stacks() -> int | None:
    """Let a signal write the stacks of all threads to a memfd, also where the interpreter is blocked.

    The flusher sends it, once per hang. Not where the program uses that signal itself.
    """
    global _stacks_fd
    if _stacks_fd is None and signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
        _stacks_fd = os.memfd_create("ckpt-stacks", os.MFD_CLOEXEC)
        faulthandler.register(STACKS_SIGNAL, file=_stacks_fd, all_threads=True, chain=False)
    return _stacks_fd
