"""Restore: one rank chooses for all, every rank reads its bytes by arithmetic, all succeed or none does."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt.collector import collector_paused, heap_set_aside
from ckpt.digest import digest_hex
from ckpt.errors import CkptError, CorruptError, InvalidInputError, NotFoundError, RefusedError
from ckpt.events import event, get_logger
from ckpt.format.ids import CheckpointId
from ckpt.format.values import decode_value, encode_value
from ckpt.ops import catalog
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.commit import publish_complete
from ckpt.ops.fetch import FetchStats, Reader
from ckpt.ops.identity import require_own
from ckpt.ops.tiers import LOCAL, PEER, REMOTE, REPLICA, Tier, tier_index
from ckpt.plan.read import ReadPlan, plan_read
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt_proto.v1 import common_pb2, disk_pb2
from ckpt_trainer_hooks.agree import Agreement
from ckpt_trainer_hooks.environment import compare_environment
from ckpt_trainer_hooks.ladder import Choice, Ladder
from ckpt_trainer_hooks.nothing import absence_explained, explain_nothing
from ckpt_trainer_hooks.placing import TensorTargets
from ckpt_trainer_hooks.recovery_timer import RecoveryTimer
from ckpt_trainer_hooks.redistribute import Redistribute, Spread
from ckpt_trainer_hooks.rng import derive_rng, restore_rng
from ckpt_trainer_hooks.selection import RNG_ITEM, RestoreOptions
from ckpt_trainer_hooks.sharing import fetch_shared
from ckpt_trainer_hooks.state import ItemKind, TrainState
from ckpt_trainer_hooks.targets import RestoreTargets, collect_targets

__all__ = ["Restorer"]

_log = get_logger("restore")
_POLL_S = 0.2
_TRIES = 5  # of restoring the latest while it is pruned again and again


@dataclass(slots=True, kw_only=True)
class Restorer:
    """Restores one rank's part of a run. All ranks make the same calls.

    Attributes:
        url: of the run.
        options: of the store.
        chosen: what to restore and how strictly.
        state: live objects, written in place.
        agreement: between the ranks.
        ladder: what nodes hold, and which step they have in common.
        pending_wait_s: how long to wait for what dead trainers left their flushers to seal; and again for the
            commit of a step that is sealed on all nodes, newer than anything else, and cannot be read from
            them, since they do not listen for one another.
        redistribute: for per-rank items when the number of ranks has changed.
        timer: told when reading begins and ends, and how much came from where.
        share_reads: what several ranks want of the store is read by one, and sent over the process group.
        required: to find nothing is an error.
    """

    url: str
    options: Mapping[str, str]
    chosen: RestoreOptions
    state: TrainState
    agreement: Agreement
    ladder: Ladder
    pending_wait_s: float
    redistribute: Mapping[str, Redistribute] = field(default_factory=dict)
    timer: RecoveryTimer = field(default_factory=RecoveryTimer)
    share_reads: bool = True
    required: bool = False
    restored_commit: bool = False  # what restore() returned was committed, not only sealed on nodes
    _tiers: Sequence[Tier] = ()  # of the candidate that is being restored

    def restore(self, wanted: str) -> CheckpointId | None:
        """Restore ``wanted`` ("latest", a step or an id) and return it; None where there is nothing.

        "latest" falls back to the checkpoint before it when no good copy is left, on all ranks together, and
        goes on to the newer one when it is pruned meanwhile; a checkpoint asked for by name fails instead.

        Raises:
            NotFoundError: the named checkpoint does not exist; or there is none, and one is required; code
                "pruned": it was pruned meanwhile.
            InvalidInputError: it does not fit the live state; nothing was changed.
            RefusedError: code "other-run": it is another run's; "run-gone": nodes hold steps of this run, and
                the store knows nothing of it.
            CorruptError: no good copy is left.
        """
        with _Opened(self.url, self.options) as store:
            self.ladder.look(store, self.pending_wait_s)
            for left in range(_TRIES - 1, -1, -1):
                try:
                    return self._first_good(store, wanted)
                except NotFoundError as error:
                    if error.code != "pruned" or wanted != "latest" or not left:
                        raise
                    # Somebody has committed newer ones meanwhile, else it would not have been deleted.
                    event(_log, logging.WARNING, "restore.pruned", error=error)
        raise AssertionError("unreachable")

    def _first_good(self, store: Store, wanted: str) -> CheckpointId | None:
        for choice in self._candidates(store, wanted):
            if choice is not None:
                try:
                    self._restore_one(store, choice)
                except (CorruptError, NotFoundError) as error:
                    self._name_pruned(store, choice, error)
                    if wanted != "latest" or isinstance(error, NotFoundError):
                        raise
                    event(_log, logging.WARNING, "restore.fallback", damaged=choice.ident, error=error)
                    continue
                self.restored_commit = not choice.is_staged
            found = None if choice is None else choice.ident
            if found is None:
                self._explain_nothing(store)
            if wanted == "latest" and self.agreement.rank == 0:
                self._report_losses(store, found)
            return found
        raise CorruptError("no checkpoint of the run could be restored", code="none-good", url=self.url)

    def _name_pruned(self, store: Store, choice: Choice, error: CkptError) -> None:
        """Raise NotFoundError, code "pruned", on every rank, where a committed choice is gone by now."""

        def on_rank_0() -> None:
            with catalog.naming_pruned(store, choice.ident):
                raise error

        if choice.is_staged:
            return
        with contextlib.suppress(CorruptError):
            self.agreement.decide("pruned", on_rank_0)

    def _candidates(self, store: Store, wanted: str) -> Iterator[Choice | None]:
        """What to try, in order; rank 0 chooses, so ranks can never resume from different steps."""
        if wanted != "latest":
            with absence_explained(self.agreement, self.url, self.options):
                named = self.ladder.named(store, wanted)
            yield named
            return
        self._wait_for_pending(store)
        for choice in self.ladder.candidates(store):
            if choice is None and self.agreement.decide("published", lambda: bool(publish_complete(store))):
                yield from self.ladder.candidates(store)
                return
            yield choice

    def _explain_nothing(self, store: Store) -> None:
        def on_rank_0() -> None:
            explain_nothing(store, self.url, self.options, self.ladder, required=self.required)

        self.agreement.decide("nothing", on_rank_0)

    def _report_losses(self, store: Store, found: CheckpointId | None) -> None:
        """A report must not fail what it reports on."""
        try:
            self.ladder.report_losses(store, found)
        except CkptError as error:
            event(_log, logging.WARNING, "restore.losses_unknown", error=error)

    def _wait_for_pending(self, store: Store) -> None:
        """Let the servers commit what is whole on the nodes but cannot be read from them, not lose it."""

        def on_rank_0() -> None:
            pending = [item.ident for item in self.ladder.standings.values() if item.is_only_unreachable]
            latest = catalog.latest(store, self.ladder.usable())
            newer = [i for i in pending if latest is None or _lineage_key(i) > _lineage_key(latest)]
            deadline = time.monotonic() + self.pending_wait_s
            for ident in sorted(newer, key=_lineage_key, reverse=True)[:1]:
                while not catalog.exists(store, ident):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        event(_log, logging.WARNING, "restore.pending_left_behind", checkpoint=ident)
                        return
                    event(_log, logging.INFO, "restore.waiting_for_commit", checkpoint=ident, left_s=left)
                    time.sleep(_POLL_S)

        self.agreement.decide("pending", on_rank_0)

    @heap_set_aside()
    def _restore_one(self, store: Store, choice: Choice) -> None:
        started = time.perf_counter()
        self.timer.enter("locate")
        with ExitStack() as stack:
            self._tiers = self.ladder.tiers(choice, stack)
            checkpoint, stats = self._restore_from(store, choice)
        event(
            _log,
            logging.INFO,
            "restore.done",
            checkpoint=checkpoint.ident,
            staged=choice.is_staged,
            local_nbytes=stats.nbytes[LOCAL],
            replica_nbytes=stats.nbytes[REPLICA],
            peer_nbytes=stats.nbytes[PEER],
            remote_nbytes=stats.nbytes[REMOTE],
            repaired_chunks=stats.repaired_chunks,
            elapsed_s=time.perf_counter() - started,
        )

    def _restore_from(self, store: Store, choice: Choice) -> tuple[Checkpoint, FetchStats]:
        opened = self.ladder.open(store, choice) if choice.is_staged else None
        with self.agreement.together("plan"):  # before the first byte is written
            checkpoint = opened or catalog.load_checkpoint(store, choice.ident)
            if opened is None and self.agreement.rank == 0:
                require_own(store, checkpoint.manifest, self.ladder.run_id)
            targets, streams = self._targets(checkpoint)
        unexpected = common_to_all(self.agreement, targets.mismatch.unexpected)
        own = self.agreement.gather("own", targets.own)
        with self.agreement.together("fit"):
            _refuse_partial_sets(own)
            targets.mismatch.unexpected = unexpected
            targets.mismatch.raise_if_any(
                allow_missing=self.chosen.allow_missing, allow_unexpected=self.chosen.allow_unexpected
            )
        self.timer.enter("read")
        stats = self._read(checkpoint, targets)
        self.timer.enter("reshard")
        self.timer.count(stats.nbytes)
        for apply in targets.apply:
            apply()
        if self.chosen.takes_item(RNG_ITEM):
            self._restore_rng(checkpoint, streams)
        if self.agreement.rank == 0:  # it is rank 0's that was stored
            compare_environment(checkpoint.manifest.environment)
        return checkpoint, stats

    @collector_paused()
    def _targets(self, checkpoint: Checkpoint) -> tuple[RestoreTargets, list[dict[str, Any]]]:
        """What to restore, and the own values of the saved ranks whose streams this rank looks at."""
        rank, saved_world = self.agreement.rank, checkpoint.manifest.world_size
        same_world = saved_world == self.agreement.world_size
        shared = [self._index(checkpoint, part).state for part in checkpoint.manifest.state_ranks or [0]]
        own = self._index(checkpoint, rank if same_world else 0).rank_state
        spread = None if same_world else self._spread(checkpoint)
        targets = collect_targets(
            self.state,
            checkpoint.layouts,
            shared,
            own if same_world else None,
            self.chosen,
            spread,
            self._every_rank(checkpoint),
        )
        looked_at = [own]
        if not same_world and self.chosen.takes_item(RNG_ITEM):  # together the ranks look at all
            mine = range(rank, saved_world, self.agreement.world_size)
            looked_at += [self._index(checkpoint, other).rank_state for other in mine]
        return targets, [decode_value(value, leaf=lambda name: None) for value in looked_at]

    def _every_rank(self, checkpoint: Checkpoint) -> list[common_pb2.Value]:
        """The own values of all saved ranks, which say where pieces of explicit shards are."""
        shards = self.state.of_kind(ItemKind.SHARDS)
        if not any(self.chosen.takes_item(name) for name in shards):
            return []
        return [self._index(checkpoint, rank).rank_state for rank in range(checkpoint.manifest.world_size)]

    def _spread(self, checkpoint: Checkpoint) -> Spread | None:
        """Every saved rank's own values, where items need them; reads every segment index then."""
        saved_world = checkpoint.manifest.world_size
        own = [name for name in self.state.items if self.state.is_own(name) and self.chosen.takes_item(name)]
        per_rank = [name for name in own if name in self.state.per_rank and name not in self.redistribute]
        if per_rank:
            raise RefusedError(
                "per-rank state cannot be spread over another number of ranks; give redistribute hooks for "
                "these items, restore without them (exclude them), or give them global positions",
                code="per-rank",
                items=per_rank,
                saved_ranks=saved_world,
                ranks=self.agreement.world_size,
            )
        if not own:
            return None
        return Spread(
            [self._index(checkpoint, rank).rank_state for rank in range(saved_world)],
            self.redistribute,
            rank=self.agreement.rank,
            world_size=self.agreement.world_size,
            stream=self.state.rng_stream,
            step=checkpoint.ident.step,
        )

    def _index(self, checkpoint: Checkpoint, rank: int) -> disk_pb2.SegmentIndex:
        for tier in self._tiers:
            found = tier_index(tier, checkpoint.ident, rank, checkpoint.manifest.run_id)
            if found is not None:
                return found
        return checkpoint.segment_index(rank)

    def _read(self, checkpoint: Checkpoint, targets: RestoreTargets) -> FetchStats:
        for (saved, live), count in sorted(targets.casts.items()):
            event(_log, logging.WARNING, "restore.cast", saved=saved, live=live, tensors=count)
        # Together: else ranks would wait for one that has given up.
        with self.agreement.together("index"), collector_paused():
            plan = plan_read(checkpoint.layouts, targets.wants)
            written = TensorTargets(targets.tensors)
            reader = Reader(
                checkpoint, plan, written, self._tiers, alone=self._reads_own_only(checkpoint, plan)
            )
        with self.agreement.together("read"):
            fetch_shared(reader, self.agreement, share=self.share_reads)
        written.mark_written()
        return reader.stats

    def _reads_own_only(self, checkpoint: Checkpoint, plan: ReadPlan) -> bool:
        """Whether this rank reads its own segment, and the others, who are as many as at the save, theirs."""
        is_same = checkpoint.manifest.world_size == self.agreement.world_size
        return is_same and plan.by_rank.keys() == {self.agreement.rank}

    def _restore_rng(self, checkpoint: Checkpoint, saved: list[dict[str, Any]]) -> None:
        saved_world, first = checkpoint.manifest.world_size, saved[0]
        if saved_world == self.agreement.world_size:
            is_continued = first.get("rng_stream", self.agreement.rank) == self.state.rng_stream
        else:
            is_continued = self._streams_were_alike(saved_world, saved)
        told = self.agreement.gather("streams", is_continued)
        if is_continued:
            restore_rng(first["rng"])
        else:
            derive_rng(first["rng"], self.state.rng_stream, checkpoint.ident.step)
        if self.agreement.rank == 0 and not all(told):
            event(
                _log,
                logging.WARNING,
                "restore.rng_derived",
                reason="ranks or streams changed, so streams are new: deterministic, but not continued",
                checkpoint=checkpoint.ident,
                saved_ranks=saved_world,
                ranks=self.agreement.world_size,
                new_on_ranks=told.count(False),
            )

    def _streams_were_alike(self, saved_world: int, saved: list[dict[str, Any]]) -> bool:
        """Whether all saved ranks, several, were at one place of one stream: then each rank goes on there."""
        mine = {digest_hex(encode_value(values["rng"]).SerializeToString()) for values in saved}
        seen = {found for told in self.agreement.gather("streams-seen", sorted(mine)) for found in told}
        return saved_world > 1 and len(seen) == 1


def _refuse_partial_sets(own: list[dict[str, bool]]) -> None:
    """All or none, whatever may be missing: half a set of cursors repeats samples and skips others."""
    for name in sorted({name for found in own for name in found}):
        lacking = [rank for rank, found in enumerate(own) if found.get(name) is False]
        if lacking and any(found.get(name) for found in own):
            raise InvalidInputError(
                "some ranks have a saved state of a per-rank item and others have none; was it saved on some "
                "ranks only? Exclude the item, and place it yourself",
                code="partial-set",
                item=name,
                lacking_ranks=lacking,
            )


def common_to_all(agreement: Agreement, names: list[str]) -> list[str]:
    """Return the names that every rank has: what one rank does not expect may be another stage's.

    Ranks with the same list send it once.
    """
    mine = digest_hex(json.dumps(names).encode())
    told = agreement.gather("unexpected", mine)
    lists = agreement.gather("names", names if told.index(mine) == agreement.rank else None)
    common = set.intersection(*(set(found) for found in lists if found is not None))
    return [name for name in names if name in common]


class _Opened:
    """A store for a ``with`` block: closed at its end, also on errors."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self._store = open_store(url, options)

    def __enter__(self) -> Store:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def _lineage_key(ident: CheckpointId) -> tuple[int, int]:
    return ident.attempt, ident.step
