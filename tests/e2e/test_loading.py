"""Tensors of a checkpoint without a manager: no template, or one that the caller gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import InvalidInputError, NotFoundError
from ckpt_trainer_hooks import CheckpointManager, load, load_into
from tests.support.bits import assert_same_bits
from tests.support.models import full_state
from tests.support.runs import Live, Place, stop_server


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("small", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.ones(0, 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Live, Tied]]:
    root = tmp_path_factory.mktemp("loading")
    place = Place(f"file://{root}/store/run", root / "staging")
    live, tied = Live.new(), Tied()
    with place.started(live, state={"extra": live.extra, "tied": tied}) as manager:
        live.train(range(2))
        manager.save(2)
    yield place, live, tied
    stop_server(root / "staging")


def test_R3_loads_without_a_template(run: tuple[Place, Live, Tied]) -> None:
    place, live, tied = run
    found = load(place.url)
    expected = full_state(live.model, live.optimizer)
    assert_same_bits({name: found[name] for name in expected}, expected)
    assert found["extra.last"].dtype == torch.float64
    assert found["tied.head.weight"] is found["tied.embed.weight"]
    other = Tied()
    other.load_state_dict(
        {name.removeprefix("tied."): tensor for name, tensor in load(place.url, "tied.*").items()}
    )
    assert_same_bits(other.state_dict(), tied.state_dict())
    with pytest.raises(NotFoundError):
        load(place.url, ["model.*", "nothing.*"])
    with pytest.raises(NotFoundError):
        load(place.url, checkpoint=3)


def test_R3_loads_into_a_template(run: tuple[Place, Live, Tied]) -> None:
    place, live, _ = run
    expected = {f"model.{name}": tensor for name, tensor in live.model.state_dict().items()}
    template = {name: torch.zeros_like(tensor).t() for name, tensor in expected.items() if tensor.ndim == 2}
    template = {name: tensor.contiguous().t() for name, tensor in template.items()}  # not contiguous
    with pytest.raises(InvalidInputError) as raised:
        load_into(place.url, template)
    assert "model.up.bias" in str(raised.value.context["unexpected"])
    ident = load_into(place.url, template, allow_unexpected=True)
    assert ident.step == 2
    assert_same_bits(template, {name: expected[name] for name in template})


def test_template_that_does_not_fit_is_left_alone(run: tuple[Place, Live, Tied]) -> None:
    place, _, _ = run
    template = {
        "model.up.weight": torch.full((22, 11), 5.0),
        "model.up.bias": torch.full((22,), 5.0, dtype=torch.bfloat16),
        "model.norm.weight": torch.full((10,), 5.0),
        "model.none": torch.full((1,), 5.0),
    }
    with pytest.raises(InvalidInputError) as raised:
        load_into(place.url, template, allow_unexpected=True)
    assert raised.value.context == {
        "missing": "model.none",
        "shapes": "model.up.weight: saved [22, 10], live [22, 11]",
        "dtypes": "model.up.bias: saved float32, live bfloat16",
    }
    assert all(bool((tensor == 5).all()) for tensor in template.values())


def test_template_under_other_names_and_dtypes(run: tuple[Place, Live, Tied]) -> None:
    place, live, _ = run
    template = {"net.bias": torch.zeros(22, dtype=torch.bfloat16)}
    load_into(place.url, template, rename={"model.up.*": "net.*"}, cast_dtypes=True, strict=False)
    assert_same_bits(template, {"net.bias": live.model.up.bias.to(torch.bfloat16)})  # type: ignore[union-attr, operator]
    with pytest.raises(InvalidInputError):
        load_into(place.url, {"net.bias": [1.0]}, rename={"model.up.*": "net.*"})  # type: ignore[dict-item]


def test_R3_manager_restores_weights_only_and_goes_on(run: tuple[Place, Live, Tied], tmp_path: Path) -> None:
    place, live, _ = run
    other = Live.new(seed=5)
    other.train(range(1))
    optimizer_state = {n: t for n, t in other.state().items() if n.startswith("optimizer.")}
    random_state = torch.get_rng_state()
    options: dict[str, Any] = {"state": {"extra": other.extra}}
    with CheckpointManager(place.url, **{**other.items(), **options}, staging_dir=place.staging) as manager:
        assert manager.restore(weights_only=True, exclude="tied.*") == 2
    assert_same_bits({n: t for n, t in other.state().items() if n.startswith("optimizer.")}, optimizer_state)
    assert_same_bits(other.model.state_dict(), live.model.state_dict())
    assert torch.equal(torch.get_rng_state(), random_state)
