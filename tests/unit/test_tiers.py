"""Which copy a chunk is read from: the nearest good one, whatever became of the nearer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import CorruptError
from ckpt.format.keys import segment_key
from ckpt.geometry import Region
from ckpt.ops import catalog
from ckpt.ops.fetch import FetchStats, NumpyTargets, fetch
from ckpt.ops.tiers import LOCAL, REMOTE, REPLICA, Tier, node_tiers
from ckpt.plan.read import Want, plan_read
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from tests.support.builders import Built, CountingStore, build_checkpoint, claim, memory_store
from tests.support.sealing import seal_copy

_RUN = "run-0123456789abcdef"
_CHUNK = 64 * 1024  # the sample's embedding makes several chunks per segment


@dataclass
class Node:
    """A committed checkpoint of two ranks, rank 0 sealed here and rank 1 held as a replica."""

    staging: StagingDir
    store: CountingStore
    built: Built

    @property
    def tiers(self) -> Sequence[Tier]:
        return node_tiers(self.staging, _RUN)

    def segment(self, rank: int, *, replica: bool = False) -> Path:
        place = replicas_dir(self.staging) if replica else self.staging
        return place.segment_path(_RUN, self.built.ident, rank)

    def read(self) -> FetchStats:
        """Read every tensor and compare its bits."""
        checkpoint = catalog.load_checkpoint(self.store, self.built.ident)
        self.store.reset()
        names = list(self.built.layouts)
        arrays = [np.zeros_like(self.built.tensors[name]) for name in names]
        wants = [Want(name, Region.whole(arrays[i].shape), i) for i, name in enumerate(names)]
        stats = fetch(
            checkpoint, plan_read(checkpoint.layouts, wants), NumpyTargets(arrays), tiers=self.tiers
        )
        for name, array in zip(names, arrays, strict=True):
            assert array.tobytes() == self.built.tensors[name].tobytes(), name
        return stats


@pytest.fixture
def node(tmp_path: Path) -> Node:
    store = memory_store()
    claim(store)
    built = build_checkpoint(store, 20, world_size=2, chunk_nbytes=_CHUNK)
    staging = StagingDir(tmp_path / "staging").ensure()
    seal_copy(staging, _RUN, store, built, [0])
    seal_copy(replicas_dir(staging), _RUN, store, built, [1])
    return Node(staging, CountingStore(store), built)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_own_segments_and_replicas_are_read_and_the_store_is_left_alone(node: Node) -> None:
    stats = node.read()
    sizes = {rank: node.built.segments[rank].nbytes for rank in range(2)}
    assert dict(stats.nbytes) == {LOCAL: sizes[0], REPLICA: sizes[1]}
    assert stats.repaired_chunks == 0
    assert node.store.total == 0


def test_a_bad_chunk_comes_from_the_next_tier_and_is_reported(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ckpt")
    seal_copy(replicas_dir(node.staging), _RUN, node.store, node.built, [0])
    _flip(node.segment(0), _CHUNK + 5)
    stats = node.read()
    assert stats.repaired_chunks == 1
    assert stats.nbytes[LOCAL] == node.built.segments[0].nbytes - _CHUNK
    assert stats.nbytes[REPLICA] == node.built.segments[1].nbytes + _CHUNK
    assert stats.nbytes[REMOTE] == 0
    bad = [record.fields for record in caplog.records if getattr(record, "event", "") == "fetch.bad_copy"]  # type: ignore[attr-defined]
    assert [(fields["tier"], fields["error"].code) for fields in bad] == [(LOCAL, "digest")]


def test_a_chunk_that_is_bad_in_every_tier_comes_from_the_store(node: Node) -> None:
    seal_copy(replicas_dir(node.staging), _RUN, node.store, node.built, [0])
    _flip(node.segment(0), 3)
    _flip(node.segment(0, replica=True), 3)
    stats = node.read()
    assert (stats.nbytes[REMOTE], stats.repaired_chunks) == (_CHUNK, 1)


def test_a_replica_that_is_gone_or_cut_short_is_no_copy(node: Node) -> None:
    node.segment(0).unlink()
    path = node.segment(1, replica=True)
    path.write_bytes(path.read_bytes()[:-1])
    stats = node.read()
    last = node.built.segments[1].nbytes % _CHUNK
    assert stats.nbytes[REMOTE] == node.built.segments[0].nbytes + last
    assert stats.nbytes[REPLICA] == node.built.segments[1].nbytes - last


def test_no_good_copy_anywhere_is_an_error(node: Node) -> None:
    _flip(node.segment(0), 3)
    node.store.delete([segment_key(node.built.ident, 0)])
    with pytest.raises(CorruptError):
        node.read()
