"""Run a function on several ranks: real processes, real gloo, a hard time limit, every rank's error."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["RanksError", "run_ranks"]


# Imported once by the process that all ranks are forked from: importing torch takes seconds of CPU per
# process. No thread is started by these imports, so forking after them is safe.
_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch._dynamo",
    "numpy",
]


class RanksError(AssertionError):
    """At least one rank failed; the message has every rank's traceback."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 150.0,
    may_die: frozenset[int] = frozenset(),
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, world, *args)`` in ``world`` new processes with a gloo group.

    Args:
        world: number of ranks.
        function: importable by name; its result must be picklable.
        args: passed on.
        timeout_s: of the whole run; afterwards every process is killed and RanksError raised.
        may_die: ranks that may end without a result (killed on purpose).
        env: added to the environment of every rank.

    Returns:
        The results by rank; None for a rank that died and may.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results: Any = context.Queue()
    port = _free_port()
    processes = [
        context.Process(
            target=_rank_main,
            args=(rank, world, port, function, args, results, env or {}, sys.path),
            daemon=False,
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(world, processes, results, timeout_s, may_die)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def _collect(
    world: int, processes: list[Any], results: Any, timeout_s: float, may_die: frozenset[int]
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    found: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(found) + len(errors) < world:
        try:
            rank, ok, value = results.get(timeout=0.2)
            (found if ok else errors)[rank] = value
            continue
        except queue.Empty:
            pass
        for rank, process in enumerate(processes):
            if rank not in found and rank not in errors and not process.is_alive() and results.empty():
                if rank in may_die:
                    found[rank] = None
                else:
                    errors[rank] = f"process ended with exit code {process.exitcode} and no result"
        if time.monotonic() > deadline:
            silent = [rank for rank in range(world) if rank not in found and rank not in errors]
            raise RanksError(f"ranks {silent} did not finish in {timeout_s} s\n" + _text(errors))
    if errors:
        raise RanksError(_text(errors))
    return [found[rank] for rank in range(world)]


def _text(errors: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))


def _rank_main(
    rank: int,
    world: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
    env: dict[str, str],
    path: list[str],
) -> None:
    sys.path[:] = path
    os.environ.update(env)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
            )
        results.put((rank, True, function(rank, world, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
    # Not through the interpreter's shutdown: gloo's threads may outlive their peers' sockets there.
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
