"""State that every rank has its own of, restored onto another number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckpt.digest import digest_hex
from ckpt.errors import InvalidInputError
from ckpt.events import event, get_logger
from ckpt.format.values import DecodeLeaf, decode_value, encode_value
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.generators import is_same_state, reseed_generator
from ckpt_trainer_hooks.state import ItemKind, TrainState

__all__ = ["Later", "Redistribute", "Spread", "check_hooks", "load_later"]

_log = get_logger("restore")

# (states of all saved ranks in their order, this rank, number of ranks) -> state for this rank
Redistribute: TypeAlias = Callable[[list[Any], int, int], Any]

_VALUE_KEY = {ItemKind.STATEFUL: "state", ItemKind.PLAIN: "value"}


@dataclass(frozen=True, slots=True)
class Later:
    """A value that can be made only when the tensors in it have been read."""

    make: Callable[[], Any]


def load_later(item: Any, saved: Mapping[str, Any]) -> Callable[[], None] | None:
    """Return what loads a redistributed state into ``item``; None where ``saved`` is as it was saved."""
    key, later = next(((key, value) for key, value in saved.items() if isinstance(value, Later)), ("", None))
    if later is None:
        return None

    def load() -> None:
        made = later.make()
        if key == "state":
            item.load_state_dict(made)
        else:
            item.clear()
            item.update(made)

    return load


def check_hooks(hooks: Mapping[str, Redistribute], state: TrainState) -> None:
    """Raise InvalidInputError for a hook of an item that is not kept per rank: it would never be called."""
    if unknown := sorted(set(hooks) - state.per_rank):
        raise InvalidInputError(
            "redistribute names items that are not kept per rank",
            items=unknown,
            per_rank=sorted(state.per_rank),
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """The own values of all ranks that saved, and how this rank's are made of them.

    Attributes:
        values: SegmentIndex.rank_state by saved rank.
        hooks: by item name.
        rank: this rank.
        world_size: number of ranks now.
        stream: number of this rank's random-number streams.
        step: of the checkpoint.
    """

    values: Sequence[common_pb2.Value]
    hooks: Mapping[str, Redistribute]
    rank: int
    world_size: int
    stream: int = 0
    step: int = 0

    def items(
        self, state: TrainState, leaf: DecodeLeaf, wants: Callable[[str], bool]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return this rank's items as in its own values, and what forbids it, named by item.

        An item that no saved rank has is left out. Generators that were alike on all ranks go on; else they
        have the key ``reseed``: a function that begins a new stream.
        """
        trees = [decode_value(value, leaf=leaf)["items"] for value in self.values]
        found: dict[str, Any] = {name: item for name, item in trees[0].items() if not state.is_own(name)}
        problems: list[str] = []
        for name, kind in state.kinds.items():
            saved = [tree.get(name) for tree in trees]
            lacking = [rank for rank, item in enumerate(saved) if item is None]
            if kind is ItemKind.SHARDS or not state.is_own(name):  # shards find their own way
                continue
            if not wants(name) or len(lacking) == len(saved):
                continue
            if lacking:
                problems.append(f"{name}: saved ranks {lacking} have no state of it; those of all are needed")
            elif any(item["kind"] != kind for item in saved):
                problems.append(f"{name}: saved as {saved[0]['kind']}, live {kind}")
            elif kind is ItemKind.GENERATOR:
                found[name] = self._generator(name, saved)
            elif name in self.hooks:
                found[name] = self._spread(name, kind, saved)
            else:
                problems.append(f"{name}: kept per rank, and no redistribute hook for it")
        return found, problems

    def _spread(self, name: str, kind: ItemKind, saved: list[dict[str, Any]]) -> dict[str, Any]:
        key = _VALUE_KEY[kind]
        states = [item[key] for item in saved]
        hook = self.hooks[name]
        return {"kind": str(kind), key: Later(lambda: hook(states, self.rank, self.world_size))}

    def _generator(self, name: str, saved: list[dict[str, Any]]) -> dict[str, Any]:
        first = saved[0]
        if len(saved) > 1 and all(is_same_state(item["state"], first["state"]) for item in saved):
            return first

        def reseed(generator: Any) -> None:
            material = encode_value([name, first["state"]]).SerializeToString()
            reseed_generator(generator, int(digest_hex(material), 16), self.stream, self.step)
            if self.rank == 0:
                event(
                    _log,
                    logging.WARNING,
                    "restore.generator_derived",
                    reason="the number of ranks changed, so its stream is new: deterministic, not continued",
                    item=name,
                    saved_ranks=len(saved),
                    ranks=self.world_size,
                )

        return {**first, "reseed": reseed}
