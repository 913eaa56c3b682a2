"""What several ranks want of the store is read once, whatever becomes of the ranks and of the store."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt.errors import CkptError, CorruptError
from ckpt_trainer_hooks import CheckpointManager
from ckpt_trainer_hooks import sharing as sharing_module
from ckpt_trainer_hooks.sharing import Transfer, plan_transfers
from tests.support.bits import assert_same_bits
from tests.support.chain import end_node
from tests.support.faultproxy import FaultProxy
from tests.support.models import full_state
from tests.support.ranks import run_ranks
from tests.support.s3 import Ministack

_WIDTH = 1500  # 26 MiB in all: more chunks than ranks
_WIDE = 2600  # 77 MiB in all: on two ranks, each owns more chunks than it reads ahead


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    found = Ministack(tmp_path_factory.mktemp("s3") / "data")
    found.start()
    yield found
    found.kill()


@pytest.fixture
def proxy(server: Ministack) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as found:
        yield found


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for staging in tmp_path.glob("staging-*"):
        end_node(staging)


def _build(kind: str, world: int) -> nn.Module:
    torch.manual_seed(7)
    width = _WIDE if kind == "ddp, wide" else _WIDTH
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "shard")))
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    return model


def _manager(url: str, endpoint: str, staging: Path, model: nn.Module, **more: Any) -> CheckpointManager:
    return CheckpointManager(
        url,
        model=model,
        staging_dir=staging,
        store_options={"endpoint_url": endpoint, "region": "us-east-1"},
        **{"timeout_s": 60.0, "pending_wait_s": 5.0, **more},
    )


def _save(rank: int, world: int, url: str, endpoint: str, root: Path, kind: str) -> None:
    model = _build(kind, world)
    with _manager(url, endpoint, root / "staging-save", model) as manager:
        manager.restore()
        manager.save(1)
        manager.wait_until_finished()
    state = full_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 0:
        torch.save(state, root / "expected.pt")


def _restore(
    rank: int,
    world: int,
    url: str,
    endpoint: str,
    root: Path,
    kind: str,
    share: bool = True,
    dies: bool = False,
) -> str:
    model = _build(kind, world)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    manager = _manager(
        url, endpoint, root / "staging-new", model, share_reads=share, timeout_s=10.0 if dies else 60.0
    )
    if dies and rank == world - 1:
        complete = sharing_module._Part._complete

        def die_at_once(*args: Any) -> Any:
            complete(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        sharing_module._Part._complete = die_at_once  # type: ignore[assignment]
    try:
        manager.restore()
        assert_same_bits(
            full_state(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.load(root / "expected.pt")
        )
    except CkptError as error:
        if isinstance(error, CorruptError):
            return error.code
        return str(error)
    finally:
        manager.close()
        if not dies:
            dist.barrier()
    return ""


def _data_nbytes(proxy: FaultProxy) -> int:
    return sum(nbytes for path, nbytes in proxy.sent if "/data/" in path)


class _Saved:
    def __init__(self, server: Ministack, proxy: FaultProxy, root: Path, kind: str, world: int) -> None:
        self.url, self.root, self.proxy, self.env = (
            f"s3://{server.make_bucket()}/run",
            root,
            proxy,
            server.env,
        )
        run_ranks(world, _save, self.url, server.endpoint, root, kind, env=self.env)
        staged = (root / "staging-save").rglob("segment-*.safetensors")
        self.nbytes = sum(path.stat().st_size for path in staged)
        assert self.nbytes > 25 << 20

    def restore(self, world: int, kind: str, *more: Any, **options: Any) -> list[str]:
        self.proxy.sent.clear()
        return run_ranks(
            world, _restore, self.url, self.proxy.endpoint, self.root, kind, *more, env=self.env, **options
        )


@pytest.mark.parametrize(
    ("saved", "restored"),
    [(("ddp", 4), ("ddp", 4)), (("fsdp", 2), ("hsdp", 4)), (("ddp, wide", 2), ("ddp, wide", 2))],
)
def test_bytes_from_the_store_are_those_of_the_checkpoint(
    server: Ministack, proxy: FaultProxy, root: Path, saved: tuple[str, int], restored: tuple[str, int]
) -> None:
    """Cases I52, I119, I110."""
    run = _Saved(server, proxy, root, *saved)
    assert run.restore(restored[1], restored[0]) == [""] * restored[1]
    assert _data_nbytes(proxy) == run.nbytes
    if saved == restored == ("ddp", 4):
        end_node(root / "staging-new")
        assert run.restore(4, "ddp", False) == [""] * 4  # switched off: each reads all
        assert _data_nbytes(proxy) > 3 * run.nbytes


def test_damage_and_death_end_the_same_on_every_rank(
    server: Ministack, proxy: FaultProxy, root: Path
) -> None:
    """Case I38."""
    run = _Saved(server, proxy, root, "ddp", 4)
    told = run.restore(4, "ddp", True, True, may_die=frozenset({3}))
    assert told[3] is None
    assert all(text for text in told[:3]), told
    assert all("rank" in text for text in told[:3]), told
    end_node(root / "staging-new")
    proxy.fault = lambda method, path: (
        404 if method == "GET" and "/data/" in path and "segment-00002" in path else None
    )
    assert run.restore(4, "ddp") == ["none-good"] * 4


def _restore_counting(rank: int, world: int, url: str, root: Path) -> int:
    """Restore from a directory with nothing on the node; how many chunks were passed on."""
    passed = 0
    begin = sharing_module._Part._begin

    def counting(*args: Any) -> Any:
        nonlocal passed
        passed += 1
        return begin(*args)

    sharing_module._Part._begin = counting  # type: ignore[method-assign]
    problem = _restore(rank, world, url, "http://127.0.0.1:1", root, "ddp")
    assert problem == "", problem
    return passed


def test_ranks_of_one_host_read_a_directory_by_its_page_cache(root: Path) -> None:
    url = (root / "store").as_uri()
    run_ranks(2, _save, url, "http://127.0.0.1:1", root, "ddp")
    assert run_ranks(2, _restore_counting, url, root) == [0, 0]


def test_every_wanted_chunk_is_read_once_and_the_reading_is_spread() -> None:
    """Case I52."""
    everything = [(rank, number) for rank in range(3) for number in range(4)]
    plan = plan_transfers([everything, everything, everything])
    assert sorted(item.key for item in plan) == everything
    assert [sum(item.owner == rank for item in plan) for rank in range(3)] == [4, 4, 4]
    assert plan_transfers([[(0, 0)], [(0, 1)]]) == []
    a, b = "host a", "host b"  # of a directory: one that only ranks of one host want is in its page cache
    assert plan_transfers([everything, everything, everything], [a, a, a]) == []
    assert len(plan_transfers([everything, everything, everything], [a, a, b])) == len(everything)
    assert plan_transfers([[(0, 0), (0, 1)], [(0, 0)], [(0, 1)]], [a, a, b]) == [Transfer((0, 1), 0, (0, 2))]
    mixed = plan_transfers([[(0, 0), (0, 1)], [(0, 1)], [(0, 0)]])
    assert mixed == [Transfer((0, 0), 0, (0, 2)), Transfer((0, 1), 1, (0, 1))]
