"""The whole promise in one program: train, be killed in the middle of a save, resume on other topologies.

    python examples/demo.py [--out demo-out]

An S3 server runs on loopback meanwhile. Every run is examples/train.py under torchrun. The exit
status is 0 only if every check holds; losses, logs and a picture stay in the output directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from demo_report import Losses, compare, draw, read_losses
from demo_s3 import S3Server

HERE = Path(__file__).resolve().parent
STEPS, SAVE_EVERY = 60, 6
KILL_AT = 30  # in the middle of saving the state after this many steps
TP_UNTIL = 42
BUCKET, RUN = "ckpt-demo", "gpt"
URL = f"s3://{BUCKET}/{RUN}"
TOLERANCE = 1e-5  # relative, of a loss; what another order of additions may cost
PHASE_DEADLINE = 120.0  # seconds
UPLOAD_DEADLINE = 30.0  # seconds
MARKER = ".made-by-ckpt-demo"


class DemoFailed(Exception):
    """A check did not hold."""


@dataclass(frozen=True)
class Phase:
    """One run of train.py.

    Attributes:
        name: names its log and loss file.
        ranks: processes that torchrun starts.
        kind: how the model is split over them.
        extra: further arguments of train.py.
    """

    name: str
    ranks: int
    kind: str
    extra: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.kind} on {self.ranks} ranks"


SAVING = ("--url", URL, "--save-every", str(SAVE_EVERY), "--mode", "overlapped")
REFERENCE = Phase("reference", 4, "fsdp2", ("--no-checkpoint",))
KILLED = Phase("killed", 4, "fsdp2", SAVING)
RESUMED_TP = Phase("resumed-tp", 2, "tp", (*SAVING, "--until", str(TP_UNTIL)))
RESUMED_2D = Phase("resumed-2d", 4, "fsdp2+tp", SAVING)


class Demo:
    """Runs the phases and keeps what they left."""

    def __init__(self, out: Path, environment: dict[str, str]) -> None:
        self.out, self.environment = out, environment
        self.staging = out / "staging"
        self.started = time.monotonic()
        for name in ("logs", "pids"):
            (out / name).mkdir()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.1f} s] {text}", flush=True)

    def check(self, holds: bool, promise: str) -> None:
        """Print a promise that was kept. Raises DemoFailed where it was not."""
        if not holds:
            raise DemoFailed(promise)
        self.say(f"  ok: {promise}")

    def loss_file(self, phase: Phase) -> Path:
        return self.out / f"{phase.name}.jsonl"

    def losses(self, phase: Phase) -> Losses:
        return read_losses(self.loss_file(phase))

    def start(self, phase: Phase) -> subprocess.Popen[bytes]:
        """Start torchrun for ``phase``; its output goes to logs/<name>.log."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(phase.ranks), str(HERE / "train.py"), "--kind", phase.kind]
        command += ["--steps", str(STEPS), "--loss-file", str(self.loss_file(phase)), *phase.extra]
        command += ["--pid-dir", str(self.out / "pids"), "--staging", str(self.staging)]
        with (self.out / "logs" / f"{phase.name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def run(self, phase: Phase) -> Losses:
        """Run ``phase`` to its end and return its losses. Raises DemoFailed if it fails."""
        began = time.monotonic()
        process = self.start(phase)
        self.wait(process)
        if process.returncode:
            raise DemoFailed(f"{phase.title} ends with status {process.returncode}\n{self.log_tail(phase)}")
        losses = self.losses(phase)
        if not losses:
            raise DemoFailed(f"{phase.title} trained nothing\n{self.log_tail(phase)}")
        first, last = min(losses), max(losses)
        span = f"steps {first}-{last}, loss {losses[first]:.4f} -> {losses[last]:.4f}"
        self.say(f"  {phase.title}: {span}, {time.monotonic() - began:.0f} s with start-up")
        return losses

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for torchrun; stop it if that is cut short. Raises DemoFailed if it does not end."""
        try:
            process.wait(PHASE_DEADLINE)
        except BaseException as error:
            stop(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise DemoFailed(f"a run does not end within {PHASE_DEADLINE:.0f} s") from None
            raise

    def log_tail(self, phase: Phase) -> str:
        return tail(self.out / "logs" / f"{phase.name}.log")

    def run_and_kill(self, phase: Phase) -> None:
        """Run ``phase`` until it is in the middle of the save of KILL_AT, then ``kill -9`` one rank."""
        process = self.start(phase)
        try:
            seen = self.await_save(process, phase)
            os.kill(int((self.out / "pids" / "rank1.pid").read_text()), signal.SIGKILL)
        except BaseException:
            stop(process)
            raise
        self.say(f"  kill -9 of rank 1 while the state after step {KILL_AT} is being saved ({seen})")
        self.wait(process)
        self.check(process.returncode != 0, "torchrun notices and stops the other ranks")

    def await_save(self, process: subprocess.Popen[bytes], phase: Phase) -> str:
        """Return, as soon as the save of KILL_AT has begun to write, what is on disk of it."""
        deadline = time.monotonic() + PHASE_DEADLINE
        while time.monotonic() < deadline:
            files = sorted(self.staging.glob(f"runs/*/{KILL_AT:012d}.a*/*"))
            if files:
                sealed = sum(file.suffix == ".index" for file in files)
                return f"{sealed} of {phase.ranks} segments sealed"
            if process.poll() is not None:
                raise DemoFailed(f"{phase.title} ended before the kill\n{self.log_tail(phase)}")
            if KILL_AT in self.losses(phase):
                return "nothing written yet"  # the iteration after the save is over: the copy is, too
            time.sleep(0.001)
        raise DemoFailed(f"{phase.title} does not reach step {KILL_AT}\n{self.log_tail(phase)}")

    def cli(self, *arguments: str) -> str:
        """Run ``ckpt`` and return what it printed. Raises DemoFailed if it exits with an error."""
        command = [sys.executable, "-m", "ckpt.cli", *arguments]
        result = subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if result.returncode:
            raise DemoFailed(f"ckpt {' '.join(arguments)}: status {result.returncode}\n{result.stderr}")
        return result.stdout

    def show(self, *arguments: str) -> None:
        """Run ``ckpt`` and show the command and its output."""
        self.say(f"$ ckpt {' '.join(arguments)}")
        print(self.cli(*arguments), flush=True)


def tail(path: Path) -> str:
    """Return the last lines of a log, or nothing where there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-25:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to stop its ranks and itself; insist after 10 s."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def committed(demo: Demo) -> list[int]:
    """Return the steps of the committed checkpoints, newest first, as the CLI lists them."""
    rows = json.loads(demo.cli("list", URL, "--json"))["checkpoints"]
    return [row["step"] for row in rows if row["committed"]]


def await_committed(demo: Demo) -> list[int]:
    """Return the committed steps as soon as there is one. Raises DemoFailed if there is none."""
    deadline = time.monotonic() + UPLOAD_DEADLINE
    while not (steps := committed(demo)):
        if time.monotonic() > deadline:
            raise DemoFailed(f"no checkpoint is committed\n{tail(demo.staging / 'server.log')}")
        time.sleep(0.2)
    return steps


def training(demo: Demo) -> float:
    """Run all phases, print and draw the losses; return the largest relative difference."""
    demo.say(f"1. the reference: {STEPS} steps of {REFERENCE.title}, uninterrupted")
    reference = demo.run(REFERENCE)

    demo.say(f"2. the same run, saved every {SAVE_EVERY} steps to {URL}, killed on the way")
    demo.run_and_kill(KILLED)
    before = await_committed(demo)
    demo.say(f"  committed: steps {', '.join(map(str, before))}")
    if KILL_AT in before:
        demo.say(f"  step {KILL_AT}, whose save the kill hit, was committed all the same")

    demo.say(f"3. resumed with {RESUMED_TP.title}, to step {TP_UNTIL}")
    tp = demo.run(RESUMED_TP)
    demo.check(max(before) <= min(tp) <= KILL_AT, f"went on at step {min(tp)}, not before the last commit")

    demo.say(f"4. resumed with {RESUMED_2D.title} (2 x 2), to the end")
    both = demo.run(RESUMED_2D)
    demo.check(min(both) == TP_UNTIL, f"went on at step {TP_UNTIL}")
    demo.check(max(both) == STEPS - 1 == max(reference), "trained to the end")

    lineage = [(phase.title, demo.losses(phase)) for phase in (KILLED, RESUMED_TP, RESUMED_2D)]
    covered = set().union(*(losses for _, losses in lineage))
    demo.check(covered == set(reference), "no step is missing")
    worst = compare(reference, lineage, SAVE_EVERY)
    draw(demo.out / "losses.png", reference, lineage, {KILL_AT: "kill -9", TP_UNTIL: "resumed again"})
    demo.say(f"picture: {demo.out / 'losses.png'}")
    return worst


def housekeeping(demo: Demo) -> None:
    """Look at the checkpoints, verify them, prune them."""
    demo.say("5. what is in the bucket")
    demo.show("list", URL)
    demo.show("show", URL, "latest", "--limit", "8", "--staging", str(demo.staging))
    demo.show("verify", URL, "--all", "--deep")
    before = committed(demo)
    demo.check(before[0] == STEPS, f"the last checkpoint is of step {STEPS}")
    demo.show("prune", URL, "--keep-last", "2", "--dry-run")
    demo.check(committed(demo) == before, "the dry run deleted nothing")
    demo.show("prune", URL, "--keep-last", "2", "--yes")
    demo.show("list", URL)
    demo.check(committed(demo) == before[:2], "prune kept the newest two")
    demo.show("verify", URL, "--deep")


def stop_staging_server(staging: Path) -> None:
    """End the staging server that the ranks started, if it is still there (it leaves when it is idle)."""
    deadline = time.monotonic() + 5
    note = staging / "server.json"
    while note.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int(json.loads(note.read_text())["pid"]), signal.SIGTERM)


def clear(out: Path) -> None:
    """Make ``out`` an empty directory; only what an earlier demo made is removed."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise SystemExit(f"{out} is not empty and was not made by this demo; choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="where losses, logs and the PNG go"
    )
    out = parser.parse_args().out.resolve()
    clear(out)
    try:
        with S3Server(out / "s3") as s3:
            s3.create_bucket(BUCKET)
            environment = s3.client_environment() | {"OMP_NUM_THREADS": "1", "COLUMNS": "110"}
            environment.pop("CKPT_SERVER", None)  # the demo's ranks start their own staging server
            demo = Demo(out, environment)
            demo.say(f"S3 on {s3.url}; everything else is in {out}")
            worst = training(demo)
            housekeeping(demo)
            demo.check(
                worst <= TOLERANCE, f"no loss differs by more than {TOLERANCE:g} (largest: {worst:.1e})"
            )
            demo.say("the demo did what it promises")
    except DemoFailed as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
