"""``kill -9`` of anything at any instant: latest restores bit by bit and is never older than the last commit.

The instants are drawn from a seed that is printed with a failure; CKPT_SEED=... repeats them (the machine's
timing, of course, is never the same again).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import list_checkpoints, load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from tests.support.chain import FLUSHER, SERVER, Life, Plan, Zygote, end_node, kill_all, poll, processes

SEED = int(os.environ.get("CKPT_SEED") or random.SystemRandom().randrange(10**6))
CHAINS = 4
TOGETHER = 2  # chains at once: each waits for its processes half of the time
INSTANTS = 25  # per chain
KEEP_LAST = 3

VICTIMS = {
    ("trainer",): 6,
    ("flusher",): 4,
    ("server",): 3,
    ("trainer", "flusher"): 3,
    ("trainer", "server"): 3,
    ("trainer", "flusher", "server"): 4,
}


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as running:
        yield running


@dataclass(slots=True)
class Chain:
    """One run and what is known of it, found by looking at plain files."""

    root: Path
    dice: random.Random
    reported: set[CheckpointId] = field(default_factory=set)  # commits that trainers were told of
    history: list[str] = field(default_factory=list)

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def store(self) -> Path:
        return self.root / "store" / "run"

    @property
    def url(self) -> str:
        return f"file://{self.store}"

    def plan(self, number: int) -> Plan:
        return Plan(
            url=self.url,
            staging=str(self.staging),
            report=str(self.root / f"life-{number:03}"),
            mode=self.dice.choice(["blocking", "overlapped"]),
            keep_last=KEEP_LAST,
        )

    def attempts(self) -> dict[int, CheckpointId | None]:
        """Number of each start -> what it resumed from."""
        found = {}
        for path in (self.store / "attempts").glob("*.json"):
            number = keys.parse_attempt_key(f"attempts/{path.name}")
            parent = json.loads(path.read_text())["parent"]
            assert number is not None
            found[number] = CheckpointId.parse(parent) if parent else None
        return found

    def commits(self) -> set[CheckpointId]:
        parsed = {
            keys.parse_manifest_key(f"{path.parent.name}/{path.name}")
            for path in (self.store / "manifests").glob("*")
        }
        return {ident for ident in parsed if ident is not None} | self.reported

    def floor(self) -> CheckpointId | None:
        """What a restore must at least give now: the last commit of the newest start, else its parent."""
        attempts = self.attempts()
        if not attempts:
            return None
        newest = max(attempts)
        own = [ident for ident in self.commits() if ident.attempt == newest]
        return max(own, default=attempts[newest])

    def note(self, life: Life) -> None:
        """Remember what a trainer has said of commits; it is over or about to be."""
        for restored in life.events("restored"):
            for committed in life.events("committed"):
                self.reported.add(CheckpointId(committed["step"], restored["attempt"]))

    def kill(self, victims: tuple[str, ...], life: Life) -> None:
        """In an order that is random too; what takes longest between two of them is a system call."""
        for victim in self.dice.sample(victims, len(victims)):
            if victim == "trainer":
                life.kill()
            else:
                kill_all({"flusher": FLUSHER, "server": SERVER}[victim], self.staging)


@pytest.mark.slow
@pytest.mark.timeout(400)  # about 50 s on two idle cores
@pytest.mark.parametrize("first", range(0, CHAINS, TOGETHER))
def test_latest_restores_after_a_kill_of_anything_at_any_instant(
    tmp_path: Path, zygote: Zygote, first: int
) -> None:
    print(f"CKPT_SEED={SEED}")
    chains = []
    for number in range(first, first + TOGETHER):
        root = tmp_path / f"chain-{number}"
        (root / "store").mkdir(parents=True)
        chains.append(Chain(root, random.Random(f"{SEED}/{number}")))
    with ThreadPoolExecutor(TOGETHER) as pool:
        jobs = [pool.submit(run_chain, chain, zygote) for chain in chains]
    for job in jobs:
        job.result()


def run_chain(chain: Chain, zygote: Zygote) -> None:
    try:
        for instant in range(INSTANTS):
            live_and_die(chain, zygote, instant)
        last = zygote.fork(chain.plan(INSTANTS))
        check_restored(chain, last, chain.floor())
        last.wait_for("committed")
        last.kill()
        last.wait()
    except BaseException:
        print("\n".join(chain.history))
        raise
    finally:
        end_node(chain.staging)
    check_store(chain)


def live_and_die(chain: Chain, zygote: Zygote, instant: int) -> None:
    """One life: restore, compare, train, and an instant at which something is killed."""
    (victims,) = chain.dice.choices(list(VICTIMS), list(VICTIMS.values()))
    starting = chain.dice.random() < 0.25  # sometimes while it starts, restores and claims its attempt
    delay_s = chain.dice.uniform(0.0, 0.4)
    floor = chain.floor()
    life = zygote.fork(chain.plan(instant))
    life.wait_for("born")
    if not starting or "trainer" not in victims:
        check_restored(chain, life, floor)
        poll(lambda: processes(SERVER, chain.staging), what="there is a server")
    time.sleep(delay_s)  # any instant is meant, not one where something has just happened
    chain.kill(victims, life)
    saved = max((event["step"] for event in life.events("saved")), default=0)
    chain.history.append(f"{instant}: floor {floor}, {victims} after {delay_s:.3f} s, saved {saved}")
    if "trainer" not in victims:
        # It lives on, with a new flusher or server, and its saves become checkpoints again.
        poll(lambda: newest_report(life) > saved, what=lambda: f"a commit above {saved}{life.logs()}")
        life.kill()
    life.wait()
    if starting and life.events("restored"):
        check_restored(chain, life, floor)
    chain.note(life)


def newest_report(life: Life) -> int:
    return max((event["step"] for event in life.events("committed")), default=0)


def check_restored(chain: Chain, life: Life, floor: CheckpointId | None) -> None:
    """What a life restored was right bit by bit (it has compared that itself) and is not too old."""
    restored = life.wait_for("restored")
    found = chain.attempts()[restored["attempt"]]
    assert (found.step if found else 0) == restored["step"]
    if floor is not None:
        assert found is not None, f"started over although {floor} was committed{life.logs()}"
        assert (found.attempt, found.step) >= (floor.attempt, floor.step), life.logs()


def check_store(chain: Chain) -> None:
    """Everything that is listed is whole, and retention has not gone too far."""
    store = open_store(chain.url)
    listed = [info.ident for info in list_checkpoints(store)]
    assert len(listed) >= KEEP_LAST
    for ident in listed:
        assert verify_deep(load_checkpoint(store, ident)) == []
    store.close()
