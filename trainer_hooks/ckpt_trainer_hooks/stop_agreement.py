"""The step at which all ranks stop, agreed on without a collective and without a word per step.

From the moment a rank has heard of the request it does not pass the end of a step before the decision is
known. So the first step it can still save at is fixed: the one it is held at, else the one that is under way.
The decision is the largest of these over all ranks: each of them reaches it, also where ranks wait for each
other in collectives (those behind are held at most until the decision comes, and then go on).

Ranks of a node talk through small files, ``<staging>/runs/<run key>/stop/a000003/``; the first rank of each
node also through the process group's key-value store. All of it by a thread of its own:

request.json         who asks, why, and how much time there is
rank-00017.json      the first step at which this rank can save
decision.json        the step, or the ranks that did not answer
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt.events import event, get_logger
from ckpt_proto.v1 import common_pb2

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Decision", "Request", "StopAgreement"]

_log = get_logger("stop")
_STORE_EVERY_S = 0.5
_ANSWER_S = 3.0  # a rank whose thread does not answer for so long is dead or stopped
_DECIDE_S = 2.0  # and so much later the others stop waiting for a decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Why to stop.

    Attributes:
        cause: "SIGTERM", "notice", ...
        rank: who was asked first.
        grace_s: from when this was written.
    """

    cause: str
    rank: int
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``step`` to save and stop at; None where ranks did not answer, and then these."""

    step: int | None
    absent: tuple[int, ...] = ()


class StopAgreement:
    """One rank's part. All methods are called by one thread.

    Args:
        folder: of this attempt, shared by the ranks of the node; need not exist.
        rank: global rank.
        group: the ranks of this node.
        store: of the process group, for the first rank of each node; None where one node has all ranks.
        prefix: of the keys in it.
        died: the ranks of this node that are known to be dead.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        group: common_pb2.NodeGroup,
        store: Store | None,
        prefix: str,
        died: Callable[[], set[int]],
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._group = group
        self._leads = rank == group.ranks[0]
        self._store = store
        self._prefix = prefix
        self._died = died
        self._asked_store_at = 0.0
        self._request: Request | None = None
        self._began = 0.0
        self._answered = False
        self._told_answer = False

    def clean(self) -> None:
        """Remove what older attempts have left on this node. Only the first rank of a node does."""
        if not self._leads or not self._folder.parent.is_dir():
            return
        for path in self._folder.parent.iterdir():
            if path.is_dir() and path.name < self._folder.name:
                shutil.rmtree(path, ignore_errors=True)

    def request(self) -> Request | None:
        """What a rank of the job has asked for, or None. A look at the folder, and now and then the store."""
        if self._request is None:
            found = _read(self._folder / "request.json")
            if found is None and self._leads and (raw := self._from_store("request")) is not None:
                _write_new(self._folder / "request.json", found := raw)
            if found is not None:
                self._accept(Request(**found))
        return self._request

    def ask(self, request: Request) -> Request:
        """Ask all ranks to stop; returns the request that stands, which may be an earlier one."""
        _write_new(self._folder / "request.json", asdict(request))
        found = _read(self._folder / "request.json")
        self._accept(Request(**found) if found is not None else request)
        assert self._request is not None
        return self._request

    def answer(self, earliest: int) -> None:
        """Say at which step this rank can save first. It is held there until :meth:`decision` is known."""
        if not self._answered:
            self._answered = True
            _write(self._folder / f"rank-{self._rank:05d}.json", {"earliest": earliest})

    def decision(self) -> Decision | None:
        """The decision, or None while it is not known. Never later than some seconds after the answer."""
        if (found := _read(self._folder / "decision.json")) is None and self._leads:
            found = self._decide()
            if found is not None:
                _write(self._folder / "decision.json", found)
        if found is not None:
            return Decision(step=found["step"], absent=tuple(found["absent"]))
        if time.monotonic() - self._began > 2 * (_ANSWER_S + _DECIDE_S):
            return Decision(step=None, absent=(self._group.ranks[0],))
        return None

    # --- the first rank of a node ---

    def _accept(self, request: Request) -> None:
        self._request = request
        self._began = time.monotonic()
        event(_log, logging.WARNING, "stop.requested", cause=request.cause, by_rank=request.rank)
        if self._leads and self._store is not None:
            self._to_store("request", asdict(request))

    def _decide(self) -> dict[str, Any] | None:
        mine = self._answer_of_node()
        if mine is None or self._store is None:
            return mine
        if not self._told_answer:
            self._told_answer = True
            self._to_store(f"answer/{self._group.index}", mine)
        if self._rank == 0:
            self._merge_answers(mine)
        return self._from_store("decision")

    def _answer_of_node(self) -> dict[str, Any] | None:
        found = {rank: _read(self._folder / f"rank-{rank:05d}.json") for rank in self._group.ranks}
        absent = [rank for rank, answer in found.items() if answer is None]
        if not absent:
            return {"step": max(answer["earliest"] for answer in found.values() if answer), "absent": []}
        if time.monotonic() - self._began > _ANSWER_S or self._died().intersection(absent):
            return {"step": None, "absent": absent}
        return None

    def _merge_answers(self, mine: dict[str, Any]) -> None:
        """Rank 0: decide once all nodes have answered, or their time is over."""
        others = {i: self._from_store(f"answer/{i}", now=True) for i in range(1, self._group.count)}
        silent = [index for index, answer in others.items() if answer is None]
        answers = [mine, *(answer for answer in others.values() if answer is not None)]
        is_known = not silent or any(answer["absent"] for answer in answers)
        if not is_known and time.monotonic() - self._began < _ANSWER_S + _DECIDE_S:
            return
        absent = sorted(rank for answer in answers for rank in answer["absent"])
        whole = not silent and not absent
        step = max(answer["step"] for answer in answers) if whole else None
        if silent:
            event(_log, logging.WARNING, "stop.nodes_absent", node_groups=silent)
        self._to_store("decision", {"step": step, "absent": absent})

    # --- the store of the process group ---

    def _from_store(self, name: str, *, now: bool = False) -> dict[str, Any] | None:
        """Never waits: another thread may need the store's connection."""
        if self._store is None:
            return None
        if not now and time.monotonic() - self._asked_store_at < _STORE_EVERY_S:
            return None
        self._asked_store_at = self._asked_store_at if now else time.monotonic()
        key = f"{self._prefix}/{name}"
        try:
            if not self._store.check([key]):
                return None
            found: dict[str, Any] = json.loads(self._store.get(key))
        except (dist.DistError, RuntimeError):  # the process that hosts it has died
            return None
        return found

    def _to_store(self, name: str, value: dict[str, Any]) -> None:
        assert self._store is not None
        try:
            self._store.set(f"{self._prefix}/{name}", json.dumps(value))
        except (dist.DistError, RuntimeError) as error:
            event(_log, logging.WARNING, "stop.store_gone", error=error)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace whole, so that no reader sees half of it. A disk that cannot take it means no agreement."""
    tmp = path.with_name(f".{path.name}.{time.monotonic_ns()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        tmp.write_text(json.dumps(value))
        tmp.replace(path)
    except OSError as error:
        event(_log, logging.ERROR, "stop.no_file", path=path, error=error)


def _write_new(path: Path, value: dict[str, Any]) -> None:
    """The same, unless it is there: the first one stays."""
    if path.exists():
        return
    _write(path, value)
