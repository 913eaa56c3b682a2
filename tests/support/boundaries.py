"""The points at which a process may die: every call in the code that changes files or the store.

They are found in the source (:func:`found`), and listed by hand where they belong (:data:`OPERATIONS`), so
that a new one cannot come unseen. A label is ``module.function: call``, with ``#2`` for the second such call.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXEMPT", "OPERATIONS", "OUTSIDE", "REPAIR", "Site", "found"]

ROOT = Path(__file__).parents[2]
_WHERE = ("ckpt/flusher", "ckpt/storage", "ckpt/ops", "server/ckpt_server")

_SYSTEM = {"fsync", "fdatasync", "link", "unlink", "remove", "rename", "replace", "rmdir", "mkdir", "rmtree"}
_SYSTEM |= {"ftruncate", "truncate", "pwrite", "hardlink_to", "write_bytes", "write_text", "touch"}
_DURABLE = {"write_durably", "fsync_dir", "sync_names", "make_dirs", "new_file", "write_all", "commit_put"}
_STAGING = {"write_index", "write_layout", "mark_uploaded", "mark_committed", "unseal", "remove_checkpoint"}
_STAGING |= {"retire_checkpoint", "make_checkpoint_dir", "note_owner", "take_spare", "drop_spares"}
_STORE = {"put", "put_new", "put_parts", "delete"}

OUTSIDE = {
    "ckpt.flusher.control": "wakes its own thread",
    "ckpt.flusher.heartbeat": "the pulse of a rank in shared memory",
    "ckpt.ops.ledger": "how ranks spent their time: a report, nothing is restored from it",
    "ckpt.ops.recovery": "timing of the last restart: a report, nothing is restored from it",
    "ckpt.storage.aside": "tests/unit/test_aside.py cuts it off at every call",
    "ckpt.storage.fsspec_store": "requests to a store: tests/crash/test_store_boundaries.py",
    "ckpt.storage.known_nodes": "where other nodes' servers were; asked again at every start",
    "ckpt.storage.lives": "which processes lived, for the timing of a restart",
    "ckpt.storage.logfile": "log rotation",
    "ckpt.storage.memory": "a store in memory",
    "ckpt.storage.obstore_store": "requests to a store: tests/crash/test_store_boundaries.py",
    "ckpt.storage.peerfile": "where this node's server is; written at every start",
    "ckpt.storage.pulse": "the pulse of a rank in shared memory",
    "ckpt.storage.s3fs_store": "requests to a store: tests/crash/test_store_boundaries.py",
    "ckpt_server.app": "socket and server.json; written at every start",
    "ckpt_server.liveness": "the pulse of a rank in shared memory",
    "ckpt_server.lock": "the lock and server.json; written at every start",
    "ckpt_server.trainers": "which trainers live; forgotten by their process id",
}
"""Modules whose changes no checkpoint depends on, or that other tests kill, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One call.

    Attributes:
        label: of the boundary.
        path: of the source file.
        first, last: lines of the call.
    """

    label: str
    path: str
    first: int
    last: int


def found() -> list[Site]:
    """Return every call of the kinds above in the modules that are not :data:`OUTSIDE`."""
    sites = []
    for folder in _WHERE:
        for path in sorted((ROOT / folder).glob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("server.")
            if module not in OUTSIDE:
                sites += _sites(module, path)
    return sites


def _sites(module: str, path: Path) -> Iterator[Site]:
    seen: Counter[str] = Counter()
    for function, call in _calls(ast.parse(path.read_text()), ""):
        if (name := _change(call)) is None:
            continue
        label = f"{module.removeprefix('ckpt.')}.{function}: {name}"
        seen[label] += 1
        number = f"#{seen[label]}" if seen[label] > 1 else ""
        yield Site(
            label=label + number, path=str(path), first=call.lineno, last=call.end_lineno or call.lineno
        )


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        name = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}" if function else child.name
        elif isinstance(child, ast.Call):
            yield function, child
        yield from _calls(child, name)


def _change(call: ast.Call) -> str | None:
    """The name of the change that ``call`` makes, or None."""
    target = call.func
    if isinstance(target, ast.Name):
        return target.id if target.id in _DURABLE | _STAGING else None
    if not isinstance(target, ast.Attribute):
        return None
    name, owner = target.attr, ast.unparse(target.value)
    if name in _STORE:
        return f"{name}" if "store" in owner.lower() or owner == "self" else None
    if name == "replace" and (len(call.args) != 1 or call.keywords):
        return None  # of a string, or of a dataclass
    return name if name in _SYSTEM | _DURABLE | _STAGING else None


OPERATIONS: dict[str, tuple[str, ...]] = {
    "every file": (
        "storage.durable.fsync_dir: fsync",
        "storage.durable.new_file: write_all",
        "storage.durable.new_file: fsync",
        "storage.durable.new_file: unlink",
        "storage.durable.write_durably: new_file",
        "storage.durable.write_durably: replace",
        "storage.durable.write_durably: fsync_dir",
        "storage.durable.make_dirs: sync_names",
        "storage.durable.sync_names: fsync_dir",
    ),
    "start": (
        "storage.staging.StagingDir.ensure: make_dirs",
        "storage.staging.StagingDir.ensure: make_dirs#2",
        "storage.staging.StagingDir.ensure: make_dirs#3",
        "storage.staging.StagingDir.write_run_config: make_dirs",
        "storage.staging.StagingDir.token: write_durably",
        "storage.staging.StagingDir.token: link",
        "storage.staging.StagingDir.token: unlink",
        "storage.staging.StagingDir.token: fsync_dir",
        "storage.staging.StagingDir.write_run_config: write_durably",
        "storage.staging.StagingDir.clear_ended: unlink",
        "storage.staging.StagingDir.mark_ended: make_dirs",
        "storage.staging.StagingDir.mark_ended: write_durably",
        "ops.condemn.protected: put",
        "ops.attempts._claim: commit_put",
        "ops.condemn.protected: delete",
    ),
    "save": (
        "flusher.write.seal_segment: make_checkpoint_dir",
        "storage.staging.StagingDir.make_checkpoint_dir: make_dirs",
        "flusher.write.seal_segment: take_spare",
        "storage.spares.take_spare: link",
        "storage.spares.take_spare: unlink",
        "storage.direct.write_chunks.write_one: write_all",
        "storage.direct.DirectFile.write_all: pwrite",
        "storage.direct.write_chunks: ftruncate",
    ),
    "seal": (
        "flusher.write._publish: fdatasync",
        "flusher.write._publish: replace",
        "flusher.write._publish: write_layout",
        "storage.staging.StagingDir.write_layout: make_dirs",
        "storage.staging.StagingDir.write_layout: write_durably",
        "storage.staging.StagingDir.write_layout: sync_names",
        "flusher.write._publish: fsync_dir",
        "flusher.write._publish: write_index",
        "storage.staging.StagingDir.write_index: write_durably",
        "flusher.write._remove_quietly: unlink",
    ),
    "replicate": (
        "ckpt_server.replica_dir.ReplicaDir.note_owner: make_checkpoint_dir",
        "ckpt_server.replica_dir.ReplicaDir.note_owner: write_durably",
        "ckpt_server.receiver.Receiver.offer: write_layout",
        "ckpt_server.receiver.Receiver._note: make_checkpoint_dir",
        "ckpt_server.receiver.Receiver._note: write_durably",
        "ckpt_server.receiver.Receiver._make_room: truncate",
        "ckpt_server.receiver._write_full: pwrite",
        "ckpt_server.receiver.Receiver._seal: fdatasync",
        "ckpt_server.receiver.Receiver._seal: rename",
        "ckpt_server.receiver.Receiver._seal: fsync_dir",
        "ckpt_server.receiver.Receiver._seal: write_index",
        "ckpt_server.receiver.Receiver._seal: unlink",
        "ckpt_server.keeper.ReplicaKeeper.greeted: mark_committed",
        "ckpt_server.adopter.Adopter._committed: mark_committed",
        "ckpt_server.keeper.ReplicaKeeper._drop: remove",
        "ckpt_server.replica_dir.ReplicaDir.remove: unlink",
        "ckpt_server.replica_dir.ReplicaDir.remove: fsync_dir",
        "ckpt_server.replica_dir.ReplicaDir.remove: unlink#2",
        "ckpt_server.replica_dir.ReplicaDir.remove: unlink#3",
        "ckpt_server.replica_dir.ReplicaDir.remove: unlink#4",
        "ckpt_server.replica_dir.ReplicaDir.remove: unlink#5",
        "ckpt_server.replica_dir.ReplicaDir.remove: fsync_dir#2",
        "ckpt_server.replica_dir.ReplicaDir.remove: remove_checkpoint",
    ),
    "upload": (
        "ops.borrow.secure: put",
        "ckpt_server.uploader.Uploader._send: put_parts",
        "ckpt_server.uploader.Uploader.upload: mark_uploaded",
        "storage.staging.StagingDir.mark_uploaded: write_durably",
        "storage.local.LocalStore.head: sync_names",
        "storage.local.LocalStore._settle_names: sync_names",
        "storage.local.LocalStore._settle_names: fsync_dir",
        "storage.local.LocalStore._write: make_dirs",
        "storage.durable.make_dirs: mkdir",
        "storage.durable.make_dirs: fsync_dir",
        "storage.local.LocalStore._write: new_file",
        "storage.local._replace: replace",
        "storage.local.LocalStore._write: fsync_dir",
    ),
    "commit": (
        "ops.groups._put_once: put",
        "ops.groups._put_first: put_new",
        "ops.commit.try_commit: commit_put",
        "storage.conditional.commit_put: put_new",
        "ops.commit._undo_if_deleted: delete",
        "storage.local._link: hardlink_to",
        "storage.local.LocalStore.probe_conditional: delete",
        "storage.staging.StagingDir.mark_committed: write_durably",
    ),
    "retain": (
        "ckpt_server.retention.retain_local: retire_checkpoint",
        "ckpt_server.retention.retain_local: remove_checkpoint",
        "ckpt_server.retention.retain_local: drop_spares",
        "storage.spares.retire_checkpoint: unseal",
        "storage.spares.retire_checkpoint: mkdir",
        "storage.spares.retire_checkpoint: replace",
        "storage.spares.retire_checkpoint: remove_checkpoint",
        "storage.spares.drop_spares: unlink",
        "storage.staging.StagingDir.unseal: unlink",
        "storage.staging.StagingDir.unseal: fsync_dir",
        "storage.staging.StagingDir.remove_checkpoint: unseal",
        "storage.staging.StagingDir.remove_checkpoint: rmtree",
        "storage.staging.StagingDir.remove_checkpoint: fsync_dir",
    ),
    "prune": (
        "ops.pins.pin: put",
        "ops.pins.unpin: delete",
        "ops.condemn.Condemned.__init__: put",
        "ops.prune.execute_prune: delete",
        "ops.references.put_held: put",
        "ops.prune._delete_parts: delete",
        "ops.prune._delete_parts: delete#2",
        "ops.prune._free: delete",
        "ops.prune._free: delete#2",
        "ops.prune.execute_prune: delete#2",
        "ops.condemn.Condemned.withdraw: delete",
        "storage.local.LocalStore.delete: unlink",
        "storage.local.LocalStore._settle: rmdir",
        "storage.local.LocalStore._settle: fsync_dir",
    ),
    "sweep": (
        "flusher.write._sweep_one: unlink",
        "ops.sweep._now: put",
        "ops.sweep._now: delete",
        "ops.sweep._delete_orphan: delete",
        "ops.sweep._delete_orphan: delete#2",
        "ops.sweep._sweep_passing: delete",
        "ops.sweep._sweep_passing: delete#2",
        "storage.local.LocalStore.abort_uploads: unlink",
        "storage.leftovers.sweep_leftovers: unlink",
    ),
}
"""Operation -> its boundaries. tests/crash/test_every_boundary.py kills a process at each."""

_REPAIR = {
    "ops.rebuild.Rebuilder.rebuild: put_parts",
    "ops.records.repair_records: put",
    "ops.repair._Repair.run: put",
    "ops.repair_local._replace: new_file",
    "ops.repair_local._replace: replace",
    "ops.repair_local._replace: fsync_dir",
    "ops.repair_local._replace: write_index",
}
REPAIR = {
    "damaged": _REPAIR | {"ops.records._put_attempt: put"},
    "missing": _REPAIR | {"ops.records._put_attempt: put_new"},
}
"""How the attempt's record is -> boundaries of ckpt repair. tests/crash/test_repair_kill.py kills at each."""

EXEMPT = {
    "flusher.write._confirm: fsync_dir": "in a second life only; changes nothing",
    "storage.staging.StagingDir.write_run_config: sync_names": "in a second life only; changes nothing",
    "ops.repair_local._replace: unlink": "only where retention has removed the segment meanwhile",
    "ops.sweep._Strays.sweep: delete": "one request that deletes objects no index names: as _delete_orphan",
    "flusher.embedded.start_embedded_server: remove": "of a list in memory",
    "flusher.write._open_alone: unlink": "tests/crash/test_spares.py: a spare that somebody reads",
    "storage.local.LocalStore._remove_leftovers: unlink": "as LocalStore.abort_uploads",
    "storage.local._check_and_replace: replace": "file systems without hard links: not a conditional put",
    "storage.staging.StagingDir.forget_trainer: unlink": "trainers are forgotten by their process id too",
    "ops.groups._put_first: put": "as put_new, where two servers encode one segment differently",
    "ops.groups._put_mark: put": "of 64 groups and more: a hint put after what it speaks of",
    "ckpt_server.adopter.Adopter.ask_store.work: mark_committed": "as ReplicaKeeper.greeted",
    "ckpt_server.keeper.ReplicaKeeper._note_commits: mark_committed": "as ReplicaKeeper.greeted",
    "ckpt_server.pipeline.Pipeline._committed: mark_committed": "tests/crash/test_server_kill.py",
    "ckpt_server.receiver.Receiver._note: unlink": "tests/crash/test_replication_kill.py: sent anew",
    "ckpt_server.receiver.Receiver._make_room: unlink": "as _note: sent anew",
    "ckpt_server.replica_service.ReplicaService.Offer: note_owner": "as ReplicaDir.note_owner",
}
"""Boundaries that the life of tests.support.lifecycle does not come to, with the reason."""
