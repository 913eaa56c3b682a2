"""Publishing a group index: once, whoever does it."""

from __future__ import annotations

from pathlib import Path

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2
from ckpt_server.publisher import publish_group
from tests.support.builders import memory_store
from tests.support.sealing import make_world, seal


def test_I6_group_index_that_another_node_published_is_left_as_it_is(tmp_path: Path) -> None:
    """Two nodes may pack the same segments differently; the bytes that a manifest may depend on stay."""
    world = make_world(groups=((0,),))
    store, ident, key = memory_store(), CheckpointId(10, 1), "run-000000000000"
    stagings = [StagingDir(tmp_path / name).ensure() for name in ("one", "two")]
    for staging, offset in zip(stagings, (0, 64), strict=True):
        seal(staging, key, ident, world, 0)
        index = staging.read_index(key, ident, 0)
        record = disk_pb2.UploadRecord(object_key=keys.segment_key(ident, 0), nbytes=index.nbytes)
        record.chunks.CopyFrom(index.chunks)
        record.chunks.object_keys.append(record.object_key)
        record.chunks.offsets.extend([offset] * (len(index.chunks.digests) // 16))
        staging.mark_uploaded(key, ident, 0, record)
    group = stagings[0].read_index(key, ident, 0).group
    publish_group(store, stagings[0], key, ident, group)
    before = store.get(keys.group_key(ident, 0, 1))
    publish_group(store, stagings[1], key, ident, group)
    assert store.get(keys.group_key(ident, 0, 1)) == before
    store.put(keys.group_key(ident, 0, 1), before[:-1])  # a damaged one is mended
    publish_group(store, stagings[1], key, ident, group)
    assert store.get(keys.group_key(ident, 0, 1)) != before[:-1]
