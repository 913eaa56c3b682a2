"""Expert parallelism: experts as a sharded dim and as names of their own, onto other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt.errors import CkptError, InvalidInputError
from ckpt_trainer_hooks import CheckpointManager
from tests.support.bits import bits_of
from tests.support.models import barrier, full_state
from tests.support.ranks import run_ranks

EXPERTS, ROWS, COLUMNS = 4, 6, 3  # FSDP2 takes no uneven dim but the first
# World size, ranks along ep; the rest of the world is FSDP. The last letter: the dim that FSDP shards.
SPLITS = {
    1: (("sharded", 1, 0), ("named", 1, 0)),
    2: (("sharded", 2, 0), ("named", 2, 0)),
    4: (("sharded", 2, 0), ("sharded", 2, 1), ("sharded", 4, 0), ("named", 4, 0), ("named", 2, 0)),
}


class Sharded(nn.Module):
    """All experts in one tensor, split over ep."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(COLUMNS, EXPERTS)
        self.experts = nn.Module()
        rows = torch.arange(ROWS * COLUMNS).view(1, ROWS, COLUMNS) / 100
        self.experts.weight = nn.Parameter(torch.arange(1.0, EXPERTS + 1).view(-1, 1, 1) + rows)
        self.register_buffer("expert_bias", torch.linspace(-1, 1, EXPERTS))


class Named(nn.Module):
    """The experts of one rank, each under its global name."""

    def __init__(self, mine: range) -> None:
        super().__init__()
        self.router = nn.Linear(COLUMNS, EXPERTS)
        self.experts = nn.ModuleDict({str(k): nn.Linear(COLUMNS, ROWS) for k in mine})
        for k in mine:
            nn.init.constant_(self.experts[str(k)].weight, k + 1.0)
            nn.init.constant_(self.experts[str(k)].bias, -k - 1.0)


def _build(kind: str, rank: int, world: int, ep: int, dim: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    if kind == "named":
        each = EXPERTS // ep
        model: nn.Module = Named(range(rank % ep * each, (rank % ep + 1) * each))
    else:
        model = Sharded()
        if world > 1:
            _shard(model, world, ep, dim)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _shard(model: Sharded, world: int, ep: int, dim: int) -> None:
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    model.experts.weight = nn.Parameter(
        distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])
    )
    if world > ep:
        fully_shard(model.experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    flat = mesh["dp", "ep"]._flatten("fsdp")
    fully_shard(model.router, mesh=flat)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()


def _manager(
    root: Path, run: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> CheckpointManager:
    return CheckpointManager(
        f"file://{root}/store/{run}",
        model=model,
        optimizer=optimizer,
        staging_dir=root / f"staging-{dist.get_world_size() if dist.is_initialized() else 1}",
        timeout_s=60,
    )


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    return {name: bits_of(tensor) for name, tensor in full_state(model, optimizer).items()}


def _run_name(kind: str, world: int, ep: int, dim: int) -> str:
    return f"{kind}-{world}-{ep}-{dim}"


def _save(rank: int, world: int, root: Path) -> dict[str, dict[str, bytes]]:
    saved = {}
    for kind, ep, dim in SPLITS[world]:
        model, optimizer = _build(kind, rank, world, ep, dim)
        run = _run_name(kind, world, ep, dim)
        with _manager(root, run, model, optimizer) as manager:
            manager.restore()
            _step(model, optimizer)
            manager.save(1)
            saved[run] = _bits(model, optimizer)
    return saved


def _restore(rank: int, world: int, root: Path, runs: list[str]) -> dict[tuple[str, str], dict[str, bytes]]:
    found = {}
    for kind, ep, dim in SPLITS[world]:
        for run in (run for run in runs if run.startswith(kind)):
            model, optimizer = _build(kind, rank, world, ep, dim)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            with _manager(root, run, model, optimizer) as manager:
                assert manager.restore(1) == 1
            found[run, _run_name(kind, world, ep, dim)] = _bits(model, optimizer)
    barrier()  # rank 0 has the store that the others may still read
    return found


def test_I51_experts_restore_exactly_onto_any_other_number_of_ranks(tmp_path: Path) -> None:
    saved: dict[str, dict[str, bytes]] = {}
    for world in SPLITS:
        for outcome in run_ranks(world, _save, tmp_path):
            for run, state in outcome.items():
                saved.setdefault(run, {}).update(state)
    for run, state in saved.items():
        assert state == saved["named-1-1-0" if run.startswith("named") else "sharded-1-1-0"]
    for world in SPLITS:
        restored: dict[tuple[str, str], dict[str, bytes]] = {}
        for outcome in run_ranks(world, _restore, tmp_path, list(saved)):
            for pair, state in outcome.items():
                restored.setdefault(pair, {}).update(state)
        assert len(restored) == sum(run.startswith(k) for run in saved for k, *_ in SPLITS[world])
        for (run, onto), state in restored.items():
            assert state == saved[run], (run, onto)


# --- labels that are not true ---


class Claimed(nn.Module):
    """One DTensor parameter that says what ``tensor`` says."""

    def __init__(self, tensor: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)


def _try_to_save(root: Path, run: str, tensor: DTensor) -> dict[str, str]:
    """Context of the refusal, which every rank gets before it may save; empty where there was none."""
    manager = _manager(root, run, Claimed(tensor))
    try:
        manager.restore()
        manager.save(1)
    except InvalidInputError as error:
        return {key: str(value) for key, value in error.context.items()} | {"code": error.code}
    finally:
        manager.close()
        dist.barrier()
    return {}


def _mislabel(rank: int, world: int, root: Path) -> dict[str, dict[str, str]]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    full = torch.arange(1.0, EXPERTS + 1).view(-1, 1).repeat(1, 3)
    half = full[rank % 2 * 2 :][:2].contiguous()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    sizes = [1, 4, 1, 0]
    piece = torch.full((sizes[rank], 2), float(rank))

    def claim(local: torch.Tensor, on: object, placements: list[object], shape: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(
            local,
            on,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),  # type: ignore[arg-type]
        )

    cases = {
        "replicate_after_slicing": claim(half, mesh["ep"], [Replicate()], (EXPERTS, 3)),
        "shard_of_the_whole": claim(full.clone(), mesh["ep"], [Shard(0)], (EXPERTS, 3)),
        "wrong_dim": claim(half, mesh["ep"], [Shard(1)], (EXPERTS, 3)),
        "more_ranks": claim(half, line, [Shard(0)], (EXPERTS, 3)),
        "other_sizes": claim(piece, line, [Shard(0)], (6, 2)),
        "other_global_shape": claim(torch.zeros(2, 2), line, [Shard(0)], (7, 2)),
        "right": claim(half, mesh["ep"], [Shard(0)], (EXPERTS, 3)),
    }
    return {name: _try_to_save(root, name, tensor) for name, tensor in cases.items()}


def test_I45_I51_label_that_is_not_true_is_refused_at_save_with_tensor_and_rank(tmp_path: Path) -> None:
    outcomes = run_ranks(4, _mislabel, tmp_path)
    for name in outcomes[0]:
        refused = [outcome[name] for outcome in outcomes]
        if name == "right":
            assert refused == [{}] * 4
            continue
        # Of 7 rows the ranks before the last hold 2, and that is what they have.
        lowest = "3" if name == "other_global_shape" else "0"
        assert {context["rank"] for context in refused} == {lowest}, name
        assert {context["tensor"] for context in refused} == {"model.weight"}
        assert {context["code"] for context in refused} == {"layout-mismatch"}


def _one_rank_refuses(rank: int, world: int, root: Path) -> tuple[str, list[int]]:
    """Rank 1's shard becomes another one after restore(). What rank 0 saves must never be committed."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    def shard(rows: int) -> DTensor:
        local = torch.ones(rows, 2)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 2)), stride=(2, 1)
        )

    model = Claimed(shard(3))
    manager = _manager(root, "half", model)
    try:
        manager.restore()
        if rank == 1:
            model.weight = nn.Parameter(shard(2))
        try:
            manager.save(1).local_completion.result(30)
        except InvalidInputError as error:
            return str(error.context["rank"]), []
        return "", manager.all_steps()
    finally:
        manager.close()
        dist.barrier()


def test_I45_save_that_one_rank_refuses_is_not_committed(tmp_path: Path) -> None:
    assert run_ranks(2, _one_rank_refuses, tmp_path) == [("", []), ("1", [])]


def _not_replicas(rank: int, world: int, root: Path) -> str:
    """Each rank has other experts under the same name, and calls them replicas: the digests tell."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    local = torch.full((2, 3), rank % 2 + 1.0)
    model = Claimed(DTensor.from_local(local, mesh["dp"], [Replicate()]))
    manager = _manager(root, "not-replicas", model, torch.optim.SGD(model.parameters()))
    manager.restore()
    manager.save(1)
    try:
        manager.wait_until_finished(30)
    except CkptError as error:
        return str(error)
    finally:
        manager.close()
        dist.barrier()
    return "committed"


def test_I46_I51_experts_that_are_called_replicas_and_differ_are_not_committed(tmp_path: Path) -> None:
    outcomes = run_ranks(4, _not_replicas, tmp_path)
    assert all("model.weight" in outcome for outcome in outcomes), outcomes
