"""A real ext4 that is full, turns read-only, or is cut off with everything that it had not written yet."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import latest
from ckpt.storage.open import open_store
from ckpt.storage.staging import RunConfig, StagingDir
from ckpt_proto.v1 import flusher_pb2
from tests.crash.test_flusher import check_sealed
from tests.support.disk import Disk, DiskUnavailableHere
from tests.support.dying import lead
from tests.support.faultproxy import FaultProxy
from tests.support.flushing import WAIT_S, Watched, stop
from tests.support.lifecycle import Life, check, check_clean
from tests.support.s3 import Ministack
from tests.support.sealing import make_world
from tests.support.server import Server, State, eventually, save
from tests.support.snapshots import RUN_URL, make_snapshot

FlushState = flusher_pb2.FlusherEvent
RUN_KEY = keys.run_key(RUN_URL)
ID = CheckpointId(10, 1)
SEED = int(os.environ.get("CKPT_SEED") or random.SystemRandom().randrange(10**6))
PROJECT = Path(__file__).parents[2]
CUTS = int(os.environ.get("CKPT_DISK_CUTS", "2"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with Disk.mounted(tmp_path / "device") as mounted:
            yield mounted
    except DiskUnavailableHere as error:
        pytest.skip(f"real disk: {error}")


@pytest.fixture
def watched(disk: Disk) -> Iterator[Watched]:
    """A flusher whose staging directory is on the disk; step 1 is sealed."""
    staging = StagingDir(disk.path / "staging").ensure()
    staging.write_run_config(RUN_KEY, RunConfig(url=RUN_URL))
    flusher = Watched(staging, RUN_KEY)
    assert flusher.seal(make_snapshot(step=1, rows=10), 1).state == FlushState.STATE_SEALED
    yield flusher
    stop(flusher.process.pid)
    flusher.deaths.get(timeout=WAIT_S)


@pytest.mark.fault(
    "Disk",
    "full: a real ext4 without room",
    "ext4 on a loop device, filled",
    "the save fails with code no-space and names the file, the step before stays; with room again it goes on",
)
def test_full_disk_is_named_and_passes(disk: Disk, watched: Watched) -> None:
    """Case I125."""
    staging = StagingDir(disk.path / "staging")
    disk.fill()
    failed = watched.seal(make_snapshot(step=2, rows=2000), 2)
    assert (failed.state, failed.error.code) == (FlushState.STATE_FAILED, "no-space")
    assert failed.error.context["path"].startswith(str(disk.path))
    check_sealed(staging, make_snapshot(step=1, rows=10))
    disk.make_room()
    after = make_snapshot(step=3, rows=2000)
    assert watched.seal(after, 3).state == FlushState.STATE_SEALED
    check_sealed(staging, after)


@pytest.mark.fault(
    "Disk",
    "turns read-only under a running flusher: a real ext4 that found an error",
    "ext4 on a loop device, trigger_fs_error",
    "the save fails with EROFS and names the file; the step before can still be read, byte for byte",
)
def test_read_only_disk_is_named_and_can_still_be_read(disk: Disk, watched: Watched) -> None:
    disk.turn_read_only()
    failed = watched.seal(make_snapshot(step=2, rows=10), 2)
    assert (failed.state, failed.error.code) == (FlushState.STATE_FAILED, "denied")
    assert failed.error.context["errno"] == "EROFS"
    assert failed.error.context["path"].startswith(str(disk.path))
    check_sealed(StagingDir(disk.path / "staging"), make_snapshot(step=1, rows=10))


@pytest.mark.fault(
    "Disk",
    "full under a server: it cannot note what it uploaded",
    "ext4 on a loop device, filled",
    "status says no-space and nothing is given up; with room again it commits, whole",
)
def test_server_on_a_full_disk_says_so_and_goes_on(disk: Disk, s3_server: Ministack) -> None:
    """Case I125."""
    url = f"s3://{s3_server.make_bucket()}/run"
    store = open_store(url, s3_server.options)
    with FaultProxy(s3_server.port) as proxy:
        proxy.fault = lambda _method, path: 503 if "/data/" in path else None
        environment = s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}
        with Server(disk.path / "staging", environment=environment) as server:
            options = {"retries": "0"}
            run_key = save(server, url, make_world(groups=[[0]]), ID, store_options=options)

            def code() -> str:
                with server.client() as client:
                    return client.status(run_key).steps[0].error.code

            eventually(lambda: code() == "unavailable", what="the upload has failed")
            disk.fill()
            proxy.fault = lambda _method, _path: None
            eventually(lambda: code() == "no-space", what="the reason is shown")
            assert latest(store) is None
            disk.make_room()
            server.wait_for(run_key, ID, State.STATE_COMMITTED)
    assert latest(store) == ID


@pytest.mark.fault(
    "Power cut",
    "the disk is cut off at any instant of a run's life: all that is not on it is lost",
    "ext4 on a loop device, shut down without flushing its journal, mounted again",
    "no sealed marker without its bytes, no manifest without its objects, every promise kept; a life goes on",
)
def test_what_a_real_file_system_keeps_of_a_life_is_consistent(
    disk: Disk, tmp_path: Path, tried: Callable[[int], None]
) -> None:
    """Case I05."""
    print(f"CKPT_SEED={SEED}")
    dice = random.Random(SEED)
    for number in range(CUTS):
        root = disk.path / f"life-{number}"
        root.mkdir()
        os.sync()
        promises = dice.randrange(12)
        errors, argv = tmp_path / "errors", [sys.executable, "-m", "tests.support.lifecycle", str(root)]
        with errors.open("w") as file:
            life = subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, stderr=file, text=True)
        assert life.stdout is not None
        said = [life.stdout.readline() for _ in range(promises)]
        assert all(said), errors.read_text()
        time.sleep(dice.uniform(0.0, 0.05))  # any instant is meant, not one where something has just happened
        disk.cut_off()
        life.kill()  # it may try again for ever
        said += life.stdout.readlines()
        life.wait()
        life.stdout.close()
        disk.unmount()
        disk.mount()
        promised: dict[str, set[CheckpointId]] = {}
        for line in said:
            what, _, ident = line.strip().partition(" ")
            promised.setdefault(what, set()).add(CheckpointId.parse(ident))
        check(root, promised)
        again = lead(lambda told, root=root: Life(root, told).lead(), [])  # type: ignore[misc]
        assert again.status == 0
        check(root, again.promised)
        check_clean(root)
    tried(CUTS)
