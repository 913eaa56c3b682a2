"""``kill -9`` at every boundary of the code: each call that changes a file or the store, in every operation.

The boundaries are found in the source and listed in tests/support/boundaries.py. Each is the place of a death
in every run of the tests; where the life comes to it more than once, the instant is drawn (CKPT_SEED=...
repeats the draw). After the death: what is committed is whole and not older than promised, nothing partial
is visible, the next life saves to the end, and it leaves no debris.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import defaultdict
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


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be had: what the dead process wrote is in the page cache either way."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    path = MEMORY / f"ckpt-test-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def lead_in(root: Path, sites: list[Site], at: int = 0) -> Death:
    return lead(lambda said: Life(root, said).lead(), sites, at=at)


@pytest.fixture(scope="module")
def census(sites: list[Site], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Label -> when an undisturbed life comes to it, counted over all boundaries."""
    death = lead_in(tmp_path_factory.mktemp("census"), sites)
    assert death.status == 0
    when: dict[str, list[int]] = defaultdict(list)
    for number, labels in enumerate(death.passed, 1):
        when[labels[0]].append(number)
    return when


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


def test_every_listed_boundary_is_reached(census: dict[str, list[int]]) -> None:
    assert LABELS.keys() - census.keys() == set()


@pytest.mark.fault(
    "Death of a process",
    "killed in: {operation}",
    "SIGKILL right before each call of the code that changes a file or the store",
    "whole, nothing older than promised; the next life saves, and leaves no debris",
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_death_at_every_boundary(
    operation: str, root: Path, sites: list[Site], census: dict[str, list[int]], tried: Callable[[int], None]
) -> None:
    """Cases I01, I04."""
    tried(len(OPERATIONS[operation]))
    dice = random.Random(f"{SEED}/{operation}")
    for label in OPERATIONS[operation]:
        at = dice.choice(census[label])
        print(f"CKPT_SEED={SEED}: {label}, boundary {at}")
        root.mkdir(exist_ok=True)
        death = lead_in(root, sites, at)
        assert death.status == signal.SIGKILL
        check(root, death.promised)
        again = lead_in(root, [])
        assert again.status == 0
        check(root, again.promised)
        check_clean(root)
        shutil.rmtree(root)
