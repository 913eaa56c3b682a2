"""``kill -9`` of trainer, flusher, server and store: what is restored is right and not too old.

A *chain* is one run that is killed and started again, many times. After every kill its newest state must come
back bit by bit (the trainer itself compares), and be no older than the last commit that is in the store or
that a trainer was told of. The store is a directory, or an S3 server behind a link that is killed too.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.attempts import list_attempts, read_attempt
from ckpt.ops.catalog import list_checkpoints, load_checkpoint
from ckpt.ops.ledger import load_ledger
from ckpt.ops.verify import verify_deep
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from tests.shows.report import Report
from tests.support.chain import FLUSHER, ROOT, SERVER, Life, Plan, Zygote, end_node, kill_all, poll, processes
from tests.support.s3 import Ministack, free_port, start_process, stop_process

__all__ = ["Chain", "Link", "random_kills", "run_chains"]

KEEP_LAST = 3
STORE = "store"

Victims = tuple[str, ...]
VICTIMS: dict[Victims, int] = {
    ("trainer",): 6,
    ("flusher",): 4,
    ("server",): 3,
    ("trainer", "flusher"): 3,
    ("trainer", "server"): 3,
    ("trainer", "flusher", "server"): 4,
}
WITH_STORE: dict[Victims, int] = VICTIMS | {
    (STORE,): 5,
    ("trainer", STORE): 4,
    ("server", STORE): 3,
    ("trainer", "flusher", "server", STORE): 4,
}


class Link:
    """The way to an S3 server; SIGKILL of it cuts every request off in the middle.

    Args:
        root: for its log.
        s3: the server.
    """

    def __init__(self, root: Path, s3: Ministack) -> None:
        self._root, self._upstream, self.port = root, s3.port, free_port()
        self.env = s3.env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        self._process: Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Be there (again), on the same port."""
        argv = [sys.executable, "-m", "tests.shows.link", str(self.port), str(self._upstream)]
        self._process = start_process(
            argv, env={"PYTHONPATH": str(ROOT)}, cwd=self._root, log=self._root / "link.log"
        )

    def kill(self) -> None:
        assert self._process is not None
        stop_process(self._process)


@dataclass(slots=True, kw_only=True)
class Chain:
    """One run and what is known of it, found by looking into the store itself.

    Attributes:
        root: folder.
        dice: every choice.
        store: opened directly, not through the link.
        url: of the run.
        link: to the store; None: a directory.
        killed: how often what was killed.
        reported: commits that trainers were told of.
        history: for the message of a failure.
    """

    root: Path
    dice: random.Random
    store: Store
    url: str
    link: Link | None = None
    killed: Counter[str] = field(default_factory=Counter)
    reported: set[CheckpointId] = field(default_factory=set)
    history: list[str] = field(default_factory=list)

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def victims(self) -> Mapping[Victims, int]:
        return VICTIMS if self.link is None else WITH_STORE

    def plan(self, number: int) -> Plan:
        return Plan(
            url=self.url,
            staging=str(self.staging),
            report=str(self.root / f"life-{number:03}"),
            mode=self.dice.choice(["blocking", "overlapped"]),
            keep_last=KEEP_LAST,
            environment=self.link.env if self.link else {},
        )

    def attempts(self) -> dict[int, CheckpointId | None]:
        """Number of each start -> what it resumed from."""
        found = {}
        for info in self.store.list_keys("attempts/"):
            number = keys.parse_attempt_key(info.key)
            parent = json.loads(self.store.get(info.key))["parent"]
            assert number is not None
            found[number] = CheckpointId.parse(parent) if parent else None
        return found

    def commits(self) -> set[CheckpointId]:
        parsed = {keys.parse_manifest_key(info.key) for info in self.store.list_keys("manifests/")}
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

    def kill(self, victims: Victims, life: Life, *, starting: bool) -> None:
        """In an order that is random too; what takes longest between two of them is a system call."""
        order = self.dice.sample(victims, len(victims))
        if starting:  # a trainer whose store goes away while it starts ends by itself
            order.sort(key=lambda victim: victim != "trainer")
        for victim in order:
            self.killed[victim] += 1
            if victim == "trainer":
                life.kill()
            elif victim == STORE:
                assert self.link is not None
                self.link.kill()
            else:
                kill_all({"flusher": FLUSHER, "server": SERVER}[victim], self.staging)
        if STORE in victims and self.link is not None:
            time.sleep(self.dice.uniform(0.0, 0.5))
            self.link.start()


def run_chain(chain: Chain, zygote: Zygote, instants: int) -> None:
    """Live and die ``instants`` times, and check everything."""
    try:
        for instant in range(instants):
            live_and_die(chain, zygote, instant)
        last = zygote.fork(chain.plan(instants))
        check_restored(chain, last, chain.floor())
        last.wait_for("committed")
        last.kill()
        last.wait()
        ended = time.time()
    except BaseException:
        print("\n".join(chain.history))
        raise
    finally:
        end_node(chain.staging)
    check_store(chain)
    check_ledger(chain, ended)


def live_and_die(chain: Chain, zygote: Zygote, instant: int) -> None:
    """One life: restore, compare, train, and an instant at which something is killed."""
    (victims,) = chain.dice.choices(list(chain.victims), list(chain.victims.values()))
    starting = "trainer" in victims and chain.dice.random() < 0.25  # while it restores and claims its attempt
    delay_s = chain.dice.uniform(0.0, 0.4)
    floor = chain.floor()
    life = zygote.fork(chain.plan(instant))
    life.wait_for("born")
    if not starting:
        check_restored(chain, life, floor)
        poll(lambda: processes(SERVER, chain.staging), what="there is a server")
    time.sleep(delay_s)  # any instant is meant, not one where something has just happened
    chain.kill(victims, life, starting=starting)
    saved = max((event["step"] for event in life.events("saved")), default=0)
    chain.history.append(f"{instant}: floor {floor}, {victims} after {delay_s:.3f} s, saved {saved}")
    if "trainer" not in victims:
        # It lives on, with a new flusher, server or store, and its saves become checkpoints again.
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
    listed = [info.ident for info in list_checkpoints(chain.store)]
    told = len(chain.reported)
    assert len(listed) >= min(KEEP_LAST, told), f"{len(listed)} are listed, {told} commits were told"
    for ident in listed:
        assert verify_deep(load_checkpoint(chain.store, ident)) == []


def check_ledger(chain: Chain, ended: float) -> None:
    """Whatever was killed, the goodput ledger knows of all the time from the first claim to the end."""
    found = load_ledger(chain.store, StagingDir(chain.staging), keys.run_key(chain.url))
    claimed = min(read_attempt(chain.store, number).started_at for number in list_attempts(chain.store))
    first, last = found.rows[0].began_at, found.rows[-1].ended_at
    text = f"the ledger goes from {first - claimed:+.1f} s to {last - ended:+.1f} s: {found.seconds}"
    assert first <= claimed, text
    # A killed flusher's last word is two seconds old at most, and more where it did not get to run.
    assert ended - 6.0 < last < ended + 2.0, text
    assert sum(found.seconds.values()) == pytest.approx(last - first), text


def run_chains(
    root: Path, zygote: Zygote, s3: Ministack | None, seeds: list[str], instants: int
) -> list[Chain]:
    """Run a chain per seed, all at once; return them. On S3 where ``s3`` is given.

    Raises:
        AssertionError: a restore was wrong or too old, or the store is not whole.
    """
    with ExitStack() as stack:
        chains = []
        for seed in seeds:
            folder = root / f"chain-{seed.replace('/', '-')}"
            folder.mkdir(parents=True)
            link = Link(folder, s3) if s3 is not None else None
            if link is not None:
                stack.callback(link.kill)
            url = f"s3://{s3.make_bucket()}/run" if s3 is not None else f"file://{folder}/store/run"
            if s3 is None:
                (folder / "store" / "run").mkdir(parents=True)
            store = open_store(url, s3.options if s3 is not None else None)
            stack.callback(store.close)
            chains.append(Chain(root=folder, dice=random.Random(seed), store=store, url=url, link=link))
        with ThreadPoolExecutor(len(chains)) as pool:
            jobs = [pool.submit(run_chain, chain, zygote, instants) for chain in chains]
        for job in jobs:
            job.result()
    return chains


def random_kills(root: Path, s3: Ministack, *, kills: int, seed: int | None = None) -> Report:
    """``kills`` instants, half of them on a directory and half on S3, on two chains at once."""
    chosen = random.SystemRandom().randrange(10**6) if seed is None else seed
    report = Report(
        f"{kills} random kills (seed {chosen})", ("store", "kills", "wrong", "too old", "victims")
    )
    per_chain = -(-kills // 4)
    with Zygote(root / "zygote.log") as zygote:
        for name, server in (("directory", None), ("S3, killed too", s3)):
            seeds = [f"{chosen}/{name[0]}{number}" for number in range(2)]
            try:
                chains = run_chains(root, zygote, server, seeds, per_chain)
            except AssertionError as error:
                report.check(False, f"{name}: {str(error)[:2000]}")
                continue
            victims: Counter[str] = Counter()
            for chain in chains:
                victims.update(chain.killed)
            who = ", ".join(f"{victim} {count}" for victim, count in sorted(victims.items()))
            report.row(name, 2 * per_chain, 0, 0, who)
            report.check(
                True, f"{name}: each restore was right bit by bit, and none older than the last commit"
            )
            report.check(True, f"{name}: the goodput ledger knows of all the time")
    return report
