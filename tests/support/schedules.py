"""Operations on one store whose requests go ahead one at a time, in an order that a schedule decides.

Each operation is real code on a thread of its own, with a store of its own (:class:`Turnstile`). Before every
request it stops until the schedule lets it go on; while it runs, all others stand. So one schedule is one
order of the requests at the object store, and the same schedule always gives the same history.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest import mock

import pytest

from ckpt.digest import Buffer
from ckpt.storage.base import ObjectInfo, Store
from tests.support.builders import CountingStore

__all__ = ["Aged", "History", "Operation", "Until", "explore", "one_worker", "run"]

Operation = Callable[[Store], object]

_STUCK_S = 60.0
_POOLS = ("references", "borrow", "catalog", "verify", "arrays", "groups")


def one_worker(patch: pytest.MonkeyPatch) -> None:
    """Let no operation have two requests in flight: which comes first would be up to the machine."""
    for name in _POOLS:
        patch.setattr(f"ckpt.ops.{name}._WORKERS", 1)
    patch.setattr("ckpt.ops.groups._MOST_WORKERS", 1)
    patch.setattr("ckpt.ops.fetch.MAX_WORKERS", 1)
    patch.setattr("ckpt.ops.fetch._LOCAL_WORKERS", 1)


class Aged(CountingStore):
    """Says of the objects that are there at first that they were written ``seconds`` earlier."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._old = {info.key for info in inner.list_keys("")}

    def _age(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, modified_at=info.modified_at - self._seconds) if info.key in self._old else info

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        self._old.discard(key)

    def put_new(self, key: str, data: Buffer) -> None:
        super().put_new(key, data)
        self._old.discard(key)

    def put_parts(self, key: str, pieces: Iterable[Buffer], **sizes: int) -> None:
        super().put_parts(key, pieces, **sizes)
        self._old.discard(key)

    def head(self, key: str) -> ObjectInfo:
        return self._age(super().head(key))

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        return (self._age(info) for info in super().list_keys(prefix, limit=limit))


@dataclass(slots=True)
class _Actor:
    """One operation under way; its fields are guarded by the condition of its stage."""

    name: str
    request: str = ""  # that it waits to make
    state: str = "running"  # or "waiting" or "done"
    value: object = None
    error: BaseException | None = None


class Turnstile:
    """The store as one operation sees it. A key of a batch that is deleted is a request of its own."""

    def __init__(self, inner: Store, stage: _Stage, actor: _Actor) -> None:
        self._inner, self._stage, self._actor = inner, stage, actor

    @property
    def url(self) -> str:
        return self._inner.url

    def _pass(self, request: str) -> None:
        self._stage.wait_for_turn(self._actor, request)

    def put(self, key: str, data: Buffer) -> None:
        self._pass(f"put {key}")
        self._inner.put(key, data)

    def put_new(self, key: str, data: Buffer) -> None:
        self._pass(f"put_new {key}")
        self._inner.put_new(key, data)

    def put_parts(self, key: str, pieces: Iterable[Buffer], **sizes: int) -> None:
        whole = b"".join(map(bytes, pieces))
        self._pass(f"put_parts {key}")
        self._inner.put_parts(key, [whole], **sizes)

    def get(self, key: str) -> bytes:
        self._pass(f"get {key}")
        return self._inner.get(key)

    def get_range(self, key: str, start: int, nbytes: int) -> Buffer:
        self._pass(f"get_range {key}")
        return self._inner.get_range(key, start, nbytes)

    def head(self, key: str) -> ObjectInfo:
        self._pass(f"head {key}")
        return self._inner.head(key)

    def list_keys(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        self._pass(f"list {prefix}")
        return iter(list(self._inner.list_keys(prefix, limit=limit)))

    def list_dirs(self, prefix: str) -> Iterator[str]:
        self._pass(f"dirs {prefix}")
        return iter(list(self._inner.list_dirs(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._pass(f"delete {key}")
            self._inner.delete([key])

    def probe_conditional(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to release."""


class _Stage:
    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.is_over = False

    def wait_for_turn(self, actor: _Actor, request: str) -> None:
        with self.condition:
            actor.request, actor.state = request, "waiting"
            self.condition.notify_all()
            while actor.state == "waiting":
                self.condition.wait()
            if self.is_over:
                raise SystemExit  # the schedule gave up: let go of the thread

    def settle(self, actors: Sequence[_Actor]) -> None:
        with self.condition:
            settled = self.condition.wait_for(
                lambda: all(actor.state != "running" for actor in actors), timeout=_STUCK_S
            )
        assert settled, [(actor.name, actor.request) for actor in actors if actor.state == "running"]

    def let_go(self, actor: _Actor) -> None:
        with self.condition:
            actor.state = "running"
            self.condition.notify_all()


@dataclass(slots=True, kw_only=True)
class History:
    """What came of one schedule.

    Attributes:
        values: what each operation returned.
        errors: what it raised instead.
        steps: (operation, request, operations that could have gone instead), in order.
    """

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    steps: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"  {name:10} {request}" for name, request, _ in self.steps]
        return "\n".join([*lines, f"  returned {self.values}", f"  raised {self.errors}"])


Decide = Callable[[int, "str | None", tuple[str, ...], Mapping[str, str]], str]
"""Called with the number of the step, who went last, who waits, and for what; returns who goes."""


def run(store: Store, operations: Mapping[str, Operation], decide: Decide) -> History:
    """Carry out ``operations`` on ``store`` in the order that ``decide`` gives.

    What an operation raises is noted, and up to the caller to judge. What one would do in several threads it
    does in order: else its own requests would have no order that could be tried again.
    """
    with mock.patch("ckpt.ops.threads.ThreadPoolExecutor", _AtOnce):
        return _run(store, operations, decide)


class _AtOnce(Executor):
    """Does what it is given at once, in the thread that gives it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


def _run(store: Store, operations: Mapping[str, Operation], decide: Decide) -> History:
    stage, history = _Stage(), History()
    actors = [_Actor(name) for name in operations]

    def act(actor: _Actor) -> None:
        try:
            actor.value = operations[actor.name](Turnstile(store, stage, actor))
        except BaseException as error:  # an assertion in an operation, too
            actor.error = error
        finally:
            with stage.condition:
                actor.state = "done"
                stage.condition.notify_all()

    with ThreadPoolExecutor(len(actors), thread_name_prefix="schedule") as pool:
        for actor in actors:
            pool.submit(act, actor)
            stage.settle([actor])  # what it does before its first request is in order, too
        try:
            last: str | None = None
            while True:
                waiting = {actor.name: actor for actor in actors if actor.state == "waiting"}
                if not waiting:
                    break
                names = tuple(waiting)
                requests = {name: actor.request for name, actor in waiting.items()}
                last = decide(len(history.steps), last, names, requests)
                history.steps.append((last, requests[last], names))
                stage.let_go(waiting[last])
                stage.settle([waiting[last]])
        finally:
            stage.is_over = True
            for actor in actors:
                stage.let_go(actor)
    history.values = {actor.name: actor.value for actor in actors if actor.error is None}
    history.errors = {actor.name: actor.error for actor in actors if actor.error is not None}
    return history


class Until:
    """A schedule by hand: let each named operation run until it is about to make a request.

    Args:
        parts: (operation, beginning of the request before which it stops; "" for its end). After the last one
            everybody runs to the end, in turn.
    """

    def __init__(self, *parts: tuple[str, str]) -> None:
        self._parts = list(parts)

    def __call__(
        self, step: int, last: str | None, waiting: tuple[str, ...], requests: Mapping[str, str]
    ) -> str:
        while self._parts:
            name, stop = self._parts[0]
            if name in waiting and not (stop and requests[name].startswith(stop)):
                return name
            assert name in waiting or not stop, f"{name} ended before it made a request {stop!r}"
            self._parts.pop(0)
        return waiting[0]


def explore(check: Callable[[Decide], History], *, most: int, sample: int | None = None) -> int:
    """Try every order of the requests that can make a difference; return how many schedules that took.

    Two requests of different operations that touch the same key, one of them to change it, are tried in both
    orders; the order of all others is nobody's business. (Dynamic partial-order reduction, Flanagan and
    Godefroid, POPL 2005.)

    Args:
        check: carries out one schedule from a fresh start, asserts what must hold, and returns the history.
        most: more schedules than that are a mistake in the test.
        sample: seed: try ``most`` of them, chosen at random among those that are left, if there are as many.
    """
    random = Random(sample)
    path: list[_Node] = []
    count = 0
    while True:
        prefix = [node.chosen for node in path]

        def decide(
            step: int,
            last: str | None,
            waiting: tuple[str, ...],
            requests: Mapping[str, str],
            prefix: list[str] = prefix,
        ) -> str:
            if step < len(prefix):
                return prefix[step]
            return last if last in waiting else waiting[0]

        history = check(decide)
        count += 1
        if sample is not None and count == most:
            return count
        assert count <= most, f"more than {most} schedules"
        path += [_Node(chosen=name, todo={name}, done={name}) for name, _, _ in history.steps[len(path) :]]
        for earlier, name in _races(history):
            waiting = history.steps[earlier][2]
            path[earlier].todo |= {name} if name in waiting else set(waiting)
        left = [place for place, node in enumerate(path) if node.todo - node.done]
        if not left:
            return count
        del path[(left[-1] if sample is None else random.choice(left)) + 1 :]
        path[-1].chosen = min(path[-1].todo - path[-1].done)
        path[-1].done.add(path[-1].chosen)


@dataclass(slots=True)
class _Node:
    chosen: str
    todo: set[str]
    done: set[str]


def _races(history: History) -> Iterator[tuple[int, str]]:
    """Yield (step, operation): the operation's next request might as well have come before that step."""
    clocks: dict[str, dict[str, int]] = {}  # by operation: the last step of each other that it may depend on
    after: list[dict[str, int]] = []  # the same for each step
    for number, (name, request, _) in enumerate(history.steps):
        clock = dict(clocks.get(name, {}))
        ours = _Touch(request)
        is_first = True
        for earlier in range(number - 1, -1, -1):
            other, before, _ = history.steps[earlier]
            if other == name or not ours.conflicts(_Touch(before)):
                continue
            if is_first and earlier > clock.get(other, -1):
                yield earlier, name
            is_first = False
            for key, value in after[earlier].items():
                clock[key] = max(clock.get(key, -1), value)
        clock[name] = number
        clocks[name] = clock
        after.append(clock)


class _Touch:
    """What a request reads or changes."""

    def __init__(self, request: str) -> None:
        kind, _, self.key = request.partition(" ")
        self.is_change = kind.startswith(("put", "delete"))
        self.is_listing = kind in ("list", "dirs")

    def conflicts(self, other: _Touch) -> bool:
        if not (self.is_change or other.is_change):
            return False
        if self.is_listing or other.is_listing:
            listing, one = (self, other) if self.is_listing else (other, self)
            return one.key.startswith(listing.key)
        return self.key == other.key
