"""Everything beside modules and optimizers: plain values, stateful objects, schedulers, random numbers."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.errors import CkptError, InvalidInputError, SnapshotTornError
from ckpt_trainer_hooks.capture import Capture
from ckpt_trainer_hooks.rng import capture_rng, derive_rng, restore_rng
from ckpt_trainer_hooks.snapshot import Copies
from tests.support.bits import assert_same_bits, bits_of
from tests.support.snapshot_trip import put_back, put_back_rng, take, train_state


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Keeper:
    """Stateful: gives and takes its state as it is."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _trip(value: Any) -> Any:
    keeper = Keeper()
    put_back(take(train_state(keeper=Keeper(value))), train_state(keeper=keeper))
    return keeper.state


# --- plain values ---


def test_values_of_every_plain_kind_come_back_with_their_types() -> None:
    value = {
        "none": None,
        "flags": [True, False],
        "big": [2**64, -(2**90)],
        "floats": (0.1, -0.0, float("inf")),
        3: "int key",
        (1, "a"): "tuple key",
        "nested": {"tuple": ((), ((1,),)), "empty": {}, "bytes": b"\x00\xff"},
        "numpy": np.arange(6, dtype=">i2").reshape(2, 3),
        "scalar": np.float32(1.5),
    }
    found = _trip(value)
    assert found.keys() == value.keys()
    for key in value.keys() - {"numpy", "scalar", "floats"}:
        assert found[key] == value[key], key
        assert type(found[key]) is type(value[key])
    assert [x.hex() for x in found["floats"]] == [x.hex() for x in (0.1, -0.0, float("inf"))]
    assert found["numpy"].dtype == np.dtype(">i2")
    assert found["numpy"].tobytes() == value["numpy"].tobytes()  # type: ignore[attr-defined]
    assert type(found["scalar"]) is np.float32


def test_tensors_anywhere_in_a_tree_come_back_in_their_places() -> None:
    tensors = [torch.randn(3), torch.zeros(0, 2), torch.tensor(5, dtype=torch.int16), torch.ones(2, 2).t()]
    found = _trip({"list": tensors, "deep": {"t": (tensors[0], {"x": tensors[2]})}})
    for mine, theirs in zip(found["list"], tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert bits_of(mine) == bits_of(theirs)
    assert torch.equal(found["deep"]["t"][0], tensors[0])
    assert found["deep"]["t"][1]["x"] == 5


def test_keys_that_spell_the_same_path_keep_their_tensors_apart() -> None:
    value = {
        "a": {"b": torch.tensor(1), "c": {"d": torch.tensor(2)}},
        "a.b": torch.tensor(3),
        "a.c": {"d": torch.tensor(4)},
        'it\'s "quoted"': torch.tensor(5),
        "]['x": torch.tensor(6),
        "": torch.tensor(7),
        1: torch.tensor(8),
        "1": torch.tensor(9),
    }
    found = _trip(value)
    assert found["a"]["b"] == 1
    assert found["a"]["c"]["d"] == 2
    assert found["a.b"] == 3
    assert found["a.c"]["d"] == 4
    assert [found[key] for key in ('it\'s "quoted"', "]['x", "", 1, "1")] == [5, 6, 7, 8, 9]


def test_tensor_in_plain_state_may_have_the_name_of_a_parameter() -> None:
    model = nn.Module()
    model.extra = nn.Linear(1, 1)
    keeper = Keeper({"t": torch.tensor(4.0)})
    taken = take(train_state(model=model, optimizer=torch.optim.SGD(model.parameters()), keeper=keeper))
    other, mine = nn.Module(), Keeper()
    other.extra = nn.Linear(1, 1)
    put_back(taken, train_state(model=other, optimizer=torch.optim.SGD(other.parameters()), keeper=mine))
    assert mine.state["t"] == 4
    assert_same_bits(other.state_dict(), model.state_dict())


def test_structure_comes_from_the_checkpoint_not_from_the_live_dict() -> None:
    taken = take(train_state(plain={"grew": [1, 2, 3], "was": None, "t": torch.ones(2), "shrunk": {}}))
    live: dict[str, Any] = {"grew": [], "was": torch.ones(1), "t": 5, "shrunk": {"x": 1}, "gone": 1}
    same = live
    put_back(taken, train_state(plain=live))
    assert same is live
    assert live.keys() == {"grew", "was", "t", "shrunk"}
    assert live["grew"] == [1, 2, 3]
    assert live["was"] is None
    assert live["t"].tolist() == [1, 1]
    assert live["shrunk"] == {}


def test_mapping_of_any_type_may_be_registered() -> None:
    saved: defaultdict[str, int] = defaultdict(int, a=1)
    live: defaultdict[str, int] = defaultdict(lambda: 5, b=2)
    put_back(take(train_state(counts=saved)), train_state(counts=live))
    assert live == {"a": 1}
    assert live["new"] == 5


@pytest.mark.parametrize(
    "value",
    [object(), Keeper, lambda: 0, torch.Generator(), print, np.array(["x"])],
    ids=["object", "class", "lambda", "generator", "builtin", "text-array"],
)
def test_what_cannot_come_back_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        take(train_state(keeper=Keeper({"a": [0, {"b": value}]})))
    assert str(caught.value.context["path"]).endswith("['a'][1]['b']")


def test_state_dict_that_raises_is_the_callers_error_and_not_hidden() -> None:
    """Case I38."""

    class Broken(Keeper):
        def state_dict(self) -> Any:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        take(train_state(keeper=Broken()))


def test_items_per_rank_are_kept_apart_from_the_shared_ones() -> None:
    taken = take(train_state(per_rank=("loader",), loader=Keeper({"t": torch.ones(2)}), other=Keeper(1)))
    assert set(taken.layouts) == {"loader.t@rank0"}
    mine, other = Keeper(), Keeper()
    put_back(taken, train_state(per_rank=("loader",), loader=mine, other=other))
    assert mine.state["t"].tolist() == [1, 1]
    assert other.state == 1


def test_item_per_rank_that_is_not_registered_any_more_is_named() -> None:
    taken = take(train_state(per_rank=("loader",), loader=Keeper({"pos": 3}), other=Keeper(1)))
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(other=Keeper()))
    assert "loader (whole item)" in str(caught.value.context["unexpected"])
    put_back(taken, train_state(other=Keeper()), strict=False)


def test_item_that_is_missing_or_left_over_is_named() -> None:
    taken = take(train_state(old=Keeper({"t": torch.ones(1)}), both=Keeper(1)))
    with pytest.raises(InvalidInputError) as caught:
        put_back(taken, train_state(new=Keeper(), both=Keeper()))
    assert caught.value.context["missing"] == "new (whole item)"
    assert "old (whole item)" in str(caught.value.context["unexpected"])
    both = Keeper()
    put_back(taken, train_state(new=Keeper(), both=both), strict=False)
    assert both.state == 1


# --- schedulers and scalers ---

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=3, cycle_momentum=False),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)],
        milestones=[2],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for n in range(steps):
            optimizer.step()
            scheduler.step(*([float(n)] if kind == "plateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer, scheduler = built()
    run(optimizer, scheduler, 4)
    taken = take(train_state(model=model, optimizer=optimizer, lr_scheduler=scheduler))
    other, fresh, rebuilt = built()
    fresh.step()
    put_back(taken, train_state(model=other, optimizer=fresh, lr_scheduler=rebuilt))
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert run(fresh, rebuilt, 8) == run(optimizer, scheduler, 8)


def test_gradient_scaler_comes_back() -> None:
    def built(scale: float) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)

    scaler, other = built(16.0), built(2.0)
    scaler.scale(torch.ones(1))  # makes its tensors
    scaler.update(4.0)
    put_back(take(train_state(scaler=scaler)), train_state(scaler=other))
    assert other.state_dict() == scaler.state_dict()


# --- random numbers ---


def _draw() -> tuple[float, float, float, float, bytes]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        bits_of(torch.randn(5)),
    )


def test_every_generator_goes_on_where_it_was_also_between_two_gaussians() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)  # Python and NumPy keep the second of a pair
    np.random.randn()
    taken = take(train_state(keeper=Keeper(1)))
    expected = [_draw() for _ in range(3)]
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    put_back_rng(taken)
    assert [_draw() for _ in range(3)] == expected


def test_streams_are_those_from_before_the_state_was_collected() -> None:
    class Drawing(Keeper):
        def state_dict(self) -> Any:
            return {"seed": random.random(), "t": torch.rand(1)}

    before = capture_rng()
    taken = take(train_state(keeper=Drawing()))
    put_back_rng(taken)
    assert capture_rng()["torch"] == before["torch"]
    assert capture_rng()["python"] == before["python"]


def test_derived_streams_are_repeatable_and_differ_between_ranks() -> None:
    state = capture_rng()
    drawn = []
    for rank in (0, 1, 0):
        derive_rng(state, rank)
        drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    restore_rng(state)
    assert drawn[0] == drawn[2] != drawn[1]
    assert capture_rng()["torch"] == state["torch"]


# --- the copy itself ---


def _capture(
    source: torch.Tensor, **volatile: torch.Tensor
) -> tuple[Capture, torch.Tensor, list[CkptError | None]]:
    target = torch.zeros_like(source)
    outcome: list[CkptError | None] = []
    deferred = Copies(["w"], [target], [source], [source], [source._version])
    first = list(volatile.values())
    at_once = Copies(
        list(volatile), [torch.zeros_like(t) for t in first], first, first, [t._version for t in first]
    )
    return Capture(at_once, deferred, outcome.append), target, outcome


def test_copy_that_fails_is_told_and_releases_whoever_waits() -> None:
    """Case I38."""
    outcome: list[CkptError | None] = []
    source = torch.ones(3)
    broken = Copies(["w"], [torch.zeros(4)], [source], [source], [source._version])
    capture = Capture(Copies([], [], [], [], []), broken, outcome.append)
    thread: list[threading.Thread] = []

    def on_thread(work: Callable[[], None]) -> None:
        thread.append(threading.Thread(target=work))
        thread[0].start()

    capture.start(overlapped=True, on_thread=on_thread)
    capture.before_optimizer_step()
    thread[0].join(30)
    assert len(outcome) == 1
    assert isinstance(outcome[0], CkptError)
    assert "copying the state failed" in str(outcome[0])


def test_verdict_is_that_of_the_first_look_and_live_tensors_are_let_go() -> None:
    source = torch.ones(3)
    capture, _, outcome = _capture(source, b=torch.ones(1))
    waiting: list[Callable[[], None]] = []
    capture.start(overlapped=True, on_thread=waiting.append)
    assert not capture.finished
    source.add_(1)
    waiting[0]()
    assert isinstance(outcome[0], SnapshotTornError)
    assert outcome[0].context["tensors"] == ["w"]
    source.add_(1)
    capture.wait()
    assert len(outcome) == 1
    assert capture._deferred.sources == []


def test_edits_that_autograd_does_not_count_as_changes_are_copied_whole() -> None:
    """``.data`` hides an edit from the version counter; done before the copy, the copy has all of it."""
    source = torch.ones(3)
    capture, target, outcome = _capture(source)
    capture.start(overlapped=False, on_thread=lambda work: work())
    source.data.add_(1)
    assert outcome == [None]
    assert target.tolist() == [1, 1, 1]
