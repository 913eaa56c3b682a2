"""Data position as one global number, so that it survives another number of ranks or workers.

Two small objects around torch's DataLoader::

    sampler = ResumableSampler(dataset, batch_size=8, seed=1, tail="carry")
    loader = ResumableLoader(DataLoader(dataset, batch_sampler=sampler, num_workers=2))
    manager = CheckpointManager(url, model=model, optimizer=optimizer, dataloader=loader)

The state is (seed, epoch, samples consumed by all ranks together), the same on every rank. Which samples a
rank gets next follows from it by arithmetic.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from ckpt.digest import digest_hex
from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt_trainer_hooks.options import check_choice

__all__ = ["ResumableLoader", "ResumableSampler", "Tail", "mixed_seed", "settle_loader", "warn_of_generators"]

_log = get_logger("data")

Tail = Literal["drop", "pad", "carry"]

_T = TypeVar("_T")
_TAILS = ("drop", "pad", "carry")
_FINGERPRINT_SAMPLES = 4096


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler over a map-style dataset whose position does not depend on the ranks that read it.

    The order of an epoch is a permutation made from (seed, epoch). A global batch is the next
    ``batch_size * world_size`` samples of it; rank r has the r-th ``batch_size`` of them. Iterating does not
    move the position, because loaders read ahead: :class:`ResumableLoader` moves it, batch by batch.

    An epoch's order takes 8 bytes of memory per sample.

    Args:
        dataset: anything with a length, or the length itself.
        batch_size: samples per rank and batch. May differ from that of the saved run.
        seed: of the order; a restored state brings its own.
        tail: what becomes of the last samples of an epoch when they do not fill a global batch. "drop" leaves
            them out; "pad" fills up with the first samples of the same epoch, which then come twice; "carry"
            fills up with the first samples of the next epoch, which starts after them, so that every sample
            comes exactly once in every epoch.
        shuffle: False keeps the dataset's order in each epoch.
        rank: data-parallel rank. Default: the rank of the process. Where tensor, pipeline or context parallel
            ranks share a batch, give all of them the rank along the data-parallel mesh dimension.
        world_size: data-parallel size. Default: the number of processes.

    Raises:
        InvalidInputError: sizes that cannot work: no samples, a rank outside the world, or an epoch smaller
            than one global batch where the tail is not padded.
    """

    same_on_every_rank = True  # see TrainState

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        seed: int,
        tail: Tail,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_choice("tail", tail, _TAILS)
        active = dist.is_available() and dist.is_initialized()
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        self._batch_size = batch_size
        self._tail: Tail = tail
        self._shuffle = shuffle
        self._world_size = world_size if world_size is not None else (dist.get_world_size() if active else 1)
        self._rank = rank if rank is not None else (dist.get_rank() if active else 0)
        self._seed = seed
        self._epoch = 0
        self._consumed = 0
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None
        self._check_sizes()

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of :attr:`epoch` that all ranks together have used."""
        return self._consumed

    @property
    def seed(self) -> int:
        """What the order is made from."""
        return self._seed

    @property
    def global_batch(self) -> int:
        """Samples that one batch of every rank takes together."""
        return self._batch_size * self._world_size

    def __len__(self) -> int:
        """Batches that are left of the epoch, the same on every rank."""
        left = self._length - self._consumed
        return left // self.global_batch if self._tail == "drop" else -(-left // self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of what is left of the epoch. Does not move the position."""
        epoch, consumed = self._epoch, self._consumed
        for number in range(len(self)):
            start = consumed + number * self.global_batch + self._rank * self._batch_size
            yield self._samples(epoch, start)

    def advance(self) -> None:
        """Count one more global batch as used."""
        self._consumed += self.global_batch
        self._settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain values, the same on every rank."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "length": self._length,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, whatever ranks, workers and batch size it was saved with.

        Raises:
            InvalidInputError: the samples would not be the same: another dataset length or ``shuffle``, or
                this version of torch makes another permutation from the seed. Nothing was changed.
        """
        live = {"length": self._length, "shuffle": self._shuffle}
        saved = {name: state[name] for name in live}
        if saved != live:
            raise InvalidInputError(
                "the data are not those of the checkpoint; a position among them means nothing here",
                code="data-position",
                saved=saved,
                live=live,
            )
        before = self._seed, self._epoch, self._consumed
        self._seed, self._epoch, self._consumed = state["seed"], state["epoch"], state["consumed"]
        if self._fingerprint() != state["fingerprint"]:
            self._seed, self._epoch, self._consumed = before
            raise InvalidInputError(
                "this torch makes another permutation from the seed than the one that saved the position",
                code="data-position",
                torch=torch.__version__,
            )
        self._settle()

    def _settle(self) -> None:
        """Go on to the next epoch where this one has no batch left."""
        if len(self) > 0:
            return
        carried = max(0, self._consumed - self._length) if self._tail == "carry" else 0
        self._epoch, self._consumed = self._epoch + 1, carried

    def _samples(self, epoch: int, start: int) -> list[int]:
        stop = start + self._batch_size
        order = self._order_of(epoch)
        found: list[int] = order[start : min(stop, self._length)].tolist()
        if stop > self._length:  # "drop" never comes here
            first = max(start, self._length) - self._length
            more = order if self._tail == "pad" else self._make_order(epoch + 1)
            places = torch.arange(first, stop - self._length) % self._length
            found += more[places].tolist()
        return found

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._order is None or self._order[0] != (self._seed, epoch):
            self._order = ((self._seed, epoch), self._make_order(epoch))
        return self._order[1]

    def _make_order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
        return torch.randperm(self._length, generator=generator)

    def _fingerprint(self) -> str:
        return digest_hex(self._order_of(self._epoch)[:_FINGERPRINT_SAMPLES].numpy().tobytes())

    def _check_sizes(self) -> None:
        if self._length < 1 or self._batch_size < 1:
            raise InvalidInputError(
                "there must be samples, and at least one of them in a batch",
                length=self._length,
                batch_size=self._batch_size,
            )
        if not 0 <= self._rank < self._world_size:
            raise InvalidInputError(
                "no such data-parallel rank", rank=self._rank, world_size=self._world_size
            )
        if self._tail != "pad" and self.global_batch > self._length:
            raise InvalidInputError(
                "an epoch is smaller than one global batch; use fewer ranks or smaller batches, or pad",
                length=self._length,
                global_batch=self.global_batch,
            )


class ResumableLoader:
    """Counts the batches that a DataLoader really hands out, so that read-ahead is not lost.

    Iterate over it as over the loader: each ``for`` goes on from the position and ends with the epoch, also
    after a restore or a ``break``. A batch counts as used once it is handed out; save after the step made
    from it. The state is the sampler's.

    The loader's worker seeds are made from (seed, epoch), unless it has a generator of its own, so starting
    it draws nothing from the global random-number stream. Random augmentation inside worker processes is not
    captured (those streams die with the workers): derive it from the sample, or use ``num_workers=0``.

    Args:
        loader: whose ``batch_sampler`` is a :class:`ResumableSampler`.

    Raises:
        InvalidInputError: it has another sampler.
    """

    same_on_every_rank = True  # see TrainState

    def __init__(self, loader: DataLoader[_T]) -> None:
        if not isinstance(loader.batch_sampler, ResumableSampler):
            raise InvalidInputError(
                "the loader's batch_sampler must be a ResumableSampler",
                found=type(loader.batch_sampler).__name__,
            )
        self.loader = loader
        self.sampler = loader.batch_sampler
        self._seeded = loader.generator is None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Batches that are left of the epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch, moving the position before each batch is handed out.

        Raises:
            InvalidInputError: the position was moved by someone else meanwhile: a second iterator, or a
                restore. Begin a new iteration.
        """
        sampler = self.sampler
        if self._seeded:
            self.loader.generator = torch.Generator().manual_seed(mixed_seed(sampler.seed, sampler.epoch))
        here = sampler.seed, sampler.epoch, sampler.consumed
        for batch in self.loader:
            if here != (sampler.seed, sampler.epoch, sampler.consumed):
                raise InvalidInputError(
                    "the data position was moved by a restore or by a second iterator; begin a new iteration",
                    code="data-position",
                )
            sampler.advance()
            here = sampler.seed, sampler.epoch, sampler.consumed
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; takes effect with the next ``for``. Raises as the sampler's."""
        self.sampler.load_state_dict(state)


def mixed_seed(seed: int, *parts: int) -> int:
    """Return 63 bits that depend on all arguments, also where they are small or alike."""
    text = ",".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def settle_loader(loader: object) -> None:
    """Make a torchdata loader that was not iterated over yet build its iterator now.

    Building it draws from the global random-number stream, and ``state_dict()`` of such a loader builds it.
    Done before the streams are captured, and again after a state is loaded and before they are put back, the
    draw is made once in either run; the next ``for`` takes the iterator that is there.
    """
    if getattr(loader, "_iterator", None) is None and _is_torchdata(loader):
        loader.state_dict()  # type: ignore[attr-defined]  # the only public way to build it


def warn_of_generators(items: Mapping[str, object]) -> None:
    """Warn of loaders with a generator that is not an item: it makes the order of later epochs."""
    for name, item in items.items():
        generator = getattr(item, "generator", None) if _is_torchdata(item) else None
        if generator is not None and not any(other is generator for other in items.values()):
            event(
                _log,
                logging.WARNING,
                "state.loader_generator",
                item=name,
                reason="the loader does not save the generator it was given, and draws the order of each "
                "epoch from it; register the generator as an item of the state",
            )


def _is_torchdata(loader: object) -> bool:
    return any(cls.__name__ == "StatefulDataLoader" for cls in type(loader).__mro__)
