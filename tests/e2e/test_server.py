"""The staging server as a process: register, seal, upload, commit, watch, retain."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from ckpt.client import CatalogClient
from ckpt.errors import (
    InvalidInputError,
    NotFoundError,
)
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import list_checkpoints
from ckpt.storage.open import open_store
from ckpt.storage.staging import COMMITTED_NAME, StagingDir
from ckpt_proto.v1 import staging_pb2
from tests.support.builders import build_checkpoint, claim
from tests.support.faultproxy import FaultProxy
from tests.support.s3 import Ministack, Rclone
from tests.support.sealing import World, make_world, seal
from tests.support.server import Server, State, eventually, save

ID = CheckpointId(10, 1)


def test_register_tells_about_path_and_store(server: Server, url: str, tmp_path: Path) -> None:
    with server.client() as client:
        shared = client.register(url, staging=server.staging)
        elsewhere = client.register(url, staging=StagingDir(tmp_path / "other").ensure())

    assert shared.shares_path
    assert not elsewhere.shares_path
    assert shared.conditional_put
    assert shared.run_key == keys.run_key(url)
    assert server.staging.read_run_config(shared.run_key).url == url


def test_sealed_segments_become_a_committed_checkpoint(server: Server, url: str) -> None:
    world = make_world()
    run_key = save(server, url, world, ID)

    status = server.wait_for(run_key, ID)

    assert list(status.sealed_ranks) == [0, 1]
    assert status.uploaded_bytes == status.total_bytes > 0
    assert not status.HasField("error")
    assert server.staging.is_committed(run_key, ID)
    store = open_store(url)
    stored = store.get(keys.segment_key(ID, 1))
    assert stored == server.staging.segment_path(run_key, ID, 1).read_bytes()
    assert store.head(keys.manifest_key(ID)).nbytes > 0


def test_uploaded_object_is_a_safetensors_file(server: Server, url: str, tmp_path: Path) -> None:
    world = make_world()
    server.wait_for(save(server, url, world, ID), ID)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(open_store(url).get(keys.segment_key(ID, 0)))

    assert load_file(copy)["weight"].tobytes() == world.tensors["weight"][:32].tobytes()


def test_scan_finds_what_nobody_announced(server: Server, url: str) -> None:
    world = make_world()
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
    for rank in range(world.size):
        seal(server.staging, run_key, ID, world, rank)

    server.wait_for(run_key, ID)


def test_watch_tells_each_state_in_order(server: Server, url: str) -> None:
    world = make_world()
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
        seen: list[int] = []
        watch = client.watch(run_key, timeout_s=30)
        seal(server.staging, run_key, ID, world, 0)
        client.seal(run_key, ID, 0)
        for status in watch:
            if status.state not in seen:
                seen.append(status.state)
            if status.state == State.STATE_SEALING and status.uploaded_bytes:
                seal(server.staging, run_key, ID, world, 1)
                client.seal(run_key, ID, 1)
            if status.state == State.STATE_COMMITTED:
                break

    # A watcher gets every last state, not every one in between.
    assert seen == sorted(seen)
    assert seen[0] == State.STATE_SEALING
    assert seen[-1] == State.STATE_COMMITTED


def test_status_lists_a_half_sealed_step_with_its_age(server: Server, url: str) -> None:
    """Case I62."""
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
        seal(server.staging, run_key, ID, make_world(), 0)
        client.seal(run_key, ID, 0)
        os.utime(server.staging.index_path(run_key, ID, 0), (1_000_000_000, 1_000_000_000))
        status = client.status(run_key)

        assert [step.state for step in status.steps] == [State.STATE_SEALING]
        assert status.oldest_pending_s >= 0
        assert client.status("another-run").steps == []


def test_restart_finds_its_work(tmp_path: Path, url: str) -> None:
    world = make_world()
    with Server(tmp_path / "staging") as first:
        with first.client() as client:
            run_key = client.register(url, staging=first.staging).run_key
        assert first.terminate() == 0
    for rank in range(world.size):
        seal(first.staging, run_key, ID, world, rank)

    with Server(tmp_path / "staging") as second:
        second.wait_for(run_key, ID)


def test_seal_of_an_unknown_run_and_of_an_unsealed_segment_are_told_apart(server: Server, url: str) -> None:
    with server.client() as client:
        with pytest.raises(NotFoundError) as unknown:
            client.seal("no-such-run", ID, 0)
        run_key = client.register(url, staging=server.staging).run_key
        with pytest.raises(InvalidInputError) as unsealed:
            client.seal(run_key, ID, 0)

    assert "Register" in unknown.value.message
    assert unsealed.value.code == "not-sealed"


def test_bad_registrations_are_refused_before_anything_is_written(server: Server) -> None:
    with server.client() as client:
        for url in ("file:///", "no-scheme", "nosuchscheme://bucket/run", "file:///tmp/-bad-name"):
            with pytest.raises(InvalidInputError):
                client.register(url)
        with pytest.raises(InvalidInputError) as secret:
            client.register("s3://bucket/run", store_options={"secret_access_key": "hush"})
        assert secret.value.code == "secret"
        assert "hush" not in str(secret.value)
        assert server.staging.run_keys() == []


def test_a_store_that_is_down_keeps_nobody_from_registering(server: Server) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "region": "us-east-1"}
    with server.client() as client:
        reply = client.register("s3://bucket/run", staging=server.staging, store_options=options)

    assert not reply.conditional_put
    assert server.staging.read_run_config(reply.run_key).store_options == options


def test_damaged_chunk_fails_the_step_by_name_and_later_steps_go_on(server: Server, url: str) -> None:
    """Case I58."""
    world, later = make_world(), CheckpointId(20, 1)
    with server.client() as client:
        run_key = client.register(url, staging=server.staging).run_key
    for rank in range(world.size):
        # Out of the scan's sight until it is damaged.
        seal(server.staging, run_key, ID, world, rank) if rank else None
        seal(server.staging, run_key, later, world, rank)
    seal_damaged(server.staging, run_key, world)

    failed = server.wait_for(run_key, ID, State.STATE_FAILED)
    server.wait_for(run_key, later)

    assert failed.error.kind == "CorruptError"
    assert failed.error.context["chunk"] == "0"
    assert "segment-00000" in failed.error.context["where"]
    assert not server.staging.is_committed(run_key, ID)
    # Mended and announced again, it is tried again.
    seal(server.staging, run_key, ID, world, 0)
    with server.client() as client:
        client.seal(run_key, ID, 0)
    server.wait_for(run_key, ID)


def seal_damaged(staging: StagingDir, run_key: str, world: World) -> None:
    """Seal rank 0 with one bit flipped after the digest was taken."""
    scratch = StagingDir(staging.path.with_name("scratch")).ensure()
    seal(scratch, run_key, ID, world, 0)
    image = bytearray(scratch.segment_path(run_key, ID, 0).read_bytes())
    image[-1] ^= 1
    staging.segment_path(run_key, ID, 0).write_bytes(image)
    staging.write_index(run_key, ID, 0, scratch.read_index_bytes(run_key, ID, 0))


def test_two_nodes_commit_once_all_groups_are_there(tmp_path: Path, url: str) -> None:
    """Cases I03, I07."""
    world = make_world(groups=((0, 1), (2, 3)))
    run_key = keys.run_key(url)
    with Server(tmp_path / "a") as first, Server(tmp_path / "b") as second:
        for server, ranks in ((second, (2, 3)), (first, (0, 1))):
            with server.client() as client:
                client.register(url, staging=server.staging)
                for rank in ranks:
                    seal(server.staging, run_key, ID, world, rank)
                    client.seal(run_key, ID, rank)
            if server is second:
                second.wait_for(run_key, ID, State.STATE_UPLOADED)
                assert list(open_store(url).list_keys(keys.MANIFESTS)) == []
        first.wait_for(run_key, ID)
        second.wait_for(run_key, ID)


def test_another_node_commits_where_rank_0s_server_died(tmp_path: Path, url: str) -> None:
    world = make_world(groups=((0,), (1,)))
    with Server(tmp_path / "a") as first, Server(tmp_path / "b") as second:
        with first.client() as client:
            run_key = client.register(url, staging=first.staging).run_key
            seal(first.staging, run_key, ID, world, 0)
            client.seal(run_key, ID, 0)
        first.wait_for(run_key, ID, State.STATE_UPLOADED)
        first.kill()
        with second.client() as client:
            client.register(url, staging=second.staging)
            seal(second.staging, run_key, ID, world, 1)
            client.seal(run_key, ID, 1)
        second.wait_for(run_key, ID)


def test_local_retention_keeps_the_newest_committed_steps(server: Server, url: str) -> None:
    world, run_key = make_world(), ""
    for step in (10, 20, 30):
        run_key = save(server, url, world, CheckpointId(step, 1), keep_local=2)
        server.wait_for(run_key, CheckpointId(step, 1))

    expected = [CheckpointId(20, 1), CheckpointId(30, 1)]
    eventually(lambda: server.staging.checkpoints(run_key) == expected, what="oldest step is deleted")
    with server.client() as client:
        # It was committed and cleared away; who asks late still hears that.
        assert client.seal(run_key, CheckpointId(10, 1), 0).result == staging_pb2.SealResponse.RESULT_ACCEPTED
    server.wait_for(run_key, CheckpointId(10, 1))


def test_store_retention_is_applied_by_the_committer(server: Server, url: str) -> None:
    """Case I67."""
    world = make_world()
    for step in (10, 20, 30, 40):
        run_key = save(server, url, world, CheckpointId(step, 1), keep_last=1, keep_every=20)
        server.wait_for(run_key, CheckpointId(step, 1))
    with server.catalog() as catalog:

        def steps() -> list[int]:
            return [row.id.step for row in catalog.list_checkpoints(url) if row.location != "local"]

        eventually(lambda: steps() == [40, 20], what="10 and 30 are pruned")


def test_deletions_that_take_long_hold_up_no_commit(tmp_path: Path, s3_server: Ministack) -> None:
    """Case I73."""
    url = f"s3://{s3_server.make_bucket()}/run"
    begun, go = threading.Event(), threading.Event()

    def held(method: str, path: str) -> None:
        if method == "DELETE" or path.endswith("?delete"):
            begun.set()
            assert go.wait(60)

    def save_one(server: Server, step: int) -> None:
        ident = CheckpointId(step, 1)  # each of other values, else the first would be borrowed from
        server.wait_for(save(server, url, make_world(seed=step), ident, keep_last=1), ident)

    with FaultProxy(s3_server.port) as proxy:
        environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        with Server(tmp_path / "staging", environment=environment) as server:
            save_one(server, 10)
            proxy.fault = held
            save_one(server, 20)
            assert begun.wait(30)  # from here on the first one is being deleted
            save_one(server, 30)
            go.set()
            with contextlib.closing(open_store(url, s3_server.options)) as store:

                def listed() -> list[int]:
                    return [info.ident.step for info in list_checkpoints(store)]

                eventually(lambda: listed() == [30], what="30 is alone")


def test_overtaken_half_sealed_step_is_abandoned_after_its_grace(tmp_path: Path, url: str) -> None:
    world, later = make_world(), CheckpointId(20, 1)
    with Server(tmp_path / "staging", "--abandon-grace", "0.5") as server:
        with server.client() as client:
            run_key = client.register(url, staging=server.staging).run_key
            seal(server.staging, run_key, ID, world, 0)
            client.seal(run_key, ID, 0)
            save(server, url, world, later)
            server.wait_for(run_key, later)
            server.wait_for(run_key, ID, State.STATE_ABANDONED)
        eventually(lambda: server.staging.checkpoints(run_key) == [later], what="its folder is gone")


def committed_by_others_and_pruned(server: Server, url: str) -> str:
    """Step 10 is sealed and uploaded here; its commit by others and its prune were not seen; the run key."""
    with server:
        run_key = save(server, url, make_world(), ID)
        server.wait_for(run_key, ID)
        server.kill()
    with contextlib.closing(open_store(url)) as store:
        store.delete([info.key for info in store.list_keys("") if str(ID) in info.key])
    (server.staging.checkpoint_dir(run_key, ID) / COMMITTED_NAME).unlink()
    return run_key


def test_what_others_committed_and_pruned_meanwhile_leaves_the_disk_after_its_grace(
    tmp_path: Path, url: str
) -> None:
    later = CheckpointId(20, 1)
    server = Server(tmp_path / "staging", "--abandon-grace", "0.5")
    run_key = committed_by_others_and_pruned(server, url)
    with contextlib.closing(open_store(url)) as store:
        build_checkpoint(store, later.step)
    with server:
        status = server.wait_for(run_key, ID, State.STATE_ABANDONED)
        assert status.error.code == "missing"
        # Nothing newer is on this node yet.
        assert server.staging.sealed_ranks(run_key, ID) == [0, 1]
        newest = CheckpointId(30, 1)
        save(server, url, make_world(), newest)
        eventually(lambda: server.staging.checkpoints(run_key) == [newest], what="its folder is gone")


def test_a_step_whose_objects_are_gone_stays_where_nothing_newer_is_committed(
    tmp_path: Path, url: str
) -> None:
    server = Server(tmp_path / "staging", "--abandon-grace", "0.5")
    run_key = committed_by_others_and_pruned(server, url)
    with contextlib.closing(open_store(url)) as store:
        claim(store)
        claim(store, parent=ID)  # resumed from it, out of the segments on the nodes
    with server:
        status = server.wait_for(run_key, ID, State.STATE_FAILED)
        assert status.error.code == "missing"
        assert server.staging.sealed_ranks(run_key, ID) == [0, 1]


def test_whole_way_over_s3(tmp_path: Path, s3_server: Ministack) -> None:
    world = make_world()
    url = f"s3://{s3_server.make_bucket()}/run"
    with Server(tmp_path / "staging", environment=s3_server.env) as server:
        run_key = save(server, url, world, ID)
        server.wait_for(run_key, ID)
        with server.restore() as client:
            assert client.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()
        with CatalogClient(server.target) as catalog:
            assert [row.location for row in catalog.list_checkpoints(url)] == ["both"]


def test_a_store_that_ignores_conditions_still_gets_its_commit(tmp_path: Path, rclone_server: Rclone) -> None:
    world = make_world()
    url = f"s3://{rclone_server.make_bucket()}/run"
    # rclone answers a ranged request with 200, which obstore refuses.
    options = {"engine": "fsspec"}
    with Server(tmp_path / "staging", environment=rclone_server.env) as server:
        with server.client() as client:
            reply = client.register(url, staging=server.staging, store_options=options)
            for rank in range(world.size):
                seal(server.staging, reply.run_key, ID, world, rank)
                client.seal(reply.run_key, ID, rank)
        assert not reply.conditional_put
        server.wait_for(reply.run_key, ID)
        assert "conditional_put=False" in server.log()
        with server.restore() as restore:
            assert restore.read_tensor(url, "weight").data == world.tensors["weight"].tobytes()


def test_a_segment_is_handled_once_however_often_it_is_announced(tmp_path: Path) -> None:
    world = make_world()
    with Server(tmp_path / "staging") as server, server.client() as client:
        url = f"file://{tmp_path}/store/run"
        run_key = client.register(url, staging=server.staging).run_key
        for step in range(1, 9):
            ident = CheckpointId(step, 1)
            for rank in range(world.size):
                seal(server.staging, run_key, ident, world, rank)
                for _ in range(3):  # as the Seal of a neighbour and the scan do
                    client.seal(run_key, ident, rank)
            server.wait_for(run_key, ident)
        done = [line for line in server.log().splitlines() if " upload.done " in line]
    assert len(done) == 8 * world.size
    assert not [line for line in done if "sent=False" in line]
