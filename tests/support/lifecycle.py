"""The whole life of a run of one rank in one process, in files: everything that changes a file or the store.

Start, seal (the flusher's code), replicate, upload, publish, commit, retain, prune, adopt, pin, sweep: with
the code of flusher and server, one thing after the other, so that a death or a power cut can be put at an
exact place. Three steps are committed by the node; a fourth, after a restart, is left to the node that holds
its replica.

``python -m tests.support.lifecycle ROOT`` leads one life and prints what it has been promised;
``python -m tests.support.lifecycle ROOT N`` one that dies at its N-th boundary, and then another.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.clock import SystemClock
from ckpt.digest import digest
from ckpt.errors import CorruptError
from ckpt.flusher.write import seal_segment, sweep_debris
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.ops.attempts import claim_attempt
from ckpt.ops.catalog import exists, latest, list_checkpoints, load_checkpoint
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.condemn import Condemned
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.pins import list_pins, pin, unpin
from ckpt.ops.sweep import GRACE_LEAST_S, sweep, sweep_uploads
from ckpt.ops.verify import verify_deep
from ckpt.rpc.access import PeerAccess
from ckpt.storage.base import Store
from ckpt.storage.durable import TEMP_PREFIX
from ckpt.storage.leftovers import sweep_leftovers
from ckpt.storage.open import open_store
from ckpt.storage.spares import drop_spares
from ckpt.storage.staging import ARRIVING, RunConfig, StagingDir
from ckpt_server.adopter import Adopter
from ckpt_server.keeper import ReplicaKeeper
from ckpt_server.peers import Peers
from ckpt_server.publisher import publish_group
from ckpt_server.receiver import Receiver
from ckpt_server.replica_dir import ReplicaDir
from ckpt_server.retention import retain_local, retain_remote
from ckpt_server.runs import Run
from ckpt_server.settings import Settings
from ckpt_server.steps import StepTable
from ckpt_server.uploader import Segment, Uploader
from tests.support.boundaries import found
from tests.support.builders import FakeClock
from tests.support.dying import lead
from tests.support.snapshots import Snapshot, make_snapshot

__all__ = ["LAST", "LATE", "Life", "check", "check_clean", "snapshot_of"]

STEPS = {10: 1, 20: 1, 30: 3}
"""Step -> seed of its tensors: 20 is equal to 10 and borrows from it."""

LAST = 40
LATE = FakeClock(4e9)
"""Long after everything."""

_OWNER = PeerNode(node_id="ab" * 8, target=None, domain="rack-1", host="owner", ranks=(0,))
_HOLDER = PeerNode(node_id="cd" * 8, target=None, domain="rack-2", host="holder")


def snapshot_of(ident: CheckpointId) -> Snapshot:
    """The snapshot of a step: the same bits whoever asks, but for the attempt in its index."""
    made = make_snapshot(
        step=ident.step, attempt=ident.attempt, rows=4, seed=STEPS.get(ident.step, ident.step)
    )
    made.index.captured_at = 1_800_000_000.0 + ident.step
    return made


class Life:
    """A life in ``root``, going on with whatever an earlier one has left.

    Args:
        root: holds the staging directory ``node``, that of the other node ``peer``, and the store.
        said: told ("sealed" | "committed" | "replicated", id) as soon as that was promised.
    """

    def __init__(self, root: Path, said: Callable[[str, CheckpointId], object]) -> None:
        self.url = f"file://{root}/store/run"
        self.key = keys.run_key(self.url)
        self.config = RunConfig(url=self.url, keep_local=1, keep_last=1)
        self.node, self.peer = StagingDir(root / "node"), StagingDir(root / "peer")
        self.late = StagingDir(root / "late")
        self.replicas = ReplicaDir(self.peer)
        self._said = said

    def lead(self) -> None:
        """All of it. A process that has died in the middle is followed by another that calls this again."""
        clock = SystemClock()
        self.node.ensure()
        self.node.write_run_config(self.key, self.config)
        self.node.clear_ended(self.key)
        self.peer.ensure()
        self.replicas.files.ensure()
        self.replicas.files.write_run_config(self.key, self.config)
        self.run = Run(self.key, self.config, opener=open_store, workers=1, clock=clock)
        self.store = self.run.store
        self.receiver = Receiver(self.replicas.files)
        settings = Settings(staging=self.peer.path, scan_interval_s=0.05)
        adopter = Adopter(self.replicas, settings, clock)
        self.keeper = ReplicaKeeper(
            self.peer, self.replicas, Peers(_HOLDER, PeerAccess(), clock), adopter, settings, clock
        )
        self._steps(adopter)
        self._tidy()
        self.node.mark_ended(self.key)

    def _steps(self, adopter: Adopter) -> None:
        for ident in sorted(self.node.sealed_checkpoints(self.key)):  # as a server finds them at its start
            if exists(self.store, ident):
                self.node.mark_committed(self.key, ident)
                continue
            if ident.step < LAST:
                self._save(ident)
            else:
                self._lose(ident, adopter)
        newest = latest(self.store)
        done = newest.step if newest else 0
        attempt = claim_attempt(self.store, parent=newest, world_size=1, host="node", clock=LATE)
        sweep_debris(self.node, self.key)
        for pinned in list_pins(self.store):  # what the pin was for died with who set it
            unpin(self.store, pinned)
        for step in STEPS:
            if step > done:
                self._save(CheckpointId(step, attempt))
        if done < LAST:
            parent = latest(self.store)
            attempt = claim_attempt(
                self.store, parent=parent, world_size=1, host="node", clock=LATE, parent_is_committed=True
            )
            self._lose(CheckpointId(LAST, attempt), adopter)

    def _save(self, ident: CheckpointId) -> None:
        """A step that this node commits."""
        self._seal(self.node, ident)
        self._said("sealed", ident)
        self._replicate(ident)
        self._upload(self.node, ident)
        assert try_commit(self.store, ident, clock=FakeClock()).state is not CommitState.WAITING
        self._said("committed", ident)
        self.node.mark_committed(self.key, ident)
        self.keeper.greeted(self.key, [ident], False)
        pin(self.store, ident)
        unpin(self.store, ident)
        now = SystemClock().now()
        retain_local(self.node, self.run, StepTable(), now=now, grace_s=1.0, free_nbytes=1 << 40)
        retain_remote(self.run)
        self._drop_replicas(but=ident)

    def _seal(self, place: StagingDir, ident: CheckpointId) -> None:
        snapshot = snapshot_of(ident)
        with snapshot.new_arena() as arena:
            seal_segment(place, self.key, snapshot.into(arena), arena.view, threads=1)

    def _upload(self, place: StagingDir, ident: CheckpointId) -> None:
        """All that a commit needs."""
        uploader = Uploader(place, part_nbytes=1 << 20, concurrency=1, encoders=1)
        segment = Segment(run_key=self.key, ident=ident, rank=0)
        uploader.upload(
            self.store, segment, lending=self.run.lending, compression=self.run.compression, wanted="off"
        )
        publish_group(self.store, place, self.key, ident, snapshot_of(ident).index.group)

    def _replicate(self, ident: CheckpointId) -> None:
        """What ReplicaService does with an offer and the stream after it."""
        index = self.node.read_index(self.key, ident, 0)
        segment = Segment(run_key=self.key, ident=ident, rank=0)
        self.replicas.note_owner(self.key, ident, index.group, _OWNER)
        wanted = self.receiver.offer(
            segment, self.node.read_index_bytes(self.key, ident, 0), snapshot_of(ident).layout
        )
        frames = iter([self.node.segment_path(self.key, ident, 0).read_bytes()])
        if wanted:
            assert self.receiver.receive(segment, wanted, frames) == []
        self._said("replicated", ident)

    def _lose(self, ident: CheckpointId, adopter: Adopter) -> None:
        """A step that the other node commits, because this one is gone after it has sent its replica."""
        self._seal(self.node, ident)
        self._said("sealed", ident)
        self._replicate(ident)
        (unit,) = [unit for unit in self.replicas.units(self.key) if unit.ident == ident]
        adopter.adopt(self.key, unit, reason="the test says so")
        waiting = threading.Event()
        while adopter.has_work:
            waiting.wait(0.002)
        assert exists(self.store, ident)
        self._said("committed", ident)
        self._drop_replicas(but=ident)

    def _drop_replicas(self, *, but: CheckpointId) -> None:
        for unit in self.replicas.units(self.key):
            if unit.ident != but and self.replicas.files.is_committed(self.key, unit.ident):
                self.replicas.remove(self.key, unit)

    def _tidy(self) -> None:
        """What happens now and then: sweeps, with everything old enough."""
        for ident in self.node.sealed_checkpoints(self.key):
            if exists(self.store, ident):  # another node has committed it meanwhile
                self.node.mark_committed(self.key, ident)
        self._litter(CheckpointId(5, 1))
        self._commit_late(CheckpointId(6, 1))
        self.keeper.make_room()
        sweep_debris(self.node, self.key)
        retain_local(self.node, self.run, StepTable(), now=LATE.now(), grace_s=1.0, free_nbytes=1 << 40)
        drop_spares(self.node, self.key)
        list(sweep(self.store, older_than_s=0.0, clock=LATE))  # pins that the dead held for a moment, too
        retain_remote(self.run)
        list(sweep(self.store, older_than_s=0.0, clock=LATE))  # objects that only what has just gone needed
        assert list(sweep(self.store, older_than_s=GRACE_LEAST_S)) == []  # by the store's own clock
        sweep_uploads(self.store, older_than_s=0.0, clock=LATE)
        for place in (self.node, self.peer, self.late, self.replicas.files):
            sweep_leftovers(place, before=LATE.now())

    def _commit_late(self, ident: CheckpointId) -> None:
        """A node was held up after its upload until others were ahead; a sweep has condemned it, and died."""
        self.late.remove_checkpoint(self.key, ident)  # what a life before this one came to
        self._seal(self.late, ident)
        self._upload(self.late, ident)
        Condemned(self.store, [ident])
        if not exists(self.store, ident):  # a life that died before it undid the commit
            with pytest.raises(CorruptError, match="overtaken"):
                try_commit(self.store, ident, clock=FakeClock())
            assert not exists(self.store, ident)
        self.late.remove_checkpoint(self.key, ident)

    def _litter(self, ident: CheckpointId) -> None:
        """What a save leaves that died in mid-write, one that died in mid-upload, a pin and a probe."""
        folder = self.node.make_checkpoint_dir(self.key, ident)
        (folder / "segment-00000.safetensors.tmp").write_bytes(b"half")
        (self.node.path / f"{TEMP_PREFIX}4567").write_bytes(b"half")
        key = keys.segment_key(ident, 0)
        self.store.put(key, b"whole, and never committed")
        self.store.put(keys.temporary_pin_key(CheckpointId(30, 1), "0123456789abcdef"), b"")
        self.store.put(f"{keys.PROBE}0123", b"")
        (Path(self.url.removeprefix("file://")) / key).with_name(f"{TEMP_PREFIX}0123").write_bytes(b"half")


# --- what must hold ---


def check(root: Path, promised: dict[str, set[CheckpointId]]) -> None:
    """Assert that what is visible is whole, and that nothing that was promised is gone.

    Args:
        root: of the life.
        promised: what it said; "sealed" and "replicated" hold until a newer step is committed.
    """
    life = Life(root, lambda _what, _ident: None)
    store = open_store(life.url)
    listed = [info.ident for info in list_checkpoints(store)]
    for ident in listed:
        checkpoint = load_checkpoint(store, ident)
        assert verify_deep(checkpoint) == []
        wanted = snapshot_of(ident)
        for entry in wanted.index.tensors:
            data = wanted.image[entry.start : entry.start + entry.nbytes]
            assert bytes(fetch_tensor(checkpoint, entry.name)[2]) == data
    newest = latest(store)
    committed = max(promised.get("committed", set()), default=CheckpointId(0, 1))
    if newest is not None or committed.step:
        assert newest is not None, f"{committed} was committed and nothing is there"
        assert newest.step >= committed.step
    for place, what in ((life.node, "sealed"), (life.replicas.files, "replicated")):
        _check_staging(place, life.key, store)
        for ident in promised.get(what, set()):
            if ident.step > (newest.step if newest else 0):
                assert place.sealed_ranks(life.key, ident) == [0], f"{ident} was {what}"


def _check_staging(place: StagingDir, run_key: str, store: Store) -> None:
    """SD1 to SD3: a marker never says what is not so."""
    for ident in place.checkpoints(run_key):
        for rank in place.sealed_ranks(run_key, ident):
            index = place.read_index(run_key, ident, rank)
            data = place.segment_path(run_key, ident, rank).read_bytes()
            assert data == snapshot_of(ident).image
            assert index.chunks.digests == digest(data)
            place.layout(run_key, index.layout_digest)
            record = place.read_uploaded(run_key, ident, rank)
            newest = latest(store)
            if record is not None and (newest is None or ident.step > newest.step):  # else it may be swept
                assert all(store.head(key).nbytes for key in record.chunks.object_keys)
        if place.is_committed(run_key, ident) and place.sealed_ranks(run_key, ident):
            newest = latest(store)
            assert exists(store, ident) or (newest is not None and newest.step > ident.step)


def check_clean(root: Path) -> None:
    """Assert that a life that came to its end left nothing but the last checkpoint."""
    life = Life(root, lambda _what, _ident: None)
    store = open_store(life.url)
    newest = latest(store)
    assert newest is not None
    assert newest.step == LAST
    assert [info.ident for info in list_checkpoints(store)] == [newest]
    data = {keys.checkpoint_of_data_key(info.key) for info in store.list_keys("data/")}
    index = {keys.checkpoint_of_index_key(info.key) for info in store.list_keys("index/")}
    assert data | index == {newest}
    assert [info.key for prefix in (keys.PINS, keys.PROBE) for info in store.list_keys(prefix)] == []
    left = [str(path.relative_to(root)) for path in root.rglob("*") if _is_debris(path)]
    assert left == [], left  # pytest does not rewrite the assertions of this module


def _is_debris(path: Path) -> bool:
    return path.name.startswith(TEMP_PREFIX) or path.suffix in (".tmp", ARRIVING)


def main(root: Path, dies_at: int = 0) -> None:
    """See the module."""

    # In one write each: the trace shows between which calls it was promised.
    def live(_said: object = None) -> None:
        Life(root, lambda what, ident: bool(os.write(1, f"{what} {ident}\n".encode()))).lead()

    if dies_at:
        assert lead(live, found(), at=dies_at).status == signal.SIGKILL
    live()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
