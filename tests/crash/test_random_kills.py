"""``kill -9`` of anything at any instant: latest restores bit by bit and is never older than the last commit.

The instants are drawn from a seed that is printed with a failure; CKPT_SEED=... repeats them (the machine's
timing, of course, is never the same again). More of them: ``python -m tests.shows kills --kills 200``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shows.kills import run_chains
from tests.support.chain import Zygote
from tests.support.s3 import Ministack

SEED = int(os.environ.get("CKPT_SEED") or random.SystemRandom().randrange(10**6))
# Per chain; two run at once, since each waits for its processes half of the time.
INSTANTS_ON_DIRECTORY, INSTANTS_ON_S3 = 25, 10


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


@pytest.mark.fault(
    "Death of a process",
    "trainer, flusher, server or store at any instant ({on_s3})",
    "SIGKILL of one or several at random instants",
    "every restore right bit by bit and never older than the last commit; every listed checkpoint whole",
)
@pytest.mark.slow
@pytest.mark.timeout(400)  # about 25 s on two idle cores
@pytest.mark.parametrize("on_s3", [False, True], ids=["directory", "s3-killed-too"])
def test_latest_restores_after_a_kill_of_anything_at_any_instant(
    tmp_path: Path, zygote: Zygote, s3_server: Ministack, on_s3: bool, tried: Callable[[int], None]
) -> None:
    """Cases I01, I67."""
    print(f"CKPT_SEED={SEED}")
    seeds = [f"{SEED}/{int(on_s3)}{number}" for number in range(2)]
    instants = INSTANTS_ON_S3 if on_s3 else INSTANTS_ON_DIRECTORY
    chains = run_chains(tmp_path, zygote, s3_server if on_s3 else None, seeds, instants)
    killed = sum(sum(chain.killed.values()) for chain in chains)
    tried(killed)
    assert killed >= 2 * instants
