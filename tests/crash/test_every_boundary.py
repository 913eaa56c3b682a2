"""``kill -9`` at every boundary of the code: each call that changes a file or the store, in every operation.

The boundaries are found in the source and listed in tests/support/boundaries.py. Each is the place of a death
in every run of the tests; where the life comes to it more than once, the time is drawn (CKPT_SEED=...
repeats the draw). After the death: what is committed is whole and not older than promised, nothing partial
is visible, the next life saves to the end, and it leaves no debris.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.boundaries import EXEMPT, OPERATIONS, OUTSIDE, REPAIR, Site, found
from tests.support.dying import Death, lead
from tests.support.lifecycle import Life, check, check_clean

SEED = int(os.environ.get("CKPT_SEED") or random.SystemRandom().randrange(10**6))
MEMORY = Path("/dev/shm")
LABELS = {label: operation for operation, labels in OPERATIONS.items() for label in labels}


@pytest.fixture(scope="module")
def sites() -> list[Site]:
    return found()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where that can be had: what the dead process wrote is in the page cache either way.

    One for all lives: the names of all folders above are synced, so how deep it lies makes a difference.
    """
    path = (MEMORY if MEMORY.is_dir() else tmp_path_factory.mktemp("lives")) / f"ckpt-test-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def lead_in(root: Path, sites: list[Site], at: int = 0) -> Death:
    return lead(lambda said: Life(root, said).lead(), sites, at=at)


@pytest.fixture(scope="module")
def census(sites: list[Site], root: Path) -> Counter[str]:
    """Label -> how often an undisturbed life comes to it."""
    root.mkdir()
    death = lead_in(root, sites)
    shutil.rmtree(root)
    assert death.status == 0
    return Counter(labels[0] for labels in death.passed)


def test_every_change_in_the_code_is_listed(sites: list[Site]) -> None:
    in_code = {site.label for site in sites}
    listed = LABELS.keys() | EXEMPT.keys() | set().union(*REPAIR.values())
    assert in_code - listed == set(), "list it in tests/support/boundaries.py, where a test kills there"
    assert listed - in_code == set(), "no longer in the code"
    assert LABELS.keys() & EXEMPT.keys() == set()
    assert sum(map(len, OPERATIONS.values())) == len(LABELS), "listed twice"
    modules = {site.path for site in sites}
    assert not [
        name for name in OUTSIDE if any(path.endswith(f"{name.replace('.', '/')}.py") for path in modules)
    ]


def test_every_listed_boundary_is_reached(census: Counter[str]) -> None:
    assert LABELS.keys() - census.keys() == set()


@pytest.mark.fault(
    "Death of a process",
    "killed in: {operation}",
    "SIGKILL right before each call of the code that changes a file or the store",
    "whole, nothing older than promised; the next life saves, and leaves no debris",
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_death_at_every_boundary(
    operation: str, root: Path, sites: list[Site], census: Counter[str], tried: Callable[[int], None]
) -> None:
    """Cases I01, I04."""
    tried(len(OPERATIONS[operation]))
    dice = random.Random(f"{SEED}/{operation}")
    for label in OPERATIONS[operation]:
        at = dice.randint(1, census[label])
        print(f"CKPT_SEED={SEED}: {label}, time {at} of {census[label]}")
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        death = lead_in(root, [site for site in sites if site.label == label], at)  # counts this one only
        assert death.status == signal.SIGKILL
        check(root, death.promised)
        again = lead_in(root, [])
        assert again.status == 0
        check(root, again.promised)
        check_clean(root)
