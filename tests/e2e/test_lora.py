"""Adapters over a frozen model: a save sends what was trained, and nothing is lost with its lender."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import load_checkpoint
from ckpt.ops.verify import verify_deep
from ckpt.repository import Repository
from ckpt.storage.open import open_store
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits, bits_of
from tests.support.cli import Cli
from tests.support.faultproxy import FaultProxy
from tests.support.models import full_state
from tests.support.s3 import Ministack
from tests.support.server import Server

WAIT_S = 120.0
DIM, LAYERS, ADAPTED, RANK = 1792, 13, 9, 2  # 79.6 MiB frozen, 0.8 trained
FIRST, SECOND = CheckpointId(1, 1), CheckpointId(2, 1)

pytestmark = pytest.mark.usefixtures("one_thread")


class Adapted(nn.Module):
    """A frozen bfloat16 matrix, and beside it a product of two thin float32 ones that is trained."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.empty(DIM, DIM, dtype=torch.bfloat16).normal_(), requires_grad=False)
        self.register_buffer("running", torch.zeros(3))
        if adapted:
            self.adapter_a = nn.Parameter(torch.randn(RANK, DIM))
            self.adapter_b = nn.Parameter(torch.zeros(DIM, RANK))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), self.base).float() / DIM**0.5
        if hasattr(self, "adapter_a"):
            y = y + F.linear(F.linear(x, self.adapter_a), self.adapter_b)
        self.running += 1
        return y


@dataclass(slots=True)
class Run:
    model: nn.Sequential
    optimizer: torch.optim.Optimizer

    @classmethod
    def new(cls, seed: int) -> Run:
        torch.manual_seed(seed)
        model = nn.Sequential(*(Adapted(adapted=number < ADAPTED) for number in range(LAYERS)))
        return cls(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, DIM)).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        return {**full_state(self.model, self.optimizer), **dict(self.model.named_buffers())}


@dataclass(slots=True)
class Link:
    """A store behind a counted link."""

    url: str
    proxy: FaultProxy
    env: dict[str, str]


@pytest.fixture
def link(s3_server: Ministack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    with FaultProxy(s3_server.port) as proxy:
        env = {**s3_server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        yield Link(f"s3://{s3_server.make_bucket()}/lora", proxy, env)


@pytest.mark.parametrize("compression", ["off", "on"])
def test_a_save_sends_what_was_trained_and_outlives_what_it_borrowed_from(
    link: Link, tmp_path: Path, compression: str
) -> None:
    live = Run.new(0)
    sent = []
    with (
        Server(tmp_path / "node", environment=link.env) as server,
        CheckpointManager(
            link.url,
            model=live.model,
            optimizer=live.optimizer,
            staging_dir=server.staging.path,
            compression=compression,
        ) as manager,
    ):
        assert manager.restore() == 0
        for step in (1, 2):
            live.train()
            before = link.proxy.received_nbytes
            manager.save(step).upload_completion.result(WAIT_S)
            sent.append(link.proxy.received_nbytes - before)
    expected = live.state()
    frozen = sum(p.nbytes for p in live.model.parameters() if not p.requires_grad)
    whole = sum(tensor.nbytes for tensor in expected.values())
    assert frozen >= 0.98 * whole
    assert sent[1] <= 0.02 * whole, f"sent {sent} of {whole} bytes, {frozen} of them frozen"

    store = open_store(link.url)
    second = load_checkpoint(store, SECOND)
    assert verify_deep(second) == []
    assert [reference.step for reference in second.manifest.references] == [1]
    cli = Cli(tmp_path / "cli")
    cli.env |= link.env
    document = json.loads(cli.run("diff", f"{link.url}@1", "@2", "--json", code=1).stdout)
    changed = [found["name"] for found in document["tensors"]["differences"]]
    assert "model.0.adapter_a" in changed
    assert not [name for name in changed if name.endswith(".base")]
    pruned = json.loads(cli.run("prune", link.url, "--keep-last", "1", "--yes", "--json").stdout)
    assert pruned["held"] == [str(FIRST)]
    assert cli.steps(link.url) == [2]
    cli.run("verify", link.url, "--deep")

    other = Run.new(1)
    with (
        Server(tmp_path / "other", environment=link.env) as server,
        CheckpointManager(
            link.url, model=other.model, optimizer=other.optimizer, staging_dir=server.staging.path
        ) as manager,
    ):
        assert manager.restore() == 2
    assert_same_bits(other.state(), expected)
    with Repository(link.url) as repository:
        arrays = repository.load(names=["model.12.base", "model.0.adapter_a"])
    for name, parameter in (("12.base", live.model[12].base), ("0.adapter_a", live.model[0].adapter_a)):
        assert bytes(arrays[f"model.{name}"].data) == bits_of(parameter.detach())
    store.close()
