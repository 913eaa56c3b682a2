"""``<staging>/replicas``: laid out like a staging directory, plus one small file per node group of a step.

    runs/<run key>/<id>/segment-00017.safetensors, .index, .uploaded     as in a staging directory
    runs/<run key>/<id>/owner-00002.json                                 whose the segments of group 2 are

RD1 ``owner-<group>.json`` is durable before the first segment of the group is sealed.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.storage.durable import fsync_dir, write_durably
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import ARRIVING, StagingDir, os_errors
from ckpt_proto.v1 import common_pb2

__all__ = ["ReplicaDir", "ReplicaUnit"]

_OWNER = re.compile(r"owner-(\d{5})\.json", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaUnit:
    """One node group's part of one step, as far as it is held here.

    Attributes:
        ident: the step.
        group: of the owner's ranks.
        owner: the node whose part it is.
        sealed: ranks whose replica is whole, ascending.
        noted_at: Unix seconds when it was first offered.
    """

    ident: CheckpointId
    group: common_pb2.NodeGroup
    owner: PeerNode
    sealed: tuple[int, ...]
    noted_at: float

    @property
    def is_whole(self) -> bool:
        return set(self.group.ranks) <= set(self.sealed)


class ReplicaDir:
    """What is held of other nodes. Derived from files at every call; any thread."""

    def __init__(self, staging: StagingDir) -> None:
        self.files = replicas_dir(staging)

    def note_owner(
        self, run_key: str, ident: CheckpointId, group: common_pb2.NodeGroup, owner: PeerNode
    ) -> None:
        """Write down whose the group's segments are, durably (RD1). An unchanged note is left alone."""
        path = self._owner_path(run_key, ident, group.index)
        body = {
            "owner": owner.to_json(),
            "group": {"index": group.index, "count": group.count, "ranks": list(group.ranks)},
        }
        data = json.dumps(body).encode()
        self.files.make_checkpoint_dir(run_key, ident)
        with os_errors("the owner of a replica cannot be noted", path=path):
            with contextlib.suppress(FileNotFoundError):
                if path.read_bytes() == data:
                    return
            write_durably(path, data)

    def units(self, run_key: str) -> list[ReplicaUnit]:
        """Everything held of a run, by step, attempt and group. Raises UnavailableError."""
        found = []
        for ident in self.files.checkpoints(run_key):
            sealed = set(self.files.sealed_ranks(run_key, ident))
            folder = self.files.checkpoint_dir(run_key, ident)
            with os_errors("replicas cannot be listed", path=folder):
                paths = sorted(path for path in folder.glob("owner-*.json") if _OWNER.fullmatch(path.name))
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        found.append(_unit(ident, path, sealed))
        return found

    def nbytes(self) -> int:
        """Bytes of all replicas, those that are arriving in full. Raises UnavailableError."""
        total = 0
        with os_errors("replicas cannot be listed", path=self.files.path):
            for path in self.files.path.glob("runs/*/*/segment-*"):
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
        return total

    def remove(self, run_key: str, unit: ReplicaUnit) -> None:
        """Delete a group's replicas of one step; what is gone already is no error.

        Sealed markers go first, so that a crash in the middle leaves no marker without its segment (SD1), and
        the owner's note last, so that the rest is found again.
        """
        files, ident = self.files, unit.ident
        folder = files.checkpoint_dir(run_key, ident)
        with os_errors("a replica cannot be removed", path=folder):
            if not folder.is_dir():
                return
            for rank in unit.group.ranks:
                files.index_path(run_key, ident, rank).unlink(missing_ok=True)
            fsync_dir(folder)
            for rank in unit.group.ranks:
                segment, index = (
                    files.segment_path(run_key, ident, rank),
                    files.index_path(run_key, ident, rank),
                )
                segment.unlink(missing_ok=True)
                files.uploaded_path(run_key, ident, rank).unlink(missing_ok=True)
                for path in (segment, index):
                    path.with_name(path.name + ARRIVING).unlink(missing_ok=True)
            self._owner_path(run_key, ident, unit.group.index).unlink(missing_ok=True)
            fsync_dir(folder)
            if not any(_OWNER.fullmatch(path.name) for path in folder.iterdir()):
                files.remove_checkpoint(run_key, ident)

    def _owner_path(self, run_key: str, ident: CheckpointId, group: int) -> Path:
        return self.files.checkpoint_dir(run_key, ident) / f"owner-{group:05d}.json"


def _unit(ident: CheckpointId, path: Path, sealed: set[int]) -> ReplicaUnit:
    try:
        body = json.loads(path.read_bytes())
        group = common_pb2.NodeGroup(**body["group"])
        owner = PeerNode.from_json(body["owner"])
    except (ValueError, KeyError, TypeError) as error:
        raise CkptError("the note of a replica's owner cannot be read", code="decode", path=path) from error
    ranks = tuple(sorted(sealed & set(group.ranks)))
    return ReplicaUnit(ident=ident, group=group, owner=owner, sealed=ranks, noted_at=path.stat().st_mtime)
