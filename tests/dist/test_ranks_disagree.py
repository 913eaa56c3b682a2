"""Ranks that die, differ, stay away or fail alone: nobody hangs, and all end with the same answer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckpt.client import StagingClient
from ckpt.errors import CkptError, CorruptError, InvalidInputError, TimeoutExceededError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import staging_pb2
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import assert_same_bits, bits_of
from tests.support.chain import end_node, poll
from tests.support.models import barrier, build, full_state, train
from tests.support.ranks import run_ranks

AT_ONCE_S = 4.0  # some kilobytes, on a machine that may be busy; who hangs does so for a minute

Sketch = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with ended(tmp_path) as path:
        yield path


@contextlib.contextmanager
def ended(path: Path) -> Iterator[Path]:
    """A folder with a store; afterwards no process of its staging directories is left."""
    (path / "store").mkdir()
    try:
        yield path
    finally:
        for staging in path.glob("staging*"):
            end_node(staging)


def make(
    root: Path, kind: str, world: int, *, run: str = "run", staging: str = "staging", **more: Any
) -> tuple[CheckpointManager, torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(kind, world)
    options: dict[str, Any] = {"timeout_s": 60.0, "pending_wait_s": 20.0, "mode": "blocking"}
    manager = CheckpointManager(
        url_of(root, run), model=model, optimizer=optimizer, staging_dir=root / staging, **{**options, **more}
    )
    return manager, model, optimizer


def url_of(root: Path, run: str = "run") -> str:
    return f"file://{root}/store/{run}"


def told(error: CkptError) -> tuple[str, str, dict[str, str]]:
    """An error as it can be sent to the test."""
    return type(error).__name__, error.code, {key: str(value) for key, value in error.context.items()}


# --- a rank is killed ---


def kill_rank_two(rank: int, world: int, root: Path) -> Sketch:
    manager, model, optimizer = make(root, "fsdp2", world)
    manager.restore()
    list(train(model, optimizer, range(1)))
    manager.save(1).upload_completion.result(60)
    list(train(model, optimizer, range(1, 2)))
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    poll(lambda: is_gone(pids[2]), what="rank 2 is dead")

    before = local_bits(model)
    began = time.monotonic()
    handles = [manager.save(2), manager.save(3)]
    elapsed_s = time.monotonic() - began
    copied = [handle.staging_completion.done() for handle in handles]
    for handle in handles:
        handle.local_completion.result(30)
    await_seals(root, [0, 1], steps={2, 3})
    state = {
        "elapsed_s": elapsed_s,
        "copied": copied,
        "committed": [handle.upload_completion.done() for handle in handles],
        "latest": manager.latest_step(),
        "unchanged": local_bits(model) == before,
    }
    began = time.monotonic()
    manager.close()
    return state | {"close_s": time.monotonic() - began}


def local_bits(model: torch.nn.Module) -> dict[str, bytes]:
    """This rank's part of every parameter; no collective."""
    parameters = model.named_parameters()
    return {name: bits_of(p.to_local() if isinstance(p, DTensor) else p) for name, p in parameters}


def is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def await_seals(root: Path, ranks: list[int], steps: set[int]) -> None:
    """Wait until the server knows of these seals: from then on only other ranks could bring a commit."""
    key = keys.run_key(url_of(root))
    with StagingClient(StagingDir(root / "staging").socket_target()) as client:

        def known() -> bool:
            found = {s.id.step: s for s in client.status(key).steps if s.id.step in steps}
            return found.keys() == steps and all(list(s.sealed_ranks) == ranks for s in found.values())

        poll(known, what=lambda: f"the server knows of the seals of {steps}: {client.status(key)}")
        states = {s.state for s in client.status(key).steps if s.id.step in steps}
    assert states == {staging_pb2.StepStatus.STATE_SEALING}


def restore_after_the_kill(rank: int, world: int, root: Path) -> Sketch:
    manager, model, optimizer = make(root, "fsdp2", world)
    began = time.monotonic()
    step = manager.restore()
    elapsed_s = time.monotonic() - began
    found = full_state(model, optimizer)
    manager.close()
    expected_model, expected_optimizer = build("single", 1)
    list(train(expected_model, expected_optimizer, range(1)))
    expected = full_state(expected_model, expected_optimizer)
    close = all(torch.allclose(found[name], tensor) for name, tensor in expected.items())
    return {"step": step, "elapsed_s": elapsed_s, "close": close}


@pytest.mark.slow
def test_saves_return_at_once_after_a_rank_was_killed(root: Path) -> None:
    """Case I38."""
    outcomes = run_ranks(3, kill_rank_two, root, may_die=frozenset({2}))
    assert outcomes[2] is None
    for found in outcomes[:2]:
        assert found["elapsed_s"] < AT_ONCE_S
        assert found["copied"] == [True, True]
        assert found["committed"] == [False, False]
        assert found["latest"] == 1
        assert found["unchanged"]
        assert found["close_s"] < AT_ONCE_S

    # What two of three ranks have sealed holds up nobody who starts again.
    for found in run_ranks(2, restore_after_the_kill, root):
        assert found["step"] == 1
        assert found["elapsed_s"] < 15.0
        assert found["close"]


# --- ranks that were told different things, stay away, or fail alone ---


def disagree(rank: int, world: int, root: Path) -> Sketch:
    return {
        "urls": urls_differ(rank, world, root),
        "absent": one_stays_away(rank, world, root),
        "unstorable": one_cannot_be_stored(rank, world, root),
    }


def urls_differ(rank: int, world: int, root: Path) -> Any:
    manager, _, _ = make(root, "single", world, run="other" if rank == 1 else "run")
    try:
        manager.restore()
    except InvalidInputError as error:
        return told(error)
    finally:
        manager.close()
        barrier()
    return None


def one_stays_away(rank: int, world: int, root: Path) -> Any:
    manager, _, _ = make(root, "single", world, run="absent", timeout_s=1.5)
    began = time.monotonic()
    try:
        if rank != 1:
            manager.restore()
    except TimeoutExceededError as error:
        return *told(error), time.monotonic() - began
    finally:
        manager.close()
        barrier()
    return None


class Unstorable:
    """Nothing that a checkpoint could hold."""


def one_cannot_be_stored(rank: int, world: int, root: Path) -> Sketch:
    extra: dict[str, Any] = {"cursor": Unstorable() if rank == 1 else 5}
    more: dict[str, Any] = {"run": "unstorable", "state": {"extra": extra}, "pending_wait_s": 1.0}
    manager, model, optimizer = make(root, "single", world, **more)
    found: Sketch = {}
    try:
        manager.restore()  # where ranks wait for each other anyway, all of them hear of it
    except InvalidInputError as error:
        found["at_restore"] = told(error)
    extra["cursor"] = 5
    manager.restore()

    list(train(model, optimizer, range(1)))
    extra["cursor"] = Unstorable() if rank == 1 else 6
    barrier()
    began = time.monotonic()
    try:
        handle = manager.save(1)
    except InvalidInputError as error:
        found["at_save"] = told(error)
    else:
        found["copied"] = handle.staging_completion.done()
    found["save_s"] = time.monotonic() - began

    extra["cursor"] = 7
    began = time.monotonic()
    found["restored"] = manager.restore()  # step 1 can never be committed, and holds nobody up for long
    found["restore_s"] = time.monotonic() - began
    list(train(model, optimizer, range(1, 2)))
    manager.save(2).upload_completion.result(60)
    barrier()
    found["steps"] = manager.all_steps()
    manager.close()
    return found


@pytest.fixture(scope="module")
def disagreement(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sketch]]:
    with ended(tmp_path_factory.mktemp("disagreement")) as root:
        yield run_ranks(3, disagree, root)


@pytest.mark.slow
def test_rank_with_another_url_is_an_error_on_all_ranks_that_names_both(disagreement: list[Sketch]) -> None:
    """Cases I14, I35."""
    for found in disagreement:
        kind, code, context = found["urls"]
        assert (kind, code, context["rank"]) == ("InvalidInputError", "disagree", "1")
        assert context["rank_0"].endswith("/run")
        assert context["url"].endswith("/other")


@pytest.mark.slow
def test_rank_that_never_restores_is_named_within_the_limit(disagreement: list[Sketch]) -> None:
    """Case I114."""
    assert disagreement[1]["absent"] is None
    for rank in (0, 2):
        kind, _, context, elapsed_s = disagreement[rank]["absent"]
        assert (kind, context["missing_ranks"]) == ("TimeoutExceededError", "[1]")
        assert elapsed_s < 1.5 + AT_ONCE_S


@pytest.mark.slow
def test_rank_whose_state_cannot_be_stored_fails_alone_and_hangs_nobody(disagreement: list[Sketch]) -> None:
    """Case I38."""
    found = [outcome["unstorable"] for outcome in disagreement]
    for outcome in found:
        kind, _, context = outcome["at_restore"]
        assert (kind, context["rank"]) == ("InvalidInputError", "1")
        assert "cursor" in context["path"]
    kind, _, context = found[1]["at_save"]
    assert kind == "InvalidInputError"
    assert "cursor" in context["path"]
    assert [found[0]["copied"], found[2]["copied"]] == [True, True]
    for outcome in found:
        assert outcome["save_s"] < AT_ONCE_S
        assert outcome["restored"] == 0
        assert outcome["restore_s"] < 1.0 + 2 * AT_ONCE_S
        assert outcome["steps"] == [2]  # a later save is whole again


# --- ranks that save other steps than the others ---


def save_apart(rank: int, world: int, root: Path) -> Sketch:
    """Ranks 0 and 1 share a node, rank 2 has one of its own."""
    manager, model, optimizer = make(root, "single", world, staging=f"staging-{'aab'[rank]}")
    manager.restore()
    list(train(model, optimizer, range(1)))
    found: Sketch = {}
    if rank == 0:  # the others do not even know
        began = time.monotonic()
        manager.save(1).local_completion.result(30)
        found["alone_s"] = time.monotonic() - began
        found["alone"] = waited(manager, 0.5)
    barrier()
    found["nothing"] = manager.all_steps()
    manager.save(2).upload_completion.result(60)
    found["overtaken"] = waited(manager, 60.0)
    found["told_once"] = waited(manager, 60.0)

    list(train(model, optimizer, range(1, 2)))
    manager.save(4 if rank == 1 else 3).local_completion.result(30)
    barrier()
    found["apart"] = waited(manager, 0.5)
    manager.save(5).upload_completion.result(60)
    found["ended"] = waited(manager, 0.5 if rank == 2 else 60.0)
    found["steps"] = manager.all_steps()
    list(train(model, optimizer, range(2, 3)))  # what did not change would not be uploaded again
    found["damaged"] = damaged_before_the_upload(rank, root, manager)
    barrier()
    manager.close()
    return found


def damaged_before_the_upload(rank: int, root: Path, manager: CheckpointManager) -> Any:
    """What a rank is told of a save of which rank 1's part cannot be uploaded."""
    pid = int(json.loads((root / "staging-a" / "server.json").read_text())["pid"])
    once(rank, lambda: os.kill(pid, signal.SIGSTOP))
    handle = manager.save(6)
    handle.local_completion.result(30)
    once(rank, lambda: flip_byte(newest(root / "staging-a", "segment-00001.safetensors")))
    once(rank, lambda: os.kill(pid, signal.SIGCONT))
    if rank == 2:
        return waited(manager, 1.0)
    error = handle.upload_completion.exception(60)
    assert isinstance(error, CkptError)
    return told(error)


def waited(manager: CheckpointManager, timeout_s: float) -> Any:
    try:
        manager.wait_until_finished(timeout_s)
    except CkptError as error:
        return told(error)
    return None


@pytest.mark.slow
def test_steps_that_not_all_ranks_save_are_never_committed_and_whoever_waits_is_told(root: Path) -> None:
    """I37: only rank 0 saves. I41: one rank's step has another number. I39: one rank's upload fails."""
    found = run_ranks(3, save_apart, root)
    assert found[0]["alone_s"] < AT_ONCE_S
    assert named(found[0]["alone"]) == ("TimeoutExceededError", "timeout", "[1, 2]")
    assert [outcome["nothing"] for outcome in found] == [[]] * 3
    # Once the job has gone on, nobody waits any longer for what can never be.
    assert named(found[0]["overtaken"]) == ("InvalidInputError", "not-on-all-ranks", "[1]")
    assert found[0]["overtaken"][2]["step"] == "1"
    assert [outcome["overtaken"] for outcome in found[1:]] == [None] * 2
    assert [outcome["told_once"] for outcome in found] == [None] * 3

    apart = [named(outcome["apart"])[2] for outcome in found]
    assert apart[0] in ("[1]", "[1, 2]")  # rank 2 saves it too; its part may be in the store by now
    assert apart[1:] == ["[0, 2]", "[0, 1]"]
    assert [named(outcome["ended"])[1:] for outcome in found[:2]] == [
        ("not-on-all-ranks", "[1]"),
        ("not-on-all-ranks", "[0]"),
    ]
    assert named(found[2]["ended"])[2] == "[0, 1]"  # of another node only its absence is known
    assert [outcome["steps"] for outcome in found] == [[2, 5]] * 3

    # The ranks of a node share their outcome, whosever part it was; those of other nodes hear who is missing.
    for kind, code, context in (found[0]["damaged"], found[1]["damaged"]):
        assert (kind, code) == ("CorruptError", "digest")
        assert "segment-00001" in context["where"]
    assert named(found[2]["damaged"])[::2] == ("TimeoutExceededError", "[0, 1]")


def named(outcome: tuple[str, str, dict[str, str]]) -> tuple[str, str, str]:
    kind, code, context = outcome
    return kind, code, context["missing_ranks"]


# --- damage ---


def damage(rank: int, world: int, root: Path) -> Sketch:
    states = save_two_steps(root, world)
    found: Sketch = {}

    # One rank's local copy is damaged: the store repairs it.
    once(rank, lambda: flip_byte(newest(root / "staging", "segment-00001.safetensors")))
    manager, model, optimizer = make(root, "fsdp2", world)
    found["repaired"] = manager.restore()
    assert_same_bits(full_state(model, optimizer), states[2])
    manager.close()

    # One object in the store is damaged, and no local copy is left.
    def lose_everything() -> None:
        lose_node(root / "staging")
        (path,) = (root / "store/run/data").rglob("000000000002.*/segment-00001.safetensors")
        flip_byte(path)

    once(rank, lose_everything)
    manager, model, optimizer = make(root, "fsdp2", world)
    try:
        manager.restore(2)
    except CorruptError as error:
        found["explicit"] = told(error)
    manager.close()
    barrier()
    manager, model, optimizer = make(root, "fsdp2", world)
    found["fallback"] = manager.restore()
    assert_same_bits(full_state(model, optimizer), states[1])
    manager.close()
    return found


def save_two_steps(root: Path, world: int) -> dict[int, dict[str, torch.Tensor]]:
    states = {}
    manager, model, optimizer = make(root, "fsdp2", world)
    with manager:
        manager.restore()
        for step in (1, 2):
            list(train(model, optimizer, range(step - 1, step)))
            states[step] = full_state(model, optimizer)
            manager.save(step)
    barrier()
    return states


def once(rank: int, work: Any) -> None:
    """Work of rank 0, done when the other ranks go on."""
    barrier()
    if rank == 0:
        work()
    barrier()


def lose_node(staging: Path) -> None:
    """End the processes of a node and wipe its disk."""
    end_node(staging)

    def wiped() -> bool:
        shutil.rmtree(staging, ignore_errors=True)  # a thread of the dead may still be in its last write
        return not staging.exists()

    poll(wiped, what=f"{staging} is empty")


def newest(folder: Path, name: str) -> Path:
    return max(folder.rglob(name), key=lambda path: path.parent.name)


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.slow
def test_damaged_copies_are_repaired_or_all_ranks_fall_back_together(root: Path) -> None:
    """Case I15."""
    for found in run_ranks(2, damage, root):
        assert found["repaired"] == 2
        kind, code, context = found["explicit"]
        assert (kind, code, context["rank"]) == ("CorruptError", "digest", "1")
        assert "segment-00001" in context["where"]
        assert found["fallback"] == 1


# --- two nodes ---


def two_nodes(rank: int, world: int, root: Path) -> Sketch:
    staging = f"staging-{'ab'[rank // 2]}"
    manager, model, optimizer = make(root, "fsdp2", world, staging=staging)
    with manager:
        manager.restore()
        list(train(model, optimizer, range(1)))
        saved = full_state(model, optimizer)
        manager.save(1)
    barrier()
    found: Sketch = {"sealed": sealed_ranks(root / staging, root)}

    once(rank, lambda: lose_node(root / "staging-b"))
    manager, model, optimizer = make(root, "fsdp2", world, staging=staging)
    found["restored"] = manager.restore()
    assert_same_bits(full_state(model, optimizer), saved)
    list(train(model, optimizer, range(1, 2)))
    with manager:
        manager.save(2)
    barrier()
    found["steps"] = manager.all_steps()

    # Ranks change their nodes: rank numbers bind nobody to a disk.
    saved = full_state(model, optimizer)
    swapped = f"staging-{'ba'[rank // 2]}"
    manager, model, optimizer = make(root, "fsdp2", world, staging=swapped)
    found["swapped"] = manager.restore()
    assert_same_bits(full_state(model, optimizer), saved)
    manager.close()
    return found


def sealed_ranks(staging: Path, root: Path) -> list[int]:
    return StagingDir(staging).sealed_ranks(keys.run_key(url_of(root)), CheckpointId(1, 1))


@pytest.mark.slow
def test_two_nodes_commit_together_and_a_replaced_node_reads_from_the_store(root: Path) -> None:
    """Case I36."""
    outcomes = run_ranks(4, two_nodes, root)
    assert [found["sealed"] for found in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    groups = sorted(path.name for path in (root / "store/run/index").glob("000000000001.*/*"))
    assert len(groups) == 2
    for found in outcomes:
        assert found["restored"] == 1
        assert found["steps"] == [1, 2]
        assert found["swapped"] == 2
