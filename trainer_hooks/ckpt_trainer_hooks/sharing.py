"""Ranks that want the same chunks of the store read each of them once and pass it on over the process group.

All ranks tell which chunks only the store can give them. A chunk that several want is read by one of them,
the owner, which sends it to the others; they verify it again. Who owns what follows from the lists alone, so
every rank derives the same sequence of transfers. Each rank takes part in its own in that order, a few at a
time. The earliest transfer that is not complete has been begun by all who take part in it, so none can wait
in a circle.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ckpt.digest import digest_hex
from ckpt.errors import CkptError, CorruptError, UnavailableError
from ckpt.ops.fetch import MAX_WORKERS, ChunkRead, Reader, read_all
from ckpt_trainer_hooks.agree import Agreement
from ckpt_trainer_hooks.nodes import kernel_id

__all__ = ["Transfer", "fetch_shared", "plan_transfers"]

Key: TypeAlias = tuple[int, int]
"""A chunk: (source rank, number)."""

_TAG = 0x636B7074  # apart from messages that the training may exchange
_STATUS_NBYTES = 8  # behind the chunk, in one message with it: zeros where the owner could read it
_IN_FLIGHT = 4  # chunks being received or sent by a rank, at most
_AHEAD = 2  # chunks that an owner reads before their turn


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk that ``owner`` reads and sends to the other ``ranks`` (ascending, the owner among them)."""

    key: Key
    owner: int
    ranks: tuple[int, ...]


def plan_transfers(
    wanted: Sequence[Iterable[Key]], hosts: Sequence[str | None] | None = None
) -> list[Transfer]:
    """Return the transfers of every chunk that several ranks want, in the order they all keep to.

    Args:
        wanted: by rank, each chunk once.
        hosts: by rank; the host whose page cache has what another rank there has read of the store, or None.
    """
    wanting: dict[Key, list[int]] = {}
    for rank, keys in enumerate(wanted):
        for key in keys:
            wanting.setdefault(key, []).append(rank)
    hosts = hosts or [None] * len(wanted)
    by_ranks: dict[tuple[int, ...], list[Key]] = {}
    for key in sorted(wanting):
        among = wanting[key]
        if len(among) > 1 and (hosts[among[0]] is None or len({hosts[rank] for rank in among}) > 1):
            by_ranks.setdefault(tuple(among), []).append(key)
    owned = [0] * len(wanted)
    transfers: list[Transfer] = []
    for ranks, keys in by_ranks.items():
        order = sorted(ranks, key=lambda rank: (owned[rank], rank))
        for number, key in enumerate(keys):
            owner = order[number % len(order)]  # in turn, so that all of them read at the same time
            owned[owner] += 1
            transfers.append(Transfer(key, owner, ranks))
    return transfers


def fetch_shared(reader: Reader, agreement: Agreement, *, share: bool) -> None:
    """Read all of ``reader``; what several ranks want of the store is read by one of them.

    Every rank must call it, with whatever it wants. Blocks. When a rank fails the others go on to the end
    with what concerns them; the caller makes all of them fail together.

    Args:
        reader: of this rank.
        agreement: between the ranks.
        share: False on any rank switches sharing off on all.

    Raises:
        CorruptError: no good copy of a chunk is left.
        UnavailableError: the store cannot be reached, or a rank that took part has died.
    """
    by_key = {(read.segment.rank, read.number): read for read in reader.chunks}
    transfers: list[Transfer] = []
    if agreement.world_size > 1:
        remote = [key for key, read in by_key.items() if read.segment.is_remote]
        told = _exchange(agreement, _runs(remote) if share else None)
        if all(found is not None for found in told):
            cached = any(by_key[key].segment.is_cached_by_host for key in remote)
            hosts = agreement.gather("shared-hosts", kernel_id() if cached else None)
            transfers = plan_transfers([_keys(found or []) for found in told], hosts)
    if not transfers:
        read_all(reader, reader.chunks)
        return
    group = _cpu_group()
    mine = [item for item in transfers if agreement.rank in item.ranks]
    shared = {item.key for item in mine}
    alone = [read for key, read in by_key.items() if key not in shared]
    with ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="ckpt-share") as pool:
        others = pool.submit(read_all, reader, alone)
        part = _Part(reader, by_key, agreement, group, pool)
        part.run(mine)
        others.result()
    if part.errors:
        raise part.errors[0]


@dataclass(slots=True)
class _Part:
    """One rank's part in the transfers."""

    reader: Reader
    by_key: Mapping[Key, ChunkRead]
    agreement: Agreement
    group: dist.ProcessGroup | None
    pool: ThreadPoolExecutor
    errors: list[CkptError] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def run(self, transfers: Sequence[Transfer]) -> None:
        owned = iter([item for item in transfers if item.owner == self.agreement.rank])
        ahead: dict[Key, Future[torch.Tensor]] = {}
        self._read_ahead(owned, ahead, _AHEAD)
        begun: list[tuple[Transfer, torch.Tensor, list[tuple[int, Any]]]] = []
        placing: list[Future[None]] = []
        for item in transfers:
            if len(begun) == _IN_FLIGHT:
                placing.append(self._complete(*begun.pop(0)))
            if len(placing) == _IN_FLIGHT:
                self._settle(placing.pop(0))
            if item.owner == self.agreement.rank:
                buffer = ahead.pop(item.key).result()
                self._read_ahead(owned, ahead, 1)
            else:
                buffer = torch.empty(self.by_key[item.key].nbytes + _STATUS_NBYTES, dtype=torch.uint8)
            begun.append((item, buffer, list(self._begin(item, buffer))))
        placing += [self._complete(*one) for one in begun]
        for job in placing:
            self._settle(job)

    def _read_ahead(
        self, owned: Iterator[Transfer], ahead: dict[Key, Future[torch.Tensor]], count: int
    ) -> None:
        for item in itertools.islice(owned, count):
            ahead[item.key] = self.pool.submit(self._read, self.by_key[item.key])

    def _read(self, read: ChunkRead) -> torch.Tensor:
        """The chunk with its status; an error is kept, and told to the others by the status."""
        buffer = torch.zeros(read.nbytes + _STATUS_NBYTES, dtype=torch.uint8)
        try:
            self.reader.read_raw(read, buffer.numpy().data[: read.nbytes])
        except CkptError as error:
            self.errors.append(error)
            buffer[-_STATUS_NBYTES:] = 1
        return buffer

    def _begin(self, item: Transfer, buffer: torch.Tensor) -> Iterator[tuple[int, Any]]:
        own = self.agreement.rank
        others = [rank for rank in item.ranks if rank != own] if item.owner == own else [item.owner]
        for rank in others:
            if rank in self.gone:
                continue
            with self._peer(rank):
                post = dist.isend if item.owner == own else dist.irecv
                yield rank, post(buffer, rank, group=self.group, tag=_TAG)

    def _complete(
        self, item: Transfer, buffer: torch.Tensor, works: Sequence[tuple[int, Any]]
    ) -> Future[None]:
        is_whole = item.owner == self.agreement.rank
        for rank, work in works:
            with self._peer(rank):
                work.wait(timedelta(seconds=self.agreement.timeout_s))
                is_whole = True
        return self.pool.submit(self._place, item, buffer, is_whole=is_whole)

    @contextlib.contextmanager
    def _peer(self, rank: int) -> Iterator[None]:
        """Note that ``rank`` is gone where the block fails on it."""
        try:
            yield
        except RuntimeError as error:
            self.gone.add(rank)
            self.errors.append(
                UnavailableError(
                    "a rank died or fell silent while ranks shared the reading of a checkpoint; start again",
                    code="peer-gone",
                    peer=rank,
                    reason=str(error).partition("\n")[0],
                )
            )

    def _place(self, item: Transfer, buffer: torch.Tensor, *, is_whole: bool) -> None:
        read = self.by_key[item.key]
        if not is_whole or bool(buffer[-_STATUS_NBYTES:].any()):
            return  # noted already: by this rank that its peer has gone, or by the owner that it cannot read
        data = buffer.numpy().data[: read.nbytes]
        try:
            self.reader.place(read, data, where=f"rank {item.owner}")
        except CorruptError:  # on the way
            self.reader.read(read)

    def _settle(self, job: Future[None]) -> None:
        error = job.exception()
        if isinstance(error, CkptError):
            self.errors.append(error)
        elif error is not None:
            raise error


def _exchange(agreement: Agreement, runs: list[list[int]] | None) -> list[list[list[int]] | None]:
    """Every rank's ``runs``, by rank. Ranks with the same ones, as replicas have, send them once."""
    mine = digest_hex(json.dumps(runs).encode())
    told = agreement.gather("shared-digests", mine)
    lists = agreement.gather("shared-chunks", runs if told.index(mine) == agreement.rank else None)
    return [lists[told.index(found)] for found in told]


def _runs(keys: Iterable[Key]) -> list[list[int]]:
    """(source rank, first, last) of consecutive chunks."""
    found: list[list[int]] = []
    for rank, number in sorted(keys):
        if found and found[-1][0] == rank and found[-1][2] == number - 1:
            found[-1][2] = number
        else:
            found.append([rank, number, number])
    return found


def _keys(runs: Iterable[Sequence[int]]) -> Iterator[Key]:
    return ((rank, number) for rank, first, last in runs for number in range(first, last + 1))


def _cpu_group() -> dist.ProcessGroup | None:
    """A group of all ranks that moves host memory: the default one (None) if it can."""
    if "cpu" in dist.get_backend_config():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
