"""Agreement between ranks through the process group's key-value store. No collective anywhere.

A rank that never comes is named in an error after a time limit; it cannot hang the others in a
collective, and no sequence number of the user's groups is used up.

The store may be older than the ranks: torchrun keeps it over restarts, with every key of the start before.
So the ranks meet first (:meth:`Agreement._meet`) and then use keys that only this start has.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckpt.errors import CkptError, TimeoutExceededError, UnavailableError, from_kind
from ckpt.events import event, get_logger
from ckpt_trainer_hooks.compat import default_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Agreement"]

_log = get_logger("agree")
_instances = itertools.count()
_SLICE_S = 5.0
_MEET_POLL_S = 0.02


class Agreement:
    """Decisions that all ranks of a job share. Every rank must make the same calls in the same order.

    Without an initialised process group there is one rank and nothing to agree on.

    Args:
        timeout_s: how long to wait for other ranks before TimeoutExceededError.
    """

    def __init__(self, timeout_s: float) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if active else 0
        self.world_size: int = dist.get_world_size() if active else 1
        self._store: Store | None = default_store() if active and self.world_size > 1 else None
        self._base = f"ckpt/{next(_instances)}"
        self._session = ""  # of this start, once the ranks have met
        self._calls = itertools.count()
        self.timeout_s = timeout_s

    def decide(self, topic: str, decision: Callable[[], Any]) -> Any:
        """Run ``decision`` on rank 0 and return its result, or raise its error, on every rank.

        Args:
            topic: for messages; the same on every rank.
            decision: returns something that JSON can carry; called on rank 0 only.

        Raises:
            CkptError: what ``decision`` raised.
            TimeoutExceededError: rank 0 did not answer in time.
        """
        if self._store is None:
            return decision()
        return self._decide(self._key(topic), topic, decision)

    def decide_over(self, topic: str, value: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """As :meth:`decide`, with every rank's ``value``, by rank, as the argument of ``decision``.

        What is gathered goes to rank 0 alone, so its size counts once and not once per rank.

        Raises:
            CkptError: what ``decision`` raised.
            TimeoutExceededError: a rank did not take part; on every rank.
        """
        if self._store is None:
            return decision([value])
        prefix = self._key(topic)
        others = list(range(1, self.world_size))
        if self.rank != 0:
            self._store.set(f"{prefix}/{self.rank}", json.dumps(value))

        def over_all() -> Any:
            found = self._wait([f"{prefix}/{rank}" for rank in others], topic, others)
            return decision([value, *(json.loads(raw) for raw in found)])

        # Rank 0 waits as long for the others and then says who was missing, so it gets a little more time.
        return self._decide(f"{prefix}/outcome", topic, over_all, extra_s=_SLICE_S)

    def _decide(self, key: str, topic: str, decision: Callable[[], Any], *, extra_s: float = 0.0) -> Any:
        assert self._store is not None
        if self.rank == 0:
            try:
                outcome = {"value": decision()}
            except CkptError as error:
                outcome = {"error": _error_to_json(error)}
            except BaseException as error:
                told = CkptError("rank 0 failed", cause=repr(error))
                self._store.set(key, json.dumps({"error": _error_to_json(told)}))
                raise
            self._store.set(key, json.dumps(outcome))
        else:
            outcome = json.loads(self._wait([key], topic, [0], extra_s=extra_s)[0])
        if "error" in outcome:
            raise _error_from_json(outcome["error"])
        return outcome["value"]

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Return every rank's ``value`` (something that JSON can carry), by rank.

        Each rank talks to the store a fixed number of times: rank 0 collects and passes on.

        Raises:
            TimeoutExceededError: names all the ranks that did not come; on every rank.
        """
        if self._store is None:
            return [value]
        prefix = self._key(topic)
        everything = f"{prefix}/all"
        if self.rank != 0:
            self._store.set(f"{prefix}/{self.rank}", json.dumps(value))
            # Rank 0 waits as long and then says who was missing, so it gets a little more time.
            outcome = json.loads(self._wait([everything], topic, [0], extra_s=_SLICE_S)[0])
            if "error" in outcome:
                raise _error_from_json(outcome["error"])
            return list(outcome["values"])
        others = list(range(1, self.world_size))
        try:
            found = self._wait([f"{prefix}/{rank}" for rank in others], topic, others)
        except TimeoutExceededError as error:
            self._store.set(everything, json.dumps({"error": _error_to_json(error)}))
            raise
        values = [value, *(json.loads(raw) for raw in found)]
        self._store.set(everything, json.dumps({"values": values}))
        return values

    def _key(self, topic: str) -> str:
        """A key of the next call, which no other start of the job has. Raises TimeoutExceededError."""
        if not self._session:
            self._session = self._meet()
        return f"{self._base}/{self._session}/{next(self._calls)}/{topic}"

    def _meet(self) -> str:
        """Return a word that the ranks of this start share, and no other start of the job.

        Each rank puts a new word of its own where the start before may have left one, and believes only what
        is said to that word. Rank 0 answers until every rank has heard its newest answer, since the first
        word that it finds may be of the start before.

        Raises:
            TimeoutExceededError: names the ranks that did not come; on every rank.
        """
        store, base = self._store, self._base
        assert store is not None
        if self.rank == 0:
            return self._welcome(store)
        word = secrets.token_hex(8)
        store.set(f"{base}/join/{self.rank}", word)
        (heard,) = self._wait([f"{base}/welcome/{self.rank}/{word}"], "meeting", [0], extra_s=_SLICE_S)
        session = heard.decode()
        store.set(f"{base}/{session}/here/{self.rank}", "1")
        (outcome,) = self._wait([f"{base}/{session}/met"], "meeting", [0], extra_s=_SLICE_S)
        if (error := json.loads(outcome)) is not None:
            raise _error_from_json(error)
        return session

    def _welcome(self, store: Store) -> str:
        """Rank 0's part of :meth:`_meet`."""
        base, session = self._base, secrets.token_hex(8)
        missing = set(range(1, self.world_size))
        answered: dict[int, bytes] = {}
        deadline = time.monotonic() + self.timeout_s
        while True:
            for rank in sorted(missing):
                if store.check([f"{base}/{session}/here/{rank}"]):
                    missing.discard(rank)
                elif store.check([f"{base}/join/{rank}"]):
                    word = store.get(f"{base}/join/{rank}")
                    if word != answered.get(rank):
                        store.set(f"{base}/welcome/{rank}/{word.decode()}", session)
                        answered[rank] = word
            if not missing:
                store.set(f"{base}/{session}/met", "null")
                return session
            if time.monotonic() >= deadline:
                error = self._absent("meeting", sorted(missing))
                store.set(f"{base}/{session}/met", json.dumps(_error_to_json(error)))
                raise error
            time.sleep(_MEET_POLL_S)

    def _absent(self, topic: str, missing: list[int]) -> TimeoutExceededError:
        return TimeoutExceededError(
            "ranks did not take part; every rank must make the same checkpoint calls",
            topic=topic,
            missing_ranks=missing,
            waited_s=self.timeout_s,
            rank=self.rank,
        )

    def own_store(self) -> Store | None:
        """A connection of its own to the key-value store, for a thread that must hold up nobody; None where
        there is one rank. Where the store cannot be opened twice it is the same one.
        """
        store = self._store
        if store is None or not hasattr(store, "clone"):  # torch before 2.8
            return store
        try:
            copy: Store = store.clone()
        except RuntimeError:  # a kind that cannot be cloned
            return store
        return copy

    @contextlib.contextmanager
    def together(self, topic: str) -> Iterator[None]:
        """The block succeeds on every rank, or raises on every rank: the lowest failing rank's error.

        Any other exception than a CkptError passes through on its own rank and is told to the others.
        """
        error: CkptError | None = None
        try:
            yield
        except CkptError as found:
            error = found
        except BaseException as found:
            if self._store is not None:
                self.gather(topic, _error_to_json(CkptError("a rank failed", cause=repr(found))))
            raise
        mine = _error_to_json(error) if error is not None else None
        for rank, told in enumerate(self.gather(topic, mine)):
            if told is not None:
                raised = _error_from_json(told)
                raised.context.setdefault("rank", rank)
                raise raised

    def _wait(self, keys: list[str], topic: str, ranks: list[int], *, extra_s: float = 0.0) -> list[bytes]:
        assert self._store is not None
        deadline = time.monotonic() + self.timeout_s + extra_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait(keys, timedelta(seconds=max(0.05, min(_SLICE_S, left))))
                return [self._store.get(key) for key in keys]
            except dist.DistNetworkError as error:
                raise UnavailableError(
                    "the job's key-value store is gone: the process that hosts it has died", topic=topic
                ) from error
            except dist.DistStoreError:
                missing = [
                    rank for key, rank in zip(keys, ranks, strict=True) if not self._store.check([key])
                ]
                if time.monotonic() >= deadline and missing:
                    raise self._absent(topic, missing) from None
                event(_log, logging.INFO, "agree.waiting", topic=topic, missing_ranks=missing, left_s=left)


def _error_to_json(error: CkptError) -> dict[str, Any]:
    context = {key: str(value) for key, value in error.context.items()}
    return {"kind": type(error).__name__, "code": error.code, "message": error.message, "context": context}


def _error_from_json(raw: dict[str, Any]) -> CkptError:
    return from_kind(raw["kind"], raw["message"], code=raw["code"], context=raw["context"])
