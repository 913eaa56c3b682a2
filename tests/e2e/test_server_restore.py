"""Reading, listing, pinning, pruning and verifying through a staging server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import (
    InvalidInputError,
    NotFoundError,
    RefusedError,
)
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.segment import CHUNK_NBYTES
from ckpt.geometry import Box
from ckpt.rpc import channel
from ckpt.storage.open import open_store
from tests.support.sealing import make_world, seal
from tests.support.server import Server, eventually, save

ID = CheckpointId(10, 1)


def test_read_tensor_gives_the_slice_numpy_gives(server: Server, url: str) -> None:
    world = make_world(rows=301, columns=700)
    server.wait_for(save(server, url, world, ID), ID)
    with server.restore() as client:
        for offsets, sizes in [
            ((0, 0), (301, 700)),
            ((149, 3), (5, 11)),
            ((7, 699), (294, 1)),
            ((5, 5), (0, 3)),
        ]:
            box = Box(offsets, sizes)
            got = client.read_tensor(url, "weight", box=box)
            assert got.ident == ID
            assert got.global_shape == (301, 700)
            assert got.numpy().dtype == np.float32
            assert got.numpy().tobytes() == world.tensors["weight"][box.slices()].tobytes()
            assert got.shape == sizes
        assert (
            client.read_tensor(url, "order", checkpoint="10").numpy().tolist()
            == world.tensors["order"].tolist()
        )


def test_read_chunks_gives_the_segment(server: Server, url: str) -> None:
    world = make_world(rows=CHUNK_NBYTES // 1024)
    run_key = save(server, url, world, ID)
    server.wait_for(run_key, ID)
    image = server.staging.segment_path(run_key, ID, 1).read_bytes()
    with server.restore() as client:
        ident, (index,) = client.segment_indexes(url, [1])
        count = len(index.chunks.digests) // 16
        got = list(client.read_chunks(url, 1, range(count)))

    assert ident == ID
    assert count > 1
    assert b"".join(got) == image


def test_a_client_with_grpcs_own_limits_gets_large_tensors_and_long_listings(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case I120."""
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", ())  # as any program's channel: at most 4 MiB a message
    world = make_world(rows=6000)  # 12 MiB
    server.wait_for(save(server, url, world, ID), ID)
    store = open_store(url)
    for step in range(11, 1111):
        store.put(keys.manifest_key(CheckpointId(step, 1)), b"never read by listing")
    store.close()
    with server.restore() as client:
        got = client.read_tensor(url, "weight", checkpoint=str(ID))
        assert got.numpy().tobytes() == world.tensors["weight"].tobytes()
    with server.catalog() as catalog:
        pages = [len(page.checkpoints) for page in catalog.list_pages(url)]
        assert pages == [1000, 101]


def test_reads_of_what_is_not_there_say_so(server: Server, url: str) -> None:
    with server.restore() as client:
        with pytest.raises(NotFoundError):
            client.read_tensor(url, "weight")
        server.wait_for(save(server, url, make_world(), ID), ID)
        with pytest.raises(NotFoundError) as tensor:
            client.read_tensor(url, "bias")
        with pytest.raises(InvalidInputError) as box:
            client.read_tensor(url, "weight", box=Box((60, 0), (5, 512)))
        with pytest.raises(InvalidInputError):
            list(client.read_chunks(url, 0, [99]))

    assert tensor.value.context["tensor"] == "bias"
    assert box.value.code == "box"


def test_a_damaged_local_copy_is_not_served(server: Server, url: str) -> None:
    world = make_world()
    run_key = save(server, url, world, ID)
    server.wait_for(run_key, ID)
    path = server.staging.segment_path(run_key, ID, 0)
    damaged = bytearray(path.read_bytes())
    damaged[-8:] = bytes(8)
    path.write_bytes(damaged)

    with server.restore() as client:
        assert client.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()


def test_catalog_lists_pins_prunes_and_verifies(server: Server, url: str) -> None:
    world, run_key = make_world(), ""
    for step in (10, 20, 30):
        run_key = save(server, url, world, CheckpointId(step, 1), keep_local=1)
        server.wait_for(run_key, CheckpointId(step, 1))
    seal(server.staging, run_key, CheckpointId(40, 1), world, 0)
    eventually(lambda: len(server.staging.checkpoints(run_key)) == 2, what="local retention")
    with server.catalog() as client:
        rows = [(row.id.step, row.location) for row in client.list_checkpoints(url, page_size=1)]
        assert rows == [(40, "local"), (30, "both"), (20, "remote"), (10, "remote")]
        assert client.list_runs() == [url]
        assert client.list_runs(url.rpartition("/")[0]) == [url]

        found = client.get_manifest(url)
        assert found.manifest.id.step == 30
        assert [tensor.name for tensor in found.layouts.tensors] == ["order", "weight"]
        assert [segment.rank for segment in found.segments] == [0, 1]
        assert [copy.rank for copy in found.local_copies] == [0, 1]

        assert client.pin(url, "10") == CheckpointId(10, 1)
        dry = client.prune(url, keep_last=1, dry_run=True)
        assert [(v.id.step, v.keep, v.reason) for v in dry.verdicts] == [
            (30, True, "latest"),
            (20, False, "no rule keeps it"),
            (10, True, "pinned"),
        ]
        with pytest.raises(RefusedError) as refused:
            client.prune(url, checkpoints=["30"])
        assert refused.value.code == "last-good"
        assert client.prune(url, keep_last=1).deleted_objects == dry.deleted_objects > 0
        assert [row.id.step for row in client.list_checkpoints(url)] == [40, 30, 10]
        with pytest.raises(InvalidInputError):
            client.prune(url)

        *_, done = client.verify(url, deep=True)
        assert done.done
        assert done.checked_bytes == done.total_bytes > 0


def test_verify_names_the_damage(server: Server, url: str) -> None:
    server.wait_for(save(server, url, make_world(), ID), ID)
    path = Path(url.removeprefix("file://")) / keys.segment_key(ID, 1)
    image = bytearray(path.read_bytes())
    image[-3] ^= 4
    path.write_bytes(image)
    with server.catalog() as client:
        assert [problem for step in client.verify(url) for problem in step.problems] == []
        (problem,) = (problem for step in client.verify(url, deep=True) for problem in step.problems)

    assert problem.kind == "CorruptError"
    assert "segment-00001" in str(problem.context)
