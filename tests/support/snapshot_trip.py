"""A snapshot taken into an arena and restored from there: all of the hooks that needs no process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt.format.layout import LayoutSet
from ckpt.format.segment import CHUNK_NBYTES, chunk_range
from ckpt.format.values import decode_value
from ckpt.plan.read import plan_chunks, plan_read
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.arena import Arena, arena_nbytes
from ckpt_trainer_hooks.layout import LayoutBuilder
from ckpt_trainer_hooks.placing import TensorTargets
from ckpt_trainer_hooks.rng import restore_rng
from ckpt_trainer_hooks.selection import RestoreOptions
from ckpt_trainer_hooks.snapshot import Binding, plan_snapshot
from ckpt_trainer_hooks.state import TrainState
from ckpt_trainer_hooks.targets import RestoreTargets, collect_targets

__all__ = ["Taken", "put_back", "put_back_rng", "take", "train_state"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a checkpoint of one rank consists of.

    Attributes:
        layouts: of every stored tensor.
        image: the segment file.
        entries: tensor entries of the index, by name.
        deferred: names of the tensors that an overlapped save copies later.
        values: SegmentIndex.state.
        rank_values: SegmentIndex.rank_state.
    """

    layouts: LayoutSet
    image: bytes
    entries: Mapping[str, object]
    deferred: frozenset[str]
    values: common_pb2.Value
    rank_values: common_pb2.Value


def train_state(per_rank: Collection[str] = (), **items: object) -> TrainState:
    """The only rank's state."""
    return TrainState(items, LayoutBuilder(0, 1), rank=0, per_rank=per_rank)


def take(state: TrainState) -> Taken:
    """Flatten and copy all of ``state``."""
    flat = state.flatten()
    plan = plan_snapshot(flat.leaves, 0)
    with Arena(max(1, arena_nbytes(plan.save.nbytes, 0, 0))) as arena:
        binding = Binding(plan, arena)
        for copies in binding.copies(flat.leaves):
            copies.run()
            copies.check_unchanged()
        image = bytes(arena.view[: plan.save.nbytes])
        del binding, copies
    return Taken(
        layouts=LayoutSet.decode(plan.layout_bytes),
        image=image,
        entries={entry.name: entry for entry in plan.save.tensor_entries()},
        deferred=frozenset(leaf.placed.layout.name for leaf in flat.leaves if leaf.deferred),
        values=common_pb2.Value.FromString(flat.values.SerializeToString()),
        rank_values=common_pb2.Value.FromString(flat.rank_values.SerializeToString()),
    )


def put_back(
    taken: Taken, state: TrainState, *, strict: bool = True, options: RestoreOptions | None = None
) -> RestoreTargets:
    """Write ``taken`` into the live objects of ``state``; ``options`` beside ``strict`` say what of it.

    Raises:
        InvalidInputError: it does not fit; nothing was changed.
    """
    options = options or RestoreOptions.of(strict=strict)
    targets = collect_targets(state, taken.layouts, [taken.values], taken.rank_values, options)
    targets.mismatch.raise_if_any(
        allow_missing=options.allow_missing, allow_unexpected=options.allow_unexpected
    )
    plan, place = plan_read(taken.layouts, targets.wants), TensorTargets(targets.tensors).place
    for pieces in plan.by_rank.values():
        chunks = plan_chunks(taken.entries, pieces, CHUNK_NBYTES, len(taken.image))  # type: ignore[arg-type]
        for number, copies in chunks.items():
            start, stop = chunk_range(number, len(taken.image), CHUNK_NBYTES)
            data = bytearray(taken.image[start:stop])
            for copy in copies:
                place(copy, data)
    for apply in targets.apply:
        apply()
    return targets


def put_back_rng(taken: Taken) -> None:
    """Set this process's generators as they were when ``taken`` was."""
    restore_rng(decode_value(taken.rank_values, leaf=lambda _: None)["rng"])
