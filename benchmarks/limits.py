"""What this machine can do at all: the denominators of every ratio, measured in the same run.

Also a program: ``python -m benchmarks.limits NBYTES`` reads ``THREADS CHUNK_NBYTES IN_PLACE PATH`` lines from
standard input, writes NBYTES bytes to each path, durably, and answers with the seconds it took. That is the
writer that runs beside a training loop as the floor of the effective cost: a process without torch.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckpt.storage.direct import DirectFile, aligned_buffer, round_up
from ckpt.storage.durable import fsync_dir

__all__ = ["READERS", "WRITERS", "RawFile", "WriterProcess"]

_MIB = 1 << 20
# name: (threads, bytes per request, over an existing file). The fastest differs from disk to disk.
WRITERS = {
    "raw direct writer, 4 x 8 MiB": (4, 8 * _MIB, False),
    "raw direct writer, 16 x 1 MiB": (16, _MIB, False),
    "raw direct writer, 4 x 8 MiB, in place": (4, 8 * _MIB, True),
}
# name: (threads, bytes per request, O_DIRECT)
READERS = {
    "raw direct reader, 16 x 4 MiB": (16, 4 * _MIB, True),
    "raw buffered reader, 2 x 4 MiB": (2, 4 * _MIB, False),
}


class RawFile:
    """One file of ``nbytes``, written from and read into one warm buffer by threads that do nothing else."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(nbytes)
        self._buffer = aligned_buffer(self.nbytes)
        pattern = os.urandom(_MIB)
        for start in range(0, self.nbytes, _MIB):
            part = self._buffer[start : start + _MIB]
            part[:] = pattern[: len(part)]

    def write(self, path: Path, threads: int, chunk_nbytes: int, *, in_place: bool = False) -> None:
        """Write the file and make it durable (fdatasync, folder); a new one unless ``in_place``."""
        flags = os.O_WRONLY | os.O_CREAT | (0 if in_place else os.O_TRUNC)
        file = DirectFile(path, flags)
        try:
            if not in_place:
                file.allocate(self.nbytes)
            self._each_part(threads, chunk_nbytes, file.write_all)
            os.fdatasync(file.fd)
        finally:
            file.close()
        fsync_dir(path.parent)

    def read(self, path: Path, threads: int, chunk_nbytes: int, *, direct: bool) -> None:
        """Read the whole file into the buffer."""
        file = DirectFile(path, os.O_RDONLY, direct=direct)
        try:
            self._each_part(threads, chunk_nbytes, file.read_upto)
        finally:
            file.close()

    def _each_part(self, threads: int, chunk_nbytes: int, work: Callable[[memoryview, int], object]) -> None:
        starts = iter(range(0, self.nbytes, chunk_nbytes))
        lock = threading.Lock()

        def drain() -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                work(self._buffer[start : start + chunk_nbytes], start)

        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(drain) for _ in range(threads)]:
                future.result()


class WriterProcess:
    """The raw writer in a process of its own.

    Args:
        nbytes: written each time.
        niceness: of the process.
    """

    def __init__(self, nbytes: int, niceness: int = 0) -> None:
        self._process = subprocess.Popen(
            ["nice", "-n", str(niceness), sys.executable, "-m", "benchmarks.limits", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._answer()  # it is up and its buffer is warm

    def begin(self, path: Path, threads: int, chunk_nbytes: int, *, in_place: bool = False) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{threads} {chunk_nbytes} {int(in_place)} {path}\n")

    def ready(self) -> bool:
        """Return whether the write is over."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def finish(self) -> float:
        """Wait for the write that was begun; return its seconds."""
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the raw writer process died")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _serve(nbytes: int) -> None:
    raw = RawFile(nbytes)
    print(0.0, flush=True)
    for line in sys.stdin:
        threads, chunk_nbytes, in_place, path = line.rstrip("\n").split(" ", 3)
        began = time.perf_counter()
        raw.write(Path(path), int(threads), int(chunk_nbytes), in_place=in_place == "1")
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
