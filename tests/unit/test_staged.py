"""A step that is only sealed is proved like one that is committed, from the headers of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ckpt.errors import CorruptError
from ckpt.format.layout import LayoutSet, Mesh, Replicate, TensorLayout
from ckpt.format.summaries import Summaries
from ckpt.ops import catalog
from ckpt.ops.groups import read_layout
from ckpt.ops.holdings import segment_headers
from ckpt.ops.staged import prove_staged
from ckpt.storage.memory import MemoryStore
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2
from tests.support.builders import Built, FakeClock, build_checkpoint, claim, memory_store
from tests.support.sealing import seal_copy

RUN = "run-0123456789abcdef"


class Nodes:
    """Four ranks on two nodes, built in a store and sealed on both; node 1 has replicas of node 0."""

    def __init__(self, root: Path, **options: object) -> None:
        self.store: MemoryStore = memory_store()
        claim(self.store)
        self.built: Built = build_checkpoint(self.store, 20, world_size=4, group_size=2, **options)  # type: ignore[arg-type]
        self.places = [StagingDir(root / name).ensure() for name in ("a", "b")]
        seal_copy(self.places[0], RUN, self.store, self.built, [0, 1])
        seal_copy(self.places[1], RUN, self.store, self.built, [2, 3])
        seal_copy(replicas_dir(self.places[1]), RUN, self.store, self.built, [0, 1])

    def headers(self) -> list[disk_pb2.GroupHeader]:
        return [header for place in self.places for header in segment_headers(place, RUN, self.built.ident)]

    def prove(self, headers: list[disk_pb2.GroupHeader]) -> tuple[disk_pb2.Manifest, Summaries]:
        return prove_staged(self.built.ident, headers, lambda key: read_layout(self.store, key), FakeClock())


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_the_manifest_is_the_one_a_commit_writes(nodes: Nodes) -> None:
    headers = nodes.headers()
    assert len(headers) == 6  # two of them twice
    manifest, _ = nodes.prove(headers)
    committed = catalog.read_manifest(nodes.store, nodes.built.ident)
    for made in (manifest, committed):
        for field in ("write_id", "groups_digest", "committed_at"):
            made.ClearField(field)
    assert manifest == committed


def test_a_replica_stands_in_for_a_node_that_is_gone(nodes: Nodes) -> None:
    assert nodes.prove(list(segment_headers(nodes.places[1], RUN, nodes.built.ident)))


def test_a_rank_without_a_segment_is_refused(nodes: Nodes) -> None:
    """Case I33."""
    with pytest.raises(CorruptError) as caught:
        nodes.prove([header for header in nodes.headers() if header.segments[0].rank != 3])
    assert caught.value.code == "ranks"


def test_copies_that_are_not_of_one_segment_are_refused(nodes: Nodes) -> None:
    index = nodes.places[0].read_index(RUN, nodes.built.ident, 1)
    index.chunks.digests = bytes(len(index.chunks.digests))
    nodes.places[0].write_index(RUN, nodes.built.ident, 1, index)
    with pytest.raises(CorruptError) as caught:
        nodes.prove(nodes.headers())
    assert caught.value.code == "copies-differ"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"run": "other"}, "group-identity"),
        ({"world_size": 5}, "group-identity"),
        ({"parent": disk_pb2.GroupHeader(id={"step": 3, "attempt": 1}).id}, "group-identity"),
    ],
)
def test_parts_of_something_else_are_refused(nodes: Nodes, change: Mapping[str, object], code: str) -> None:
    headers = nodes.headers()
    for header in headers:
        if header.segments[0].rank in (2, 3):
            header.MergeFrom(disk_pb2.GroupHeader(**change))  # type: ignore[arg-type]
    with pytest.raises(CorruptError) as caught:
        nodes.prove(headers)
    assert caught.value.code == code


def test_replicas_that_differed_when_they_were_saved_are_refused(nodes: Nodes) -> None:
    """The audit's digests, which otherwise the committer compares."""
    headers = [header for header in nodes.headers() if header.segments[0].rank < 4]
    seen = set()
    for header in headers:
        summary = header.segments[0]
        number = len(nodes.built.layouts)
        other = b"\1" * 8 * number if summary.rank != 2 else b"\2" * 8 * number
        summary.audit.CopyFrom(disk_pb2.ReplicaAudit(shift=0, own=b"\1" * 8 * number, other=other))
        seen.add(summary.rank)
    assert seen == {0, 1, 2, 3}
    with pytest.raises(CorruptError) as caught:
        nodes.prove(headers)
    assert caught.value.code == "replicas-differ"


def test_ranks_that_disagree_on_a_tensor_are_refused(tmp_path: Path) -> None:
    def layouts_of(rank: int) -> LayoutSet:
        mesh = Mesh.from_ranks((4,), ("dp",), range(4))
        shape = (5,) if rank < 2 else (6,)
        return LayoutSet([TensorLayout("model.bias", "float32", shape, mesh, (Replicate(),))])

    nodes = Nodes(tmp_path, layouts_of=layouts_of, commit=False)
    with pytest.raises(CorruptError) as caught:
        nodes.prove(nodes.headers())
    assert caught.value.code == "layout-mismatch"
