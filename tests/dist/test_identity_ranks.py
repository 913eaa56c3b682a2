"""Which run this is, and whether there is one, rank 0 settles for all ranks: two nodes, a rank on each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CkptError
from ckpt.format import keys
from ckpt.storage.staging import StagingDir
from ckpt_trainer_hooks import CheckpointManager
from tests.support.chain import end_node
from tests.support.models import barrier, build, train
from tests.support.ranks import run_ranks

Told = int | tuple[str, str]


def starts(rank: int, world: int, root: Path) -> list[Told]:
    """Several starts of a job; what each restore returned or raised."""

    def start(path: str, **how: Any) -> Told:
        model, optimizer = build("fsdp2", world)
        manager = CheckpointManager(
            f"file://{root}/{path}", model=model, optimizer=optimizer, staging_dir=root / f"node-{rank}"
        )
        try:
            found = manager.restore(**how)
            if found == 0:
                list(train(model, optimizer, range(1)))
                manager.save(1).upload_completion.result(60)
        except CkptError as error:
            return type(error).__name__, error.code
        finally:
            manager.close()
        return found

    found = [
        start("nothing/here/run", required=True),
        start("store/run"),
        start("store/run"),
        start("store/ran", step=3),
    ]
    barrier()
    if rank == 0:
        shutil.rmtree(root / "store" / "run")
    barrier()
    return [*found, start("store/run"), start("store/run", start_over=True), start("store/run")]


@pytest.mark.slow
def test_all_ranks_hear_the_same_and_every_node_sets_aside_its_part(tmp_path: Path) -> None:
    try:
        one, other = run_ranks(2, starts, tmp_path)
    finally:
        for node in tmp_path.glob("node-*"):
            end_node(node)
    assert one == other
    assert one == [
        ("NotFoundError", "empty-store"),
        0,
        1,
        ("NotFoundError", "no-run"),
        ("RefusedError", "run-gone"),
        0,
        1,
    ]
    run_key = keys.run_key(f"file://{tmp_path}/store/run")
    for rank in (0, 1):
        node = StagingDir(tmp_path / f"node-{rank}")
        (life,) = (node.path / "aside" / run_key).iterdir()
        assert [path.name for path in life.iterdir()] == ["000000000001.a000001"]
        assert len(node.checkpoints(run_key)) == 1
