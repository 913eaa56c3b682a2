"""Compression of what training really makes, and over links of real speed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ckpt.clock import SystemClock
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.storage.open import open_store
from ckpt_server.compression import Compression
from ckpt_trainer_hooks import CheckpointManager
from examples.gpt import GPT, GPTConfig, TextStream
from tests.support.bits import assert_same_bits
from tests.support.faultproxy import FaultProxy
from tests.support.models import full_state
from tests.support.runs import Place, stop_server
from tests.support.s3 import Ministack
from tests.support.sealing import make_world
from tests.support.uploading import Node

MIB = 1 << 20


def _trained(seed: int, steps: int) -> tuple[GPT, torch.optim.Optimizer]:
    stream = TextStream(seed=0, batch=4, context=64)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab=stream.vocab, dim=64, heads=2, layers=4, hidden=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        inputs, targets = stream.batch(step, 0, 1)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.usefixtures("one_thread")
def test_a_trained_fp32_adamw_state_takes_85_percent_at_most_and_comes_back_exactly(place: Place) -> None:
    model, optimizer = _trained(0, steps=30)
    options = {"staging_dir": place.staging, "compression": "on"}
    with CheckpointManager(place.url, model=model, optimizer=optimizer, **options) as manager:
        assert manager.restore() == 0
        manager.save(30).upload_completion.result(60)
    store = open_store(place.url)
    checkpoint = load_checkpoint(store, CheckpointId(30, 1))
    assert checkpoint.manifest.stored_nbytes <= 0.85 * checkpoint.manifest.nbytes
    assert verify_deep(checkpoint) == []
    store.close()
    other, its_optimizer = _trained(1, steps=1)
    elsewhere = place.staging.with_name("elsewhere")  # nothing is staged there: it comes from the store
    with CheckpointManager(place.url, model=other, optimizer=its_optimizer, staging_dir=elsewhere) as manager:
        assert manager.restore() == 30
    stop_server(elsewhere)
    assert_same_bits(full_state(other, its_optimizer), full_state(model, optimizer))


def test_auto_compresses_over_a_slow_link(
    s3_server: Ministack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(rows=64, columns=6 * MIB // 256, groups=((0,),))
    with FaultProxy(s3_server.port) as proxy:
        proxy.rate = 3e6  # pays for a codec of 25 MB/s and more
        options = {**s3_server.options, "endpoint_url": proxy.endpoint}
        store = open_store(f"s3://{s3_server.make_bucket()}/slow", options)
        node = Node(tmp_path / "staging", store, chunk_nbytes=MIB)
        node.compression = Compression(threads=1, clock=SystemClock(), name="run")

        def stored(step: int) -> int:
            """Bytes that the store has of a step, by "auto"."""
            node.seal(CheckpointId(step, 1), world)
            return node.upload(CheckpointId(step, 1), wanted="auto").stored_nbytes

        with caplog.at_level(logging.INFO):
            whole = stored(1)  # raw: it measures
            assert whole >= 6 * MIB
            assert stored(2) < whole
        assert "compression.on" in caplog.text
        store.close()
