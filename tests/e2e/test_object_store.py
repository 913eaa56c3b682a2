"""The whole chain over S3: save on two ranks, lose the node, restore elsewhere, read from another program."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.client.restore import RestoreClient
from ckpt.format.ids import CheckpointId
from ckpt.geometry import Box
from ckpt.ops import catalog
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits
from tests.support.chain import end_node
from tests.support.models import build, full_state, train
from tests.support.ranks import run_ranks
from tests.support.server import Server

STEPS = 3


def _save(rank: int, world: int, url: str, staging: Path, reference: Path) -> None:
    model, optimizer = build("fsdp2", world)
    with CheckpointManager(url, model=model, optimizer=optimizer, staging_dir=staging) as manager:
        manager.restore()
        for step in range(STEPS):
            list(train(model, optimizer, range(step, step + 1)))
            manager.save(step + 1)
        state = full_state(model, optimizer)
        if rank == 0:
            torch.save(state, reference)


def _restore(rank: int, world: int, url: str, staging: Path, reference: Path, kind: str) -> None:
    model, optimizer = build(kind, world, seed=9)
    with CheckpointManager(url, model=model, optimizer=optimizer, staging_dir=staging) as manager:
        assert manager.restore() == STEPS
        assert_same_bits(full_state(model, optimizer), torch.load(reference))


def _client(server: Server) -> RestoreClient:
    return RestoreClient(server.staging.socket_target())


def _walk_the_chain(tmp_path: Path, url: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    staging, reference = tmp_path / "node-a", tmp_path / "reference.pt"
    run_ranks(2, _save, url, staging, reference, env=env)
    end_node(staging)  # its server is still tidying up
    shutil.rmtree(staging / "runs")  # the node's NVMe is lost
    run_ranks(2, _restore, url, tmp_path / "node-b", reference, "tp", env=env)
    run_ranks(1, _restore, url, tmp_path / "node-c", reference, "single", env=env)
    store = open_store(url)
    assert [info.ident for info in catalog.list_checkpoints(store)] == [CheckpointId(n, 1) for n in (3, 2, 1)]
    assert verify_deep(catalog.load_checkpoint(store, CheckpointId(STEPS, 1))) == []
    store.close()


def test_the_chain_over_a_fast_s3_server(s3_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    url = f"s3://{s3_server.make_bucket()}/chain"
    _walk_the_chain(tmp_path, url, s3_server.env, monkeypatch)
    with Server(tmp_path / "node-d", environment=s3_server.env) as server, _client(server) as client:
        rows = client.read_tensor(url, "model.up.weight", box=Box((3, 2), (5, 4)))
    expected = torch.load(tmp_path / "reference.pt")["model.up.weight"][3:8, 2:6].numpy()
    np.testing.assert_array_equal(rows.numpy(), expected)


@pytest.mark.slow
def test_the_chain_over_radosgw(radosgw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    _walk_the_chain(tmp_path, f"s3://{radosgw.make_bucket()}/chain", radosgw.env, monkeypatch)


@pytest.mark.slow
def test_the_chain_over_a_server_that_ignores_conditional_puts(  # type: ignore[no-untyped-def]
    rclone_server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fsspec+s3://{rclone_server.make_bucket()}/chain"
    _walk_the_chain(tmp_path, url, rclone_server.env, monkeypatch)
