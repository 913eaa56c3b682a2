"""Saves between microbatches: put off, of the last boundary, or with the sums of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckpt.errors import CkptError, InvalidInputError, RefusedError
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks.data import ResumableLoader, ResumableSampler
from tests.support.bits import assert_same_bits, bits_of
from tests.support.models import OddNet, barrier, build, full_state
from tests.support.ranks import run_ranks

MICROBATCHES, SAVED_IN, STEPS = 3, 2, 4
TOKENS = torch.randint(0, 13, (97, 4, 6), generator=torch.Generator().manual_seed(3))


class Run:
    """A training loop with accumulation over everything that a microbatch changes."""

    def __init__(self, kind: str, rank: int, world: int, place: Path, policy: str, seed: int = 0) -> None:
        self.model, self.optimizer = _build(kind, world, seed)
        self.kind = kind
        tensor_parallel = {"tp": world, "fsdp2+tp": 2}.get(kind, 1)  # such ranks share their data
        group, size = rank // tensor_parallel, world // tensor_parallel
        sampler = ResumableSampler(len(TOKENS), 1, seed=4, tail="carry", rank=group, world_size=size)
        self.loader = ResumableLoader(DataLoader(range(len(TOKENS)), batch_sampler=sampler))  # type: ignore[arg-type]
        torch.manual_seed(50 + seed + group)
        self.manager = CheckpointManager(
            f"file://{place}/store/run",
            model=self.model,
            optimizer=self.optimizer,
            dataloader=self.loader,
            accumulation=policy,  # type: ignore[arg-type]
            staging_dir=place / f"node-{world}",
            timeout_s=60,
        )

    def batches(self) -> Iterator[torch.Tensor]:
        while True:
            for indexes in self.loader:
                yield TOKENS[indexes[0]]

    def train(self, start: int, stop: int, save_after: tuple[int, int] | None = None) -> Any:
        """Iterations ``start`` to ``stop``; a save after so many microbatches of an iteration."""
        handle = None
        batches = self.batches()
        for iteration in range(start, stop):
            for number in self.manager.remaining_microbatches(MICROBATCHES):
                with self.manager.microbatch(number, of=MICROBATCHES), self._reducing(number):
                    tokens = next(batches)
                    logits = self.model(tokens).flatten(0, 1)
                    nn.functional.cross_entropy(logits, tokens.roll(1, 1).flatten()).backward()
                if save_after == (iteration, number):
                    handle = self.manager.save(iteration)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.manager.step(iteration)
        return handle

    @contextlib.contextmanager
    def _reducing(self, number: int) -> Iterator[None]:
        """Reduce gradients in the last microbatch only, but for "synced"."""
        is_last = number == MICROBATCHES - 1
        if isinstance(self.model, nn.parallel.DistributedDataParallel) and not is_last:
            with self.model.no_sync():
                yield
            return
        if isinstance(self.model, FSDPModule):
            if self.kind == "hsdp":
                self.model.set_requires_all_reduce(is_last)
            elif self.kind != "synced":
                self.model.set_requires_gradient_sync(is_last)
        yield

    def state(self) -> dict[str, torch.Tensor]:
        return full_state(self.model, self.optimizer)


def _build(kind: str, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    if kind in ("synced", "mixed"):
        torch.manual_seed(seed)
        model = OddNet(dropout=0.3)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy} if kind == "mixed" else {}
        fully_shard(model.up, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return build(kind, world, dropout=0.3, seed=seed)


def _uninterrupted_and_resumed(rank: int, world: int, place: Path, kind: str, policy: str) -> tuple[int, int]:
    run = Run(kind, rank, world, place, policy)
    with run.manager as manager:
        assert manager.restore() == 0
        handle = run.train(0, STEPS, save_after=(SAVED_IN, 1))
        expected, position = run.state(), run.loader.state_dict()
        handle.upload_completion.result(60)
    again = Run(kind, rank, world, place, policy, seed=9)
    with again.manager as manager:
        start = manager.restore()
        first = manager.remaining_microbatches(MICROBATCHES)[0]
        again.train(start, STEPS)
        assert_same_bits(again.state(), expected)
        assert again.loader.state_dict() == position
        barrier()
    assert handle.step == start
    return start, first


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        (1, "single"),
        (2, "ddp"),
        (2, "fsdp2"),
        (2, "mixed"),
        (2, "synced"),
        (2, "tp"),
        pytest.param(4, "hsdp", marks=pytest.mark.slow),
        pytest.param(4, "fsdp2+tp", marks=pytest.mark.slow),
    ],
)
def test_captured_accumulation_goes_on_bitwise(tmp_path: Path, world: int, kind: str) -> None:
    found = run_ranks(world, _uninterrupted_and_resumed, tmp_path, kind, "capture")
    assert set(found) == {(SAVED_IN, 2)}


@pytest.mark.parametrize(("world", "kind"), [(1, "single"), (2, "fsdp2")])
def test_discarded_accumulation_is_replayed_bitwise(tmp_path: Path, world: int, kind: str) -> None:
    found = run_ranks(world, _uninterrupted_and_resumed, tmp_path, kind, "discard")
    assert set(found) == {(SAVED_IN, 0)}


@pytest.mark.parametrize(("world", "kind"), [(1, "single"), (2, "fsdp2")])
def test_save_is_put_off_to_the_boundary(tmp_path: Path, world: int, kind: str) -> None:
    found = run_ranks(world, _uninterrupted_and_resumed, tmp_path, kind, "boundary")
    assert set(found) == {(SAVED_IN + 1, 0)}


# --- other layouts, other policies ---


def _save_within(rank: int, world: int, place: Path, kind: str) -> dict[str, bytes]:
    run = Run(kind, rank, world, place, "capture")
    with run.manager as manager:
        manager.restore()
        run.train(0, SAVED_IN + 1, save_after=(SAVED_IN, 1))
        barrier()
    return {}


def _save_sums(rank: int, world: int, place: Path, kind: str) -> dict[str, bytes]:
    """Save within the first accumulation and return the sums in full."""
    run = Run(kind, rank, world, place, "capture")
    with run.manager as manager:
        manager.restore()
        batches = run.batches()
        for number in (0, 1):
            with manager.microbatch(number, of=MICROBATCHES):
                run.model(next(batches)).square().mean().backward()
        manager.save(0)
        sums = _sums(run.model)
        barrier()
    return sums


def _sums(model: nn.Module) -> dict[str, bytes]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            full = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            found[name] = bits_of(full)
    return found


def _restore_sums(
    rank: int, world: int, place: Path, kind: str, policy: str, strict: bool
) -> tuple[str, Any]:
    run = Run(kind, rank, world, place, policy, seed=5)
    try:
        run.manager.restore(strict=strict)
        return "restored", (run.manager.remaining_microbatches(MICROBATCHES)[0], _sums(run.model))
    except CkptError as error:
        return type(error).__name__, str(error)
    finally:
        run.manager.close()
        barrier()


@pytest.mark.parametrize(("world", "kind"), [(3, "fsdp2"), (1, "single")])
def test_reduced_sums_go_on_on_another_layout(tmp_path: Path, world: int, kind: str) -> None:
    expected = run_ranks(2, _save_sums, tmp_path, "synced")[0]
    assert expected
    for outcome, found in run_ranks(world, _restore_sums, tmp_path, kind, "capture", True):
        assert (outcome, found) == ("restored", (2, expected))


@pytest.mark.parametrize(
    ("saved", "world", "kind"),
    [("fsdp2", 3, "fsdp2"), ("fsdp2", 2, "ddp"), ("ddp", 1, "single"), ("ddp", 2, "fsdp2")],
)
def test_sums_of_single_ranks_are_refused_on_another_layout(
    tmp_path: Path, saved: str, world: int, kind: str
) -> None:
    run_ranks(2, _save_within, tmp_path, saved)
    for outcome, text in run_ranks(world, _restore_sums, tmp_path, kind, "capture", False):
        assert outcome == "InvalidInputError"
        assert "accumulated_gradients" in text


def test_captured_sums_are_never_dropped_silently(tmp_path: Path) -> None:
    run_ranks(1, _save_within, tmp_path, "single")
    ((outcome, text),) = run_ranks(1, _restore_sums, tmp_path, "single", "boundary", True)
    assert outcome == "InvalidInputError"
    assert "accumulated_gradients" in text
    ((outcome, (first, sums)),) = run_ranks(1, _restore_sums, tmp_path, "single", "boundary", False)
    assert (outcome, first, sums) == ("restored", 0, {})


# --- what cannot be meant ---


def _misuse(rank: int, world: int, place: Path) -> dict[str, str]:
    codes: dict[str, str] = {}

    def note(what: str, error: CkptError) -> None:
        codes[what] = error.code

    run = Run("single", rank, world, place, "capture")
    manager = run.manager
    manager.restore()
    try:
        with manager.microbatch(0, of=2):
            manager.save(0)
    except RefusedError as error:
        note("inside", error)
    try:
        manager.save(0)  # the block did not end well: part of its gradients may be there
    except RefusedError as error:
        note("after an error inside", error)
    with manager.microbatch(0, of=2):
        pass
    try:
        with manager.microbatch(2, of=2):
            pass
    except InvalidInputError as error:
        note("out of turn", error)
    manager.save(0).upload_completion.result(60)
    manager.close()

    manager = Run("single", rank, world, place, "capture").manager
    manager.restore()
    try:
        manager.remaining_microbatches(3)
    except InvalidInputError as error:
        note("another number", error)
    try:
        with manager.microbatch(0, of=2):
            pass
    except InvalidInputError as error:
        note("from the start", error)
    manager.close()

    manager = Run("single", rank, world, place / "other", "boundary").manager
    manager.restore()
    with manager.microbatch(0, of=2):
        pass
    deferred = manager.save(0)
    assert manager.save(0) is deferred
    try:
        manager.wait_until_finished(30)
    except RefusedError as error:
        note("no step came", error)
    assert isinstance(deferred.upload_completion.exception(1), RefusedError)
    manager.close()
    return codes


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    (codes,) = run_ranks(1, _misuse, tmp_path)
    assert codes == {
        "inside": "inside-microbatch",
        "after an error inside": "inside-microbatch",
        "out of turn": "microbatch",
        "another number": "microbatch",
        "from the start": "microbatch",
        "no step came": "deferred",
    }


def _roll_back(rank: int, world: int, place: Path) -> None:
    """A rollback in the middle of an accumulation drops the sums of the state that is no more."""
    run = Run("single", rank, world, place, "boundary")
    with run.manager as manager:
        manager.restore()
        run.train(0, 2)
        manager.save(2).upload_completion.result(60)
        run.train(2, 4)
        expected = run.state()
        with manager.microbatch(0, of=MICROBATCHES):
            run.model(TOKENS[0]).sum().backward()
        assert manager.restore(2) == 2
        assert all(parameter.grad is None for parameter in run.model.parameters())
        run.train(2, 4)
        assert_same_bits(run.state(), expected)


def test_rollback_within_an_accumulation_forgets_its_gradients(tmp_path: Path) -> None:
    run_ranks(1, _roll_back, tmp_path)
