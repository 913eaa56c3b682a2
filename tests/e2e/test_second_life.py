"""A run is deleted in the store and begun again at its URL, over the same disk: its two lives never mix."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest

from ckpt.client.replica import ReplicaClient
from ckpt.clock import SystemClock
from ckpt.errors import NotFoundError, RefusedError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.ops import catalog
from ckpt.ops.attempts import read_run_id
from ckpt.ops.verify import verify_deep
from ckpt.rpc.throttle import Throttle
from ckpt.storage.open import open_store
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.builders import build_checkpoint, claim
from tests.support.models import barrier, build, full_state, train
from tests.support.ranks import run_ranks
from tests.support.sealing import make_world, seal
from tests.support.server import Server, State, eventually

WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("one_thread")


def first_life(rank: int, world: int, url: str, staging: Path, target: str, server_pid: int) -> None:
    """Commit steps 1 and 2; lose the server; seal step 3; die."""
    model, optimizer = build("fsdp2", world)
    manager = CheckpointManager(url, model=model, optimizer=optimizer, staging_dir=staging, server=target)
    assert manager.restore() == 0
    for step in (1, 2, 3):
        list(train(model, optimizer, range(step - 1, step)))
        if step == 3 and rank == 0:
            os.kill(server_pid, signal.SIGKILL)
        barrier()
        handle = manager.save(step)
        (handle.local_completion if step == 3 else handle.upload_completion).result(WAIT_S)
    barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_deleted_in_the_store_and_begun_again_over_the_same_disk(tmp_path: Path) -> None:
    """I06, I14: no fresh start without being told to, and afterwards nothing of the first life is used."""
    url, staging = f"file://{tmp_path}/store/run", StagingDir(tmp_path / "staging")
    (tmp_path / "store").mkdir()
    run_key = keys.run_key(url)
    with Server(staging.path) as server:
        assert server.process is not None
        ranks = frozenset((0, 1))
        run_ranks(2, first_life, url, staging.path, server.target, server.process.pid, may_die=ranks)
        server.process.wait(10)
        with closing(open_store(url)) as store:
            first = read_run_id(store)
            assert first
            assert [i.ident.step for i in catalog.list_checkpoints(store)] == [2, 1]
        shutil.rmtree(tmp_path / "store" / "run")
        server.start()

        status = server.wait_for(run_key, CheckpointId(3, 1), State.STATE_FAILED)
        assert status.error.code == "run-gone"
        assert not (tmp_path / "store" / "run" / "data").exists()

        model, optimizer = build("single", 1, seed=9)
        with CheckpointManager(
            url, model=model, optimizer=optimizer, staging_dir=staging.path, server=server.target
        ) as manager:
            with pytest.raises(RefusedError) as caught:
                manager.restore()
            assert caught.value.code == "run-gone"
            assert caught.value.context["checkpoints"] == [str(CheckpointId(step, 1)) for step in (1, 2, 3)]
            assert manager.attempt is None
            assert len(staging.checkpoints(run_key)) == 3
            assert manager.restore(start_over=True) == 0
            for step in (1, 2):
                list(train(model, optimizer, range(step - 1, step)))
                manager.save(step).upload_completion.result(WAIT_S)
            expected = full_state(model, optimizer)

        with closing(open_store(url)) as store:
            second = read_run_id(store)
            assert second not in (None, "", first)
            opened = [catalog.load_checkpoint(store, info.ident) for info in catalog.list_checkpoints(store)]
            assert [(one.ident, one.manifest.run_id) for one in opened] == [
                (CheckpointId(step, 1), second) for step in (2, 1)
            ]
            for one in opened:
                assert verify_deep(one) == []
        aside = staging.path / "aside" / run_key / first
        assert sorted(path.name for path in aside.iterdir()) == [
            str(CheckpointId(step, 1)) for step in (1, 2, 3)
        ]
        for rank in ranks:
            for name in (keys.local_segment_name(rank), keys.local_index_name(rank)):
                assert (aside / str(CheckpointId(3, 1)) / name).is_file()

        other, other_optimizer = build("single", 1, seed=4)
        with CheckpointManager(
            url, model=other, optimizer=other_optimizer, staging_dir=staging.path, server=server.target
        ) as manager:
            assert manager.restore() == 2
        assert_same_bits(full_state(other, other_optimizer), expected)


@pytest.mark.parametrize("state", ["begun again", "deleted"])
def test_a_node_that_comes_back_uploads_nothing_of_a_life_that_is_over(tmp_path: Path, state: str) -> None:
    """I14: its server is started after the run was deleted (and begun again by other nodes)."""
    url, staging = f"file://{tmp_path}/store/run", StagingDir(tmp_path / "node-b")
    world, ident, run_key = make_world(), CheckpointId(3, 1), keys.run_key(url)
    with closing(open_store(url)) as store:
        claim(store)
        old = read_run_id(store)
        assert old
        shutil.rmtree(tmp_path / "store")
        if state == "begun again":
            claim(store)
            mine = build_checkpoint(store, 3, run_id=read_run_id(store) or "")
        staging.ensure()
        for rank in range(world.size):
            seal(staging, run_key, ident, world, rank, run_id=old)
        with Server(staging.path) as server, server.client() as client:
            client.register(url, staging=staging, store_options={})
            if state == "begun again":
                kept = staging.path / "aside" / run_key / old / str(ident)
                eventually(lambda: len(list(kept.glob("segment-*.index"))) == 2, what="set aside")
                eventually(lambda: not staging.checkpoints(run_key), what="nothing of it is left")
                assert "staging.set_aside" in server.log()
                assert verify_deep(catalog.load_checkpoint(store, mine.ident)) == []
                assert [i.ident for i in catalog.list_checkpoints(store)] == [mine.ident]
            else:
                status = server.wait_for(run_key, ident, State.STATE_FAILED)
                assert (status.error.kind, status.error.code) == ("RefusedError", "run-gone")
                assert staging.sealed_ranks(run_key, ident) == [0, 1]
                assert read_run_id(store) is None
                with pytest.raises(NotFoundError):
                    catalog.require_run(store)


def test_replicas_of_a_life_that_is_over_make_way_and_do_not_come_again(tmp_path: Path) -> None:
    """A node keeps a replica of the first life when an owner of the second offers its own of that name."""
    url, ident = f"file://{tmp_path}/store/run", CheckpointId(3, 1)
    world, run_key = make_world(groups=((0,),)), keys.run_key(url)
    owner = PeerNode(node_id="0" * 16, target="127.0.0.1:9", domain="rack", host="owner", ranks=(0,))
    with closing(open_store(url)) as store:
        claim(store)
        old = read_run_id(store) or ""
        shutil.rmtree(tmp_path / "store")
        claim(store)
        new = read_run_id(store) or ""
    places = {}
    for run_id in (old, new):
        places[run_id] = StagingDir(tmp_path / run_id).ensure()
        seal(places[run_id], run_key, ident, world, 0, run_id=run_id)
    listening = ("--insecure", "--peer-listen", "127.0.0.1:0")
    with Server(tmp_path / "node-b", *listening) as server, ReplicaClient(server.tcp_target) as client:
        kept = replicas_dir(server.staging).ensure()
        kept.write_run_config(run_key, RunConfig(url=url))
        seal(kept, run_key, ident, world, 0, run_id=old)

        def send(run_id: str) -> int:
            return client.send_segment(
                places[run_id],
                run_key,
                ident,
                0,
                config=RunConfig(url=url),
                owner=owner,
                throttle=Throttle(0, largest=1 << 20, clock=SystemClock()),
            )

        assert send(new) > 0
        assert kept.read_index(run_key, ident, 0).run_id == new
        assert (kept.path / "aside" / run_key / old / str(ident) / keys.local_index_name(0)).is_file()
        with pytest.raises(RefusedError) as caught:
            send(old)
        assert caught.value.code == "other-run"
        assert kept.read_index(run_key, ident, 0).run_id == new
