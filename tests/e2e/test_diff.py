"""``ckpt diff`` as a process, and what it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ckpt import dtypes
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import segment_key
from ckpt.format.layout import LayoutSet, Mesh, Placement, Replicate, Shard, TensorLayout
from ckpt.ops import diff
from ckpt.ops.catalog import load_checkpoint
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.compare import Difference, Tolerance
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from tests.support.builders import CountingStore, build_checkpoint, claim, memory_store

EQUAL, DIFFERENT, USAGE, NOT_FOUND, DAMAGED = range(5)
KIB = 1 << 10


class Diff:
    """Runs ``ckpt diff`` and checks its exit code."""

    def __init__(self, staging: Path) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("CKPT_", "AWS_"))}
        self.env = clean | {"CKPT_STAGING": str(staging), "COLUMNS": "80"}

    def text(self, *arguments: str, code: int) -> str:
        found = subprocess.run(
            [sys.executable, "-m", "ckpt.cli", "diff", *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode == code, found.stdout + found.stderr
        assert "Traceback" not in found.stderr
        return found.stdout

    def json(self, *arguments: str, code: int) -> Any:
        return json.loads(self.text(*arguments, "--json", code=code))


@pytest.fixture
def run_diff(tmp_path: Path) -> Diff:
    return Diff(tmp_path / "staging")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def layouts_of(tensors: Mapping[str, torch.Tensor], world: int, placement: Placement) -> LayoutSet:
    mesh = Mesh.from_ranks((world,), ("dp",), range(world))
    return LayoutSet(
        TensorLayout(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            mesh,
            (placement if tensor.ndim else Replicate(),),
        )
        for name, tensor in tensors.items()
    )


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    size = tensor.element_size()
    return raw.view("<c16" if size == 16 else f"<u{size}").reshape(tuple(tensor.shape))


def load(store: Store, step: int) -> Checkpoint:
    return load_checkpoint(store, CheckpointId(step, 1))


def save(
    store: Store,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    world: int = 2,
    placement: Placement | None = None,
    **more: Any,
) -> None:
    build_checkpoint(
        store,
        step,
        world_size=world,
        layouts=layouts_of(tensors, world, placement or Shard(0)),
        values={name: bits(tensor) for name, tensor in tensors.items()},
        chunk_nbytes=64 * KIB,
        **{"state": {"items": {"lr": {"kind": "plain", "value": {"x": 1.0}}}, "aliases": {}}, **more},
    )


def sample() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.w": torch.randn(37, 11),
        "model.half": torch.randn(9, 5).to(torch.bfloat16),
        "model.eight": torch.randn(40).to(torch.float8_e4m3fn),
        "model.count": torch.arange(7),
        "model.flag": torch.tensor([True, False, True]),
        "model.wave": torch.randn(4, 3, dtype=torch.complex128),
        "model.scalar": torch.tensor(2.5, dtype=torch.float64),
        "model.none": torch.zeros(0, 4),
    }


def test_R11_equal_checkpoints_are_proved_equal_without_reading_data() -> None:
    store = memory_store()
    claim(store)
    for step in (1, 2):
        build_checkpoint(store, step, seed=7, chunk_nbytes=64 * KIB)
    counting = CountingStore(store)
    sides = [diff.Side(load(counting, step)) for step in (1, 2)]
    for side in sides:
        side.checkpoint.groups()
    counting.reset()
    found = diff.diff_tensors(*sides)
    assert found.found == []
    assert found.equal == found.equal_by_digest == 5
    assert found.read_nbytes == 0
    assert counting.read_bytes < 16 * KIB  # indexes alone


def test_equal_bits_on_other_layouts_are_equal(root: str, run_diff: Diff) -> None:
    tensors = sample()
    one, other = open_store(f"{root}/one"), open_store(f"{root}/other")
    save(one, 3, tensors)
    save(other, 4, tensors, world=3, placement=Replicate())
    document = run_diff.json(f"{root}/one", f"{root}/other@4", code=EQUAL)
    assert document["equal"] is True
    assert document["tensors"]["equal"] == len(tensors)
    assert document["tensors"]["equal_by_digest"] == 1  # the one without elements
    assert document["tensors"]["differences"] == document["values"]["differences"] == []
    assert "ranks" in document["notes"][0]
    text = run_diff.text(f"{root}/one", f"{root}/other", code=EQUAL)
    assert "equal: 8 tensors equal" in text


def test_differences_are_counted_and_measured(root: str, run_diff: Diff) -> None:
    tensors = sample()
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model.w"][3, 4] += 0.5
    changed["model.w"][7, 0] = -changed["model.w"][7, 0]
    changed["model.half"][0, 0] = float("nan")
    changed["model.count"][2] = -(2**62)
    changed["model.flag"][1] = True
    changed["model.wave"][0, 0] += 3 + 4j
    store = open_store(f"{root}/run")
    save(store, 1, tensors)
    save(store, 2, changed)
    document = run_diff.json(f"{root}/run@1", "@2", code=DIFFERENT)
    found = {item["name"]: item for item in document["tensors"]["differences"]}
    assert document["equal"] is False
    assert found.keys() == {"model.w", "model.half", "model.count", "model.flag", "model.wave"}
    w = found["model.w"]
    assert (w["problem"], w["differing"], w["elements"], w["nans"]) == ("values", 2, 37 * 11, 0)
    gap = float((tensors["model.w"].double() - changed["model.w"].double()).abs().max())
    assert w["max_abs"] == gap
    assert w["max_rel"] == pytest.approx(2.0)
    assert (found["model.half"]["nans"], found["model.half"]["max_abs"]) == (1, 0.0)
    assert found["model.count"]["max_abs"] == float(2**62 + 2)
    assert found["model.wave"]["max_abs"] == pytest.approx(5.0)
    text = run_diff.text(f"{root}/run@1", f"{root}/run@2", "--match", "model.w", code=DIFFERENT)
    assert "2 of 407" in text
    assert "model.half" not in text
    assert "different: 0 tensors equal, 1 different" in text


def test_tolerance_bears_what_it_covers(root: str, run_diff: Diff) -> None:
    tensors = sample()
    near = {name: tensor.clone() for name, tensor in tensors.items()}
    near["model.w"] *= 1 + 1e-6
    near["model.scalar"] = torch.tensor(float("nan"), dtype=torch.float64)
    store = open_store(f"{root}/run")
    save(store, 1, {**tensors, "model.scalar": -near["model.scalar"]})
    save(store, 2, near)
    sides = (f"{root}/run@1", "@2")
    run_diff.text(*sides, code=DIFFERENT)
    run_diff.text(*sides, "--rtol", "1e-8", code=DIFFERENT)
    document = run_diff.json(*sides, "--rtol", "1e-5", code=EQUAL)
    assert document["tolerance"] == {"atol": 0.0, "rtol": 1e-5}
    assert {item["name"]: item["tolerated"] for item in document["tensors"]["differences"]} == {
        "model.w": True,
        "model.scalar": True,
    }
    assert "within tolerance" in run_diff.text(*sides, "--atol", "0.1", code=EQUAL)


def test_names_shapes_dtypes_and_values_are_compared(root: str, run_diff: Diff) -> None:
    a = {
        "model.a": torch.ones(2),
        "model.b": torch.ones(2, 3),
        "model.c": torch.ones(4),
        "model.d": torch.ones(1),
    }
    b = {
        "model.a": torch.ones(2),
        "model.b": torch.ones(3, 2),
        "model.c": torch.ones(4).int(),
        "model.e": torch.ones(1),
    }
    store = open_store(f"{root}/run")
    plain = {"n": 3, "lr": 0.25, "nan": float("nan"), "l": [1, 2, 3], "t": (1, "x"), "same": None}
    other = {**plain, "n": 4, "lr": 0.25000001, "l": [1, 2, 4], "t": [1, "x"], "new": {"k": True}}
    for step, tensors, value in ((1, a, plain), (2, b, other)):
        state = {"items": {"extra": {"kind": "plain", "value": value}}, "aliases": {}}
        save(store, step, tensors, state=state)
    document = run_diff.json(f"{root}/run@1", f"{root}/run@latest", code=DIFFERENT)
    assert [(item["name"], item["problem"]) for item in document["tensors"]["differences"]] == [
        ("model.b", "shape"),
        ("model.c", "dtype"),
        ("model.d", "only-in-a"),
        ("model.e", "only-in-b"),
    ]
    values = {item["path"]: (item["a"], item["b"]) for item in document["values"]["differences"]}
    assert values == {
        "extra.value.n": ("3", "4"),
        "extra.value.lr": ("0.25", "0.25000001"),
        "extra.value.l": ("[1, 2, 3]", "[1, 2, 4]"),
        "extra.value.t": ("tuple", "list"),
        "extra.value.new": (None, "mapping"),
        "extra.value.new.k": (None, "True"),
    }
    assert "(not there)" in run_diff.text(f"{root}/run@1", "@2", code=DIFFERENT)
    run_diff.text(f"{root}/run@1", "@2", "--match", "extra.value.nan", code=EQUAL)
    run_diff.text(f"{root}/run@1", "@2", "--match", "extra.value.lr", "--atol", "1e-6", code=EQUAL)


def test_exit_codes_of_what_is_not_there_or_damaged(root: str, run_diff: Diff, tmp_path: Path) -> None:
    store = open_store(f"{root}/run")
    tensors = sample()
    save(store, 1, tensors)
    save(store, 2, {**tensors, "model.w": tensors["model.w"] + 1})
    run_diff.text(f"{root}/run@1", "@3", code=NOT_FOUND)
    run_diff.text(f"{root}/run@1", f"{root}/none", code=NOT_FOUND)
    run_diff.text(f"{root}/run@1", "@2", "--match", "nothing.*", code=NOT_FOUND)
    run_diff.text("@1", "@2", code=USAGE)
    run_diff.text(f"{root}/run@1", code=USAGE)
    path = tmp_path / "store" / "run" / segment_key(load(store, 2).ident, 1)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    document = run_diff.json(f"{root}/run@1", "@2", code=DAMAGED)
    assert document["error"]["code"] == "digest"


def test_large_tensors_are_compared_in_small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "BOX_NBYTES", 4 * KIB)
    largest = 0
    read = diff.read_parts

    def watched(checkpoint: Any, parts: Any, **more: Any) -> Any:
        nonlocal largest
        found = read(checkpoint, parts, **more)
        largest = max(largest, sum(array.nbytes for array in found))
        return found

    monkeypatch.setattr(diff, "read_parts", watched)
    store = memory_store()
    torch.manual_seed(1)
    a = {"t.big": torch.randn(3, 70, 50), "t.row": torch.randn(2, 5000), "t.small": torch.randn(9)}
    b = {name: tensor.clone() for name, tensor in a.items()}
    b["t.big"][2, 69, 49] += 1
    b["t.row"][0, 4999] += 1
    b["t.row"][1, 0] += 1
    save(store, 1, a)
    save(store, 2, b)
    progress: list[tuple[int, int]] = []
    found = diff.diff_tensors(
        diff.Side(load(store, 1)), diff.Side(load(store, 2)), progress=lambda *at: progress.append(at)
    )
    assert {item.name: item.difference.differing for item in found.found} == {"t.big": 1, "t.row": 2}
    assert 0 < largest <= 4 * KIB
    assert progress[-1][0] == progress[-1][1] == found.read_nbytes


@pytest.mark.parametrize("name", dtypes.known_dtypes())
def test_every_dtype_can_be_compared(name: str) -> None:
    size = dtypes.itemsize(name)
    raw = np.arange(64 * size, dtype=np.uint8).reshape(64, size)
    other = raw.copy()
    other[5, size - 1] ^= 1
    kind = f"V{size}" if size > 8 else f"u{size}"
    found = Difference()
    found.add(raw.view(kind)[:, 0], other.view(kind)[:, 0], name)
    assert found.differing == found.beyond == 1
    same = Difference()
    same.add(raw.view(kind), raw.copy().view(kind), name, Tolerance(1.0))
    assert same == Difference()


def test_infinities_zeros_and_nans() -> None:
    pairs = [(0.0, -0.0), (float("inf"), 1.0), (float("inf"), float("-inf")), (float("nan"), 1.0)]
    found = []
    for a, b in pairs:
        item = Difference()
        left, right = (np.array([value], np.float32).view("u4") for value in (a, b))
        item.add(left, right, "float32", Tolerance(atol=1e30))
        found.append((item.differing, item.beyond, item.nans, item.max_abs, item.max_rel))
    inf = float("inf")
    assert found == [(1, 0, 0, 0.0, 0.0), (1, 1, 0, inf, inf), (1, 1, 0, inf, inf), (1, 1, 1, 0.0, 0.0)]
