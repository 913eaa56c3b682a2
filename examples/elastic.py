"""A run that loses nodes with their disks, goes on with fewer, gets a spare, and grows again.

    python examples/elastic.py [--nodes 4] [--quick] [--out elastic-out]

Every node is an agent of torchrun with its own staging directory, server and failure domain; the program that
they run is examples/train.py. Losing one means SIGKILL of everything on it and the removal of its directory.
The exit status is 0 only if every check holds; losses and logs stay in the output directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_report import relative
from elastic_nodes import Node, Rendezvous, wait_for

HERE = Path(__file__).resolve().parent
SMALLEST = 2
SAVE_EVERY = 5
STEP_TIME = 0.2  # seconds; while a node starts, the others train on
BATCH = 12  # divisible by 2, 3 and 4 ranks
STEPS = 2000  # the learning-rate schedule; the run is ended when the story is told
TOLERANCE = 1e-5  # relative, of a loss on another number of ranks; what another order of additions may cost
DEADLINE = 150.0  # seconds, for each act
MARKER = ".made-by-ckpt-elastic"


class ElasticFailed(Exception):
    """A check did not hold."""


@dataclass(frozen=True)
class Trained:
    """One line of the loss file."""

    step: int
    loss: float
    ranks: int
    attempt: int


class Elastic:
    """The nodes, the run, and what is known of it."""

    def __init__(self, out: Path, nodes: int) -> None:
        self.out = out
        self.largest = nodes
        self.url = f"file://{out}/store/run"
        self.losses = out / "losses.jsonl"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
        self.environment = kept | {"OMP_NUM_THREADS": "1"}
        self.rendezvous = Rendezvous(SMALLEST, nodes)
        self.nodes: list[Node] = []  # in the order of their ranks: torchrun sorts them by address
        self.ever: list[Node] = []
        self.rows: list[tuple[str, ...]] = []
        self.started = time.monotonic()
        self.reference: subprocess.Popen[bytes] | None = None

    # --- telling ---

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.1f} s] {text}", flush=True)

    def check(self, holds: bool, promise: str) -> None:
        """Print a promise that was kept. Raises ElasticFailed where it was not."""
        if not holds:
            raise ElasticFailed(promise)
        self.say(f"  ok: {promise}")

    def hint(self) -> str:
        return "\n".join(node.tail() for node in self.nodes)

    # --- acting ---

    def program(self, *more: str, kind: str = "fsdp2") -> list[str]:
        """train.py and its arguments."""
        script = [str(HERE / "train.py"), "--kind", kind, "--batch", str(BATCH), "--steps", str(STEPS)]
        return [*script, *more]

    def add(self, name: str, *, first_serve: bool = False) -> Node:
        """A fresh node. With ``first_serve`` only its server starts."""
        node = Node(name, len(self.ever), self.out, self.environment)
        self.ever.append(node)
        self.nodes.append(node)
        if first_serve:
            node.start_server()
        else:
            self.start_agent(node)
        return node

    def start_agent(self, node: Node) -> None:
        """Let the node take part."""
        saving = ("--url", self.url, "--save-every", str(SAVE_EVERY), "--replication-factor", "2")
        pace = ("--step-time", str(STEP_TIME), "--loss-file", str(self.losses))
        node.start_agent(self.rendezvous, self.program(*saving, *pace))

    def lose_last(self) -> int:
        """Lose the node with the highest rank once a new step has a replica of its part; return the step."""
        last, rank = self.nodes[-1], len(self.nodes) - 1
        others = self.nodes[:-1]
        after = self.trained()[-1].step
        steps: list[int] = []

        def replicated() -> bool:
            saved = range((after // SAVE_EVERY + 1) * SAVE_EVERY, self.trained()[-1].step + 2, SAVE_EVERY)
            steps[:] = [s for s in saved if any(node.holds_replica(s, rank) for node in others)]
            return bool(steps)

        wait_for(replicated, f"a replica of rank {rank}'s part", timeout=DEADLINE, hint=self.hint)
        self.nodes.pop()
        last.lose()
        self.say(f"  node {last.name} is lost with its disk; step {steps[-1]} had a replica of its part")
        return steps[-1]

    # --- looking ---

    def trained(self) -> list[Trained]:
        """What the run has done so far."""
        return read_losses(self.losses)

    def starts(self) -> list[list[Trained]]:
        """The lines by start of the run, in order."""
        found: list[list[Trained]] = []
        for one in self.trained():
            if not found or one.attempt != found[-1][-1].attempt:
                found.append([])
            found[-1].append(one)
        return found

    def await_start(self, ranks: int, starts: int) -> int:
        """Wait until a start after the first ``starts`` runs on ``ranks`` ranks; return its first step."""

        def running() -> list[list[Trained]]:
            return [lines for lines in self.starts()[starts:] if lines[-1].ranks == ranks]

        wait_for(running, f"the run goes on with {ranks} ranks", timeout=DEADLINE, hint=self.hint)
        return running()[-1][0].step

    def recovery(self, title: str, ranks: int, first_step: int) -> dict[str, Any]:
        """What `ckpt recovery` says of the newest start, as soon as every rank has told."""
        found: dict[str, Any] = {}

        def told() -> bool:
            found.update(self.nodes[0].cli("recovery", self.url))
            restored = int(str(found["checkpoint"] or "0").partition(".")[0])
            return found["ranks"] == found["world_size"] == ranks and restored == first_step

        wait_for(
            told, "every rank has told how long the restart took", timeout=DEADLINE, hint=self.hint, pause=0.3
        )
        tiers = [f"{found['nbytes'].get(tier, 0):,}" for tier in ("local", "replica", "peer", "remote")]
        again = str(found["lost_steps"])
        self.rows.append((title, str(ranks), str(first_step), again, f"{found['wall_s']:.1f} s", *tiers))
        return found

    # --- the acts ---

    def shrink(self) -> None:
        """Lose the last node; the others go on."""
        starts, ranks = len(self.starts()), len(self.nodes) - 1
        step = self.lose_last()
        first = self.await_start(ranks, starts)
        self.check(first >= step, f"{ranks} ranks go on at step {first}, no older than promised")
        found = self.recovery(f"{ranks + 1} -> {ranks} nodes", ranks, first)
        self.check(not found["nbytes"].get("remote"), "nothing was read from the store")

    def replace(self, names: list[str]) -> None:
        """Lose one more; too few are left, and wait. Spares get what there is, then their agents start."""
        starts = len(self.starts())
        step = self.lose_last()
        survivor = self.nodes[0]
        for name in names:
            spare = self.add(name, first_serve=True)
            fetched = spare.cli("prefetch", self.url, "--peers", survivor.address)
            nbytes: dict[str, int] = fetched["nbytes"]  # type: ignore[assignment]
            self.say(f"  prefetched to node {name}: {fetched['checkpoint']}, {nbytes.get('peer', 0):,} bytes")
            self.check(set(nbytes) == {"peer"}, "all came from the node that is left, which had a replica")
        for spare in self.nodes[1:]:
            self.start_agent(spare)
        ranks = len(self.nodes)
        first = self.await_start(ranks, starts)
        self.check(first >= step, f"{ranks} ranks go on at step {first}, no older than promised")
        found = self.recovery("prefetched to spares", ranks, first)
        read = found["nbytes"]
        self.check(not read.get("remote"), "nothing was read from the store")
        self.check(not read.get("peer"), "and nothing from other nodes: all was there before ranks began")

    def grow(self, names: list[str]) -> None:
        """Add nodes to the running job: it saves, and goes on with all of them."""
        starts, ranks = len(self.starts()), len(self.nodes) + len(names)
        for name in names:
            self.add(name)
        first = self.await_start(ranks, starts)
        again = [one for lines in self.starts()[:-1] for one in lines if one.step >= first]
        self.check(not again, f"{ranks} ranks go on at step {first}; no step was lost")
        found = self.recovery(f"grown to {ranks} nodes", ranks, first)
        self.check(not found["nbytes"].get("remote"), "nothing was read from the store")

    def stop(self) -> None:
        """SIGTERM to the agents, as a scheduler does: the run saves once more and ends."""
        for node in self.nodes:
            assert node.agent is not None
            node.agent.send_signal(signal.SIGTERM)
        for node in self.nodes:
            assert node.agent is not None
            node.agent.wait(DEADLINE)
        last = self.trained()[-1].step

        def steps() -> list[int]:
            rows: Any = self.nodes[0].cli("list", self.url, "--staging", str(self.nodes[0].staging))
            return [row["step"] for row in rows["checkpoints"] if row["committed"]]

        wait_for(
            lambda: last + 1 in steps(), f"step {last + 1} is committed", timeout=DEADLINE, hint=self.hint
        )
        self.say(f"  ended on SIGTERM; step {last + 1} is saved and committed")

    # --- the curve ---

    def begin_reference(self, ranks: int) -> None:
        """Train the same steps without interruption, beside the run, in the time that it leaves."""
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        more = ("--no-checkpoint", "--loss-file", str(self.out / "reference.jsonl"))
        with (self.out / "logs" / "reference.log").open("wb") as log:
            self.reference = subprocess.Popen(
                ["nice", "-n19", *command, *self.program(*more, kind="fsdp2" if ranks > 1 else "none")],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end_reference(self, last: int) -> dict[int, Trained]:
        """Wait until the reference has made step ``last``, end it, and return its steps up to there."""
        path = self.out / "reference.jsonl"
        process = self.reference
        assert process is not None
        wait_for(
            lambda: path.exists() and read_losses(path)[-1:] and read_losses(path)[-1].step >= last,
            f"the reference has made step {last}",
            timeout=2 * DEADLINE,
            hint=lambda: (self.out / "logs" / "reference.log").read_text()[-2000:],
        )
        self.kill_reference()
        return {one.step: one for one in read_losses(path) if one.step <= last}

    def kill_reference(self) -> None:
        """It has done its work, or is not wanted any more."""
        if self.reference is not None and self.reference.poll() is None:
            os.killpg(self.reference.pid, signal.SIGKILL)
            self.reference.wait()

    def compare(self) -> None:
        """Compare every loss with the reference's."""
        everything = self.trained()
        reference = self.end_reference(max(one.step for one in everything))
        self.check({one.step for one in everything} == set(reference), "no step is missing")
        first = self.starts()[0]
        if reference[0].ranks == first[0].ranks:
            same = all(one.loss == reference[one.step].loss for one in first)
            self.check(
                same, f"the same bits as the reference for {len(first)} steps on {first[0].ranks} ranks"
            )
        by_layout: dict[tuple[int, int], set[float]] = {}
        for one in everything:
            by_layout.setdefault((one.step, one.ranks), set()).add(one.loss)
        twice = len(everything) - len(by_layout)
        self.check(
            all(len(losses) == 1 for losses in by_layout.values()),
            f"{twice} steps were made again on as many ranks: the same bits",
        )
        worst = max(relative(one.loss, reference[one.step].loss) for one in everything)
        self.check(
            worst <= TOLERANCE,
            f"no loss of {len(reference)} steps differs by more than {TOLERANCE:g} from an uninterrupted run "
            f"on {reference[0].ranks} ranks (largest: {worst:.1e})",
        )

    def table(self) -> None:
        head = ("restart", "ranks", "at step", "again", "back after", "local", "replica", "peer", "store")
        widths = [max(len(row[i]) for row in [head, *self.rows]) for i in range(len(head))]
        for row in [head, *self.rows]:
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            print("  ".join([row[0].ljust(widths[0]), *cells]))

    def goodput(self) -> None:
        """Where the time went, by the ledger: lost nodes took their records along, the others have theirs."""
        found: dict[str, Any] = self.nodes[0].cli("goodput", self.url)
        seconds: dict[str, float] = found["seconds"]
        self.say(", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items() if spent))
        self.check(
            len(found["starts"]) == len(self.starts()) and not seconds["unknown"] and not seconds["down"],
            f"ckpt goodput knows {len(found['starts'])} starts and what became of {found['wall_s']:.1f} s",
        )
        causes = [start["cause"] for start in found["starts"]]
        self.check("crash" in causes and causes[0] == "start", f"they came after: {', '.join(causes)}")

    def end(self) -> None:
        self.kill_reference()
        for node in self.ever:
            node.end(signal.SIGKILL)


def read_losses(path: Path) -> list[Trained]:
    """Every line of a loss file; a torn last one (its writer may be running) is left out."""
    text = path.read_text() if path.exists() else ""
    return [Trained(**line) for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines())]


def story(run: Elastic, *, quick: bool) -> None:
    """Lose, shrink, replace, grow."""
    names = iter("abcdefghijklmnopqrstuvwxyz")
    run.say(f"1. {run.largest} nodes; torchrun {' '.join(run.rendezvous.options())}")
    for _ in range(run.largest):
        run.add(next(names))
    run.await_start(run.largest, 0)
    run.begin_reference(1 if quick else run.largest)
    while len(run.nodes) > SMALLEST:
        run.say(f"2. a node is lost: {len(run.nodes)} -> {len(run.nodes) - 1}")
        run.shrink()
    run.say(f"3. one more is lost: fewer than {SMALLEST} are left, and wait for spares")
    run.replace([next(names) for _ in range(run.largest - 1 if quick else 1)])
    if len(run.nodes) < run.largest:
        run.say(f"4. new nodes join: {len(run.nodes)} -> {run.largest}")
        run.grow([next(names) for _ in range(run.largest - len(run.nodes))])
    run.say("5. the job is stopped")
    run.stop()
    run.compare()


def clear(out: Path) -> None:
    """Make ``out`` an empty directory; only what an earlier run of this made is removed."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise SystemExit(f"{out} is not empty and was not made by this example; choose another --out")
        shutil.rmtree(out)
    for name in ("logs", "nodes", "store"):
        (out / name).mkdir(parents=True)
    (out / MARKER).touch()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4, choices=(2, 3, 4), help="that the run begins with")
    parser.add_argument(
        "--quick", action="store_true", help="grow back by spares alone; the reference trains in one process"
    )
    parser.add_argument("--out", type=Path, default=Path("elastic-out"), help="where losses and logs go")
    args = parser.parse_args()
    out = args.out.resolve()
    clear(out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the nodes end with this
    run = Elastic(out, args.nodes)
    try:
        story(run, quick=args.quick)
        run.goodput()
        run.table()
        print("PASS: elastic restart")
    except (ElasticFailed, TimeoutError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"FAIL: elastic restart: {error}")
        return 1
    finally:
        run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
