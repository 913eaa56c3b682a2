"""The self-test of saves: what was sealed is read back and compared with what the live tensors were.

The digests of the live tensors are taken from the tensors themselves, not from the copy, while they may not
change yet: after the copy on the capture thread, or before the save returns (blocking, and on CUDA). So they
find what the checksums of chunks cannot: a copy that went wrong before its checksum was made.

Costs: a pass over the state at xxh3 speed at each save (on CUDA also a second copy to the host, during which
the training thread waits), and reading the sealed segment from NVMe once. The arena is free only after that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash

from ckpt.digest import digest
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks.leaves import FlatState
from ckpt_trainer_hooks.snapshot import Copies, SnapshotPlan

__all__ = ["SelfTest", "digest_of", "selftest_wanted"]

_log = get_logger("selftest")
_BLOCK_NBYTES = 8 << 20


def selftest_wanted(given: bool | None) -> bool:
    """Return ``given``, else whether ``CKPT_SELFTEST`` asks for it."""
    return os.environ.get("CKPT_SELFTEST", "0") not in ("", "0") if given is None else given


def digest_of(tensor: torch.Tensor) -> bytes:
    """Digest of the elements in row-major order. Waits for the device; copies one tensor at most."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return digest(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else digest(b"")


@dataclass(slots=True)
class _Expected:
    """What must be found in one sealed segment."""

    ident: CheckpointId
    plan: SnapshotPlan
    values: tuple[bytes, bytes]
    digests: dict[str, bytes] = field(default_factory=dict)


class SelfTest:
    """Checks of one rank's saves, one after the other on a thread of its own.

    Args:
        staging: staging directory of the node.
        run_key: the run's folder in it.
        rank: global rank.
        failed: called on that thread with sequence and error of a save that is not what it should be.
    """

    def __init__(
        self, staging: Path, run_key: str, rank: int, failed: Callable[[int, CkptError], None]
    ) -> None:
        self._staging = StagingDir(staging)
        self._run_key = run_key
        self._rank = rank
        self._failed = failed
        self._lock = threading.Lock()
        self._expected: dict[int, _Expected] = {}  # guarded by self._lock; by sequence
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-selftest")

    def begin(
        self, sequence: int, ident: CheckpointId, plan: SnapshotPlan, flat: FlatState
    ) -> Callable[[Copies], None]:
        """Expect a save; returns what takes the digests of the live tensors of some copies."""
        values = (_bytes_of(flat.values), _bytes_of(flat.rank_values))
        expected = _Expected(ident, plan, values)
        with self._lock:
            self._expected[sequence] = expected

        def witness(copies: Copies) -> None:
            for name, source in zip(copies.names, copies.sources, strict=True):
                expected.digests[name] = digest_of(source)

        return witness

    def drop(self, sequence: int) -> None:
        """Expect it no longer: the save has failed."""
        with self._lock:
            self._expected.pop(sequence, None)

    def after_check(self, sequence: int, then: Callable[[], None]) -> None:
        """Check the save, which is sealed, unless that was done; call ``then`` if it was found right."""

        def work() -> None:
            if self._check(sequence):
                then()

        try:
            self._thread.submit(work)
        except RuntimeError:  # closed
            then()

    def finish(self) -> None:
        """Check all that is left and wait; every save must be over, well or badly."""
        with self._lock:
            left = list(self._expected)
        for sequence in left:
            self.after_check(sequence, lambda: None)
        with contextlib.suppress(RuntimeError):
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish the checks that have begun; the others are reported as not made."""
        self._thread.shutdown(wait=True)
        with self._lock:
            left, self._expected = self._expected, {}
        for expected in left.values():
            event(
                _log,
                logging.WARNING,
                "selftest.not_checked",
                checkpoint=expected.ident,
                reason="the manager was closed before it was sealed",
            )

    def _check(self, sequence: int) -> bool:
        with self._lock:
            expected = self._expected.pop(sequence, None)
        if expected is None:
            return True
        try:
            self._compare(expected)
        except NotFoundError as error:
            event(
                _log, logging.WARNING, "selftest.not_checked", checkpoint=expected.ident, reason=error.message
            )
        except CkptError as error:
            self._failed(sequence, error)
            return False
        except Exception as cause:  # noqa: BLE001 - the border of a thread: the error goes to the handle
            self._failed(sequence, CkptError("the self-test itself failed", cause=repr(cause)))
            return False
        else:
            event(_log, logging.INFO, "selftest.passed", checkpoint=expected.ident)
        return True

    def _compare(self, expected: _Expected) -> None:
        index = self._staging.read_index(self._run_key, expected.ident, self._rank)
        wrong = []
        if list(index.tensors) != expected.plan.save.tensor_entries():
            wrong.append("the list of tensors")
        if (_bytes_of(index.state), _bytes_of(index.rank_state)) != expected.values:
            wrong.append("the plain values")
        path = self._staging.segment_path(self._run_key, expected.ident, self._rank)
        try:
            with path.open("rb", buffering=0) as file:
                wrong += [
                    array.name
                    for array in expected.plan.save.arrays
                    if _digest_in(file, array.start, array.nbytes) != expected.digests.get(array.name)
                ]
        except FileNotFoundError as error:
            raise NotFoundError("the sealed segment has left the staging directory", path=path) from error
        except OSError as error:
            raise CorruptError(
                "the sealed segment cannot be read back", code="selftest", path=path, reason=error.strerror
            ) from error
        if wrong:
            raise CorruptError(
                "self-test failed: what was sealed is not what the live state was. The checkpoint may be "
                "committed all the same: delete it, and suspect memory, driver or disk of this node",
                code="selftest",
                tensor=wrong[0],
                tensors=wrong[:20],
                count=len(wrong),
            )


def _bytes_of(value: object) -> bytes:
    return value.SerializeToString(deterministic=True)  # type: ignore[attr-defined, no-any-return]


def _digest_in(file: BinaryIO, start: int, nbytes: int) -> bytes:
    """Digest of a range of a file; of what there is of it, where it is cut short."""
    state = xxhash.xxh3_128()
    block = memoryview(bytearray(min(nbytes, _BLOCK_NBYTES)))
    file.seek(start)
    left = nbytes
    while left:
        count = file.readinto(block[: min(left, len(block))])  # type: ignore[attr-defined]
        if not count:
            break
        state.update(block[:count])
        left -= count
    return state.digest()
