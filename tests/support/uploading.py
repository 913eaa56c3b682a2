"""One node that seals, uploads and commits made-up worlds in this process, each when the test says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ckpt.format import keys
from ckpt.format.crypt import ChunkKey
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import load_checkpoint
from ckpt.ops.commit import CommitState, try_commit
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.verify import verify_deep
from ckpt.storage.base import Store
from ckpt.storage.staging import StagingDir
from ckpt_server.compression import Compression
from ckpt_server.lending import Lending
from ckpt_server.publisher import publish_group
from ckpt_server.uploader import Segment, Uploaded, Uploader
from tests.support.builders import FakeClock
from tests.support.sealing import World, seal

__all__ = ["CHUNK", "Node", "changed"]

CHUNK = 4096
"""Bytes: small chunks make many of little data."""


def changed(world: World, rows: range, seed: int) -> World:
    """The same world with other values in some rows of ``weight``."""
    weight = world.tensors["weight"].copy()
    weight[rows.start : rows.stop] = np.random.default_rng(seed).standard_normal(
        (len(rows), weight.shape[1]), dtype=np.float32
    )
    return replace(world, tensors={**world.tensors, "weight": weight})


class Node:
    """A staging directory and what the server does with it.

    Args:
        path: of the staging directory.
        store: of the run.
        chunk_nbytes: of the segments.
        key: what chunks are encrypted with in the store.
    """

    def __init__(
        self, path: Path, store: Store, *, chunk_nbytes: int = CHUNK, key: ChunkKey | None = None
    ) -> None:
        self.chunk_nbytes = chunk_nbytes
        self.staging = StagingDir(path).ensure()
        self.store = store
        self.run_key = keys.run_key(store.url)
        self.clock = FakeClock()
        self.uploader = Uploader(self.staging, part_nbytes=1 << 20, concurrency=2, encoders=1, key=key)
        self.restart()

    def restart(self) -> None:
        """Forget what only the process knows."""
        self.lending = Lending()
        self.compression = Compression(threads=1, clock=self.clock, name="run")

    def seal(self, ident: CheckpointId, world: World, *, parent: CheckpointId | None = None) -> None:
        for rank in world.groups[0]:
            seal(
                self.staging, self.run_key, ident, world, rank, parent=parent, chunk_nbytes=self.chunk_nbytes
            )

    def upload(self, ident: CheckpointId, rank: int = 0, *, wanted: str = "off") -> Uploaded:
        return self.uploader.upload(
            self.store,
            Segment(run_key=self.run_key, ident=ident, rank=rank),
            lending=self.lending,
            compression=self.compression,
            wanted=wanted,
        )

    def publish(self, ident: CheckpointId, world: World) -> None:
        group = self.staging.read_index(self.run_key, ident, world.groups[0][0]).group
        publish_group(self.store, self.staging, self.run_key, ident, group)

    def commit(self, ident: CheckpointId) -> CommitState:
        return try_commit(self.store, ident, clock=self.clock).state

    def save(
        self,
        ident: CheckpointId,
        world: World,
        *,
        parent: CheckpointId | None = None,
        wanted: str = "off",
        commit: bool = True,
    ) -> list[Uploaded]:
        """All of it; returns what each rank's upload came to."""
        self.seal(ident, world, parent=parent)
        done = [self.upload(ident, rank, wanted=wanted) for rank in world.groups[0]]
        self.publish(ident, world)
        if commit:
            assert self.commit(ident) is CommitState.COMMITTED
        return done

    def check(self, ident: CheckpointId, world: World) -> None:
        """The checkpoint is whole and gives back the bits of ``world``, from the store alone."""
        checkpoint = load_checkpoint(self.store, ident)
        assert verify_deep(checkpoint) == []
        for name, expected in world.tensors.items():
            assert fetch_tensor(checkpoint, name)[2] == expected.tobytes()
