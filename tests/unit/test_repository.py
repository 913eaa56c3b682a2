"""Reading checkpoints without torch, server or template."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.format.keys import segment_key
from ckpt.format.tensor_data import numpy_dtype
from ckpt.geometry import Box
from ckpt.repository import Repository
from ckpt.storage.open import open_store
from tests.support.builders import Built, CountingStore, build_checkpoint, claim

KIB = 1 << 10


@pytest.fixture
def built(tmp_path: Path) -> list[Built]:
    store = open_store(f"file://{tmp_path}/run")
    claim(store)
    return [
        build_checkpoint(
            store,
            step,
            world_size=3,
            group_size=2,
            chunk_nbytes=64 * KIB,
            state_of=lambda rank, step=step: {  # type: ignore[misc]
                "items": {"model": {"kind": "module", "extra": {f"x{rank}": step}}},
                "aliases": {},
            },
        )
        for step in (10, 20)
    ]


@pytest.fixture
def run(tmp_path: Path, built: list[Built]) -> Iterator[Repository]:
    with Repository(f"{tmp_path}/run/") as repository:
        yield repository


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_lists_what_there_is(run: Repository, built: list[Built]) -> None:
    assert [info.ident for info in run.checkpoints()] == [built[1].ident, built[0].ident]
    assert run.latest() == built[1].ident
    assert run.open().ident == run.open(20).ident == run.open(built[1].ident).ident == built[1].ident
    assert run.layouts(10) == built[0].layouts
    with pytest.raises(NotFoundError):
        run.open(11)


@pytest.mark.parametrize("step", [10, 20])
def test_R3_loads_everything_without_a_template(run: Repository, built: list[Built], step: int) -> None:
    expected = built[step // 10 - 1]
    found = run.load(checkpoint=step)
    assert found.keys() == expected.tensors.keys()
    for name, tensor in found.items():
        layout = expected.layouts[name]
        assert tensor.ident == expected.ident
        assert (tensor.dtype, tensor.shape) == (layout.dtype, layout.global_shape)
        assert bits(tensor.numpy()) == bits(expected.tensors[name])
        assert tensor.numpy().dtype == numpy_dtype(layout.dtype)


def test_R3_loads_by_pattern_and_reads_no_more_than_it_must(
    run: Repository, built: list[Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.open()
    counting = CountingStore(run.open().store)
    monkeypatch.setattr(run.open(), "store", counting)
    found = run.load(["model.w*", "model.bias"])
    assert sorted(found) == ["model.bias", "model.weight"]
    assert counting.read_bytes < 3 * 64 * KIB + 64 * KIB  # of 1.2 MB
    with pytest.raises(NotFoundError) as raised:
        run.load(["model.*", "modle.*"])
    assert raised.value.context["patterns"] == ["modle.*"]


def test_fills_the_callers_arrays(run: Repository, built: list[Built]) -> None:
    tensors = built[1].tensors
    out = {"model.weight": np.zeros((13, 6), np.float32), "optimizer.phase": np.zeros((5, 4), np.complex64)}
    assert run.load(out=out) == {}
    for name, array in out.items():
        assert bits(array) == bits(tensors[name])
    rest = run.load("model.*", out={"model.weight": np.zeros((13, 6), np.float32)})
    assert sorted(rest) == ["model.bias", "model.embedding"]
    for wrong in (
        np.zeros((6, 13), np.float32),
        np.zeros((13, 6), np.float64),
        np.zeros((6, 13), np.float32).T,
    ):
        with pytest.raises(InvalidInputError):
            run.load(out={"model.weight": wrong})
    with pytest.raises(NotFoundError):
        run.load(out={"model.none": np.zeros(1)})


def test_reads_a_box_of_a_tensor(run: Repository, built: list[Built]) -> None:
    box = Box((500, 7), (40, 100))
    found = run.tensor("model.embedding", box, 10)
    assert (found.shape, found.global_shape) == ((40, 100), (1031, 600))
    assert bits(found.numpy()) == bits(built[0].tensors["model.embedding"][500:540, 7:107])
    assert bits(run.tensor("optimizer.step").numpy()) == bits(built[1].tensors["optimizer.step"])
    empty = run.tensor("model.weight", Box((3, 0), (0, 6)))
    assert empty.numpy().shape == (0, 6)
    with pytest.raises(InvalidInputError):
        run.tensor("model.weight", Box((10, 0), (4, 6)))
    with pytest.raises(InvalidInputError):
        run.tensor("model.weight", Box((0,), (4,)))
    with pytest.raises(NotFoundError):
        run.tensor("model.none")


def test_plain_values_come_without_a_template(run: Repository) -> None:
    assert run.values(20)["items"]["model"]["extra"] == {"x0": 20}
    assert run.rank_values(2) == {"rng": 2}
    with pytest.raises(NotFoundError):
        run.rank_values(3)


def test_damage_is_found_and_named(run: Repository, built: list[Built], tmp_path: Path) -> None:
    path = tmp_path / "run" / segment_key(built[1].ident, 0)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError) as raised:
        run.load()
    assert raised.value.code == "digest"
    assert run.load(checkpoint=10).keys() == built[0].tensors.keys()


def test_an_empty_run_has_no_latest(tmp_path: Path) -> None:
    with Repository(f"file://{tmp_path}/nothing") as run:
        assert run.latest() is None
        assert run.checkpoints() == []
        with pytest.raises(NotFoundError):
            run.load()
    with pytest.raises(InvalidInputError):
        Repository("")


def test_needs_no_torch() -> None:
    code = "import sys, ckpt.repository; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
