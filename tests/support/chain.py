"""A run that is killed and resumed again and again: its trainer, the state it must have, who forks it.

Importing torch takes seconds, so a *zygote* process does it once and forks a trainer for every life of the
run. Each life is a real trainer: its own process and session, its own manager, flusher and (embedded) server.
What it has to say goes to a file, line by line, and so survives its SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["FLUSHER", "SERVER", "Life", "Plan", "Zygote", "end_node", "kill_all", "poll", "processes"]

ROOT = Path(__file__).parents[2]
FLUSHER = "ckpt.flusher"
SERVER = "ckpt_server"
WAIT_S = 60.0
MOST_PENDING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one life does: restore, compare, train and save every step, end.

    Attributes:
        url: of the run.
        staging: directory.
        report: folder for what it says; of this life alone.
        mode: of the manager.
        last_step: after this one it idles until it is told to end; None trains on for ever.
        dies_after_copy_of: the step whose staging_completion is followed by SIGKILL to itself, at once.
        freezes_flusher_at: before the save of this step its flusher gets SIGSTOP, so that nothing of it is
            sealed; the step before is.
        references: folder where it writes each step's state before it saves it; and what it restores is
            compared with the file there instead of with a computation.
        keep_last: of the manager.
        pending_wait_s: of the manager.
        nbytes: size of one more tensor, to make a save take a while.
        environment: added to its environment.
    """

    url: str
    staging: str
    report: str
    mode: str = "overlapped"
    last_step: int | None = None
    dies_after_copy_of: int | None = None
    freezes_flusher_at: int | None = None
    references: str | None = None
    keep_last: int | None = None
    pending_wait_s: float = 20.0
    nbytes: int = 0
    environment: dict[str, str] = field(default_factory=dict)


# --- the side of the test ---


class Life:
    """One trainer, as the test sees it.

    Attributes:
        pid: of the trainer, which leads a session and a process group of its own.
    """

    def __init__(self, zygote: Zygote, plan: Plan, pid: int) -> None:
        self._zygote = zygote
        self.plan = plan
        self.pid = pid
        self._exit_code: int | None = None

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """What it has said so far (under ``name``). Fails where it said that it failed."""
        path = Path(self.plan.report) / "events"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
        for event in found:
            assert event["name"] != "crashed", event["text"] + self.logs()
        return [event for event in found if name in (None, event["name"])]

    def wait_for(self, name: str, *, timeout_s: float = WAIT_S, **fields: object) -> dict[str, Any]:
        """Wait until it has said ``name`` with these fields, and return that."""
        found: list[dict[str, Any]] = []

        def said() -> bool:
            found[:] = [e for e in self.events(name) if fields.items() <= e.items()]
            return bool(found)

        poll(said, timeout_s=timeout_s, what=lambda: f"{name} {fields}, heard {self.events()}{self.logs()}")
        return found[0]

    def kill(self, number: int = signal.SIGKILL, *, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group."""
        (os.killpg if group else os.kill)(self.pid, number)

    def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""

        def ended() -> bool:
            self._exit_code = self._zygote.reap(self.pid)
            return self.is_over

        if not self.is_over:
            poll(ended, what=lambda: f"the trainer has ended, heard {self.events()}{self.logs()}")
        assert self._exit_code is not None
        return self._exit_code

    @property
    def is_over(self) -> bool:
        return self._exit_code is not None

    def logs(self) -> str:
        """Everything that was logged around it, for messages of failed tests."""
        paths = (Path(self.plan.report) / "log", *Path(self.plan.staging).glob("*.log"))
        texts = {path.name: path.read_text(errors="replace")[-6000:] for path in paths if path.exists()}
        return "".join(f"\n--- {name}\n{text}" for name, text in texts.items())


class Zygote:
    """Context manager of the process that forks. Ends every life that it began. Thread-safe."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._lives: list[Life] = []
        self._lock = threading.Lock()  # of the pipes

    def __enter__(self) -> Zygote:
        roots = [ROOT, *(ROOT / part for part in ("proto", "server", "trainer_hooks"))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.chain"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for life in self._lives:
            if not life.is_over:
                life.kill()
                life.wait()
        self._process.communicate()

    def fork(self, plan: Plan) -> Life:
        """Begin a life."""
        Path(plan.report).mkdir(parents=True)
        life = Life(self, plan, self._ask({"fork": asdict(plan)}))
        self._lives.append(life)
        return life

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a life, None while it lasts."""
        code: int | None = self._ask({"reap": pid})
        return code

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the zygote has died: {self._log.read_text()}"
        return json.loads(answer)


def poll(condition: Any, *, timeout_s: float = WAIT_S, what: Any) -> Any:
    """Wait until ``condition()`` is true and return what it gave.

    Fails with ``what``: a text, or a function that returns one.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what() if callable(what) else what}")
        time.sleep(0.02)
    return found


def processes(module: str, staging: Path | str, *, parent: int | None = None) -> list[int]:
    """Living processes ``python -m module --staging staging`` (that are children of ``parent``)."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if module not in words or str(staging) not in words:
                continue
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in (None, ppid):
                found.append(int(path.name))
    return found


def kill_all(module: str, staging: Path | str) -> list[int]:
    """SIGKILL to the flushers or the servers of a staging directory that live now; returns whom."""
    killed = []
    for pid in processes(module, staging):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    poll(lambda: not set(processes(module, staging)) & set(killed), what=f"{module} is dead")
    return killed


def end_node(staging: Path | str) -> None:
    """End all flushers and servers of a staging directory, also servers that wait to take over.

    The trainers must be dead or closed, else they start new ones.
    """
    poll(
        lambda: not kill_all(FLUSHER, staging) and not kill_all(SERVER, staging),
        what=f"nobody works on {staging}",
    )


# --- the side of the zygote and its children ---


def main() -> None:
    """Fork lives and reap them as standard input says, until it ends."""
    import torch

    import ckpt_trainer_hooks  # noqa: F401  (what this process is for)

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            pid, status = os.waitpid(request["reap"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            os._exit(_live(Plan(**request["fork"]), parent))
        print(pid, flush=True)


def _live(plan: Plan, zygote: int) -> int:
    os.setsid()
    # Whoever runs the tests may have started them deaf (nohup, a background job); a trainer is not.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(Path(plan.report) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, fd)
    os.environ.update(plan.environment)
    sink = os.open(Path(plan.report) / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(name: str, **fields: object) -> None:
        os.write(sink, (json.dumps({"name": name, **fields}) + "\n").encode())

    try:
        _Trainer(plan, say, zygote).run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        say("crashed", text=traceback.format_exc())
        return 1
    return 0


class _Trainer:
    def __init__(self, plan: Plan, say: Any, zygote: int) -> None:
        self._plan = plan
        self._say = say
        self._zygote = zygote
        self._pending: deque[Any] = deque()  # handles of the last saves

    def run(self) -> None:
        import logging

        from ckpt_trainer_hooks import CheckpointManager

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        plan = self._plan
        state = RunState(nbytes=plan.nbytes)
        with CheckpointManager(
            plan.url,
            model=state.model,
            optimizer=state.optimizer,
            state={"progress": state.progress},
            save_interval_steps=1,
            mode=plan.mode,  # type: ignore[arg-type]
            on_error="warn",
            keep_last=plan.keep_last,
            staging_dir=plan.staging,
            pending_wait_s=plan.pending_wait_s,
        ) as manager:
            self._say("born", flushers=processes(FLUSHER, plan.staging, parent=os.getpid()))
            start = manager.restore()
            self._check(state, start)
            self._say("restored", step=start, attempt=manager.attempt)
            for iteration in self._iterations(start):
                state.train_step()
                self._save(manager, state, iteration)
            if plan.last_step is not None:
                self._say("idle")
                while os.getppid() == self._zygote:
                    signal.sigtimedwait([], 1.0)

    def _iterations(self, start: int) -> Iterator[int]:
        iteration = start
        while os.getppid() == self._zygote:  # a test run that was killed leaves nobody behind
            if self._plan.last_step is not None and iteration >= self._plan.last_step:
                return
            yield iteration
            iteration += 1

    def _save(self, manager: Any, state: RunState, iteration: int) -> None:
        plan, step = self._plan, iteration + 1
        if plan.references is not None:
            state.write(Path(plan.references) / f"{step}.pt")
        if step == plan.freezes_flusher_at:
            if self._pending:
                self._pending[-1].local_completion.result(60)
            for pid in processes(FLUSHER, plan.staging, parent=os.getpid()):
                os.kill(pid, signal.SIGSTOP)
        self._keep_pace()
        handle = manager.step(iteration)
        self._pending.append(handle)
        if step == plan.dies_after_copy_of:
            # In whichever thread has just finished the copy, before anything else can happen.
            handle.staging_completion.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            handle.staging_completion.result(60)
        handle.upload_completion.add_done_callback(lambda done: self._report(step, done))
        self._say("saved", step=step)

    def _keep_pace(self) -> None:
        """Let no more saves pile up than a real run would, which does not save every millisecond.

        Not for long: a save whose flusher was killed may be committed without this process being told.
        """
        while len(self._pending) >= MOST_PENDING:
            with contextlib.suppress(TimeoutError):
                self._pending.popleft().upload_completion.exception(0.5)

    def _report(self, step: int, done: Any) -> None:
        error = done.exception()
        self._say("committed" if error is None else "failed", step=step, error=str(error))

    def _check(self, state: RunState, step: int) -> None:
        """What was restored must be the state after ``step`` steps, bit by bit."""
        import torch

        from tests.support.bits import assert_same_bits

        if step == 0:
            return
        if self._plan.references is not None:
            expected = torch.load(Path(self._plan.references) / f"{step}.pt")
        else:
            with torch.random.fork_rng(devices=[]):
                reference = RunState(nbytes=self._plan.nbytes)
                for _ in range(step):
                    reference.train_step()
                expected = reference.tensors()
        assert_same_bits(state.tensors(), expected)


class RunState:
    """Model, optimizer, buffer, plain values and torch's random numbers: a pure function of the step.

    Args:
        nbytes: size of one more parameter.
    """

    def __init__(self, *, nbytes: int = 0) -> None:
        import torch

        shapes = {"weight": (61, 67), "bias": (67,), "scalar": ()}
        if nbytes:
            shapes["large"] = (nbytes // 4,)
        self.model = torch.nn.Module()
        slopes = torch.Generator().manual_seed(11)
        for name, shape in shapes.items():
            self.model.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))
        self.model.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self._slopes = [torch.randn(p.shape, generator=slopes) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.progress: dict[str, Any] = {"step": 0, "history": []}
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.uniform_(-1, 1)

    def train_step(self) -> None:
        """One optimizer step with made-up gradients, which depend on torch's random numbers."""
        import torch

        scale = torch.rand(()) - 0.5
        for parameter, slope in zip(self.model.parameters(), self._slopes, strict=True):
            parameter.grad = slope * scale
        self.optimizer.step()
        self.model.seen.add_(scale)  # type: ignore[operator]
        self.progress["step"] += 1
        self.progress["history"] = [*self.progress["history"][-3:], float(scale)]

    def tensors(self) -> dict[str, Any]:
        import torch

        found = {f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value.clone()
        found["progress"] = torch.tensor(
            [self.progress["step"], *self.progress["history"]], dtype=torch.float64
        )
        found["rng"] = torch.get_rng_state()
        return found

    def write(self, path: Path) -> None:
        import torch

        path.parent.mkdir(exist_ok=True)
        torch.save(self.tensors(), path)


if __name__ == "__main__":
    main()
