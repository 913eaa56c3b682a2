"""The common step of a stop, over two nodes; and what a save achieved."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist

from ckpt.errors import UnavailableError
from ckpt.format.ids import CheckpointId
from ckpt_proto.v1 import common_pb2
from ckpt_trainer_hooks.handle import SaveHandle
from ckpt_trainer_hooks.stop_agreement import Decision, Request, StopAgreement
from ckpt_trainer_hooks.stopping import _achieved
from tests.support.chain import poll

NODES = ((0, 1), (2,))


def ranks_of_two_nodes(root: Path, died: set[int] | None = None) -> list[StopAgreement]:
    store = dist.HashStore()
    return [
        StopAgreement(
            root / f"node-{index}" / "a000002",
            rank=rank,
            group=common_pb2.NodeGroup(index=index, count=len(NODES), ranks=ranks),
            store=store if rank == ranks[0] else None,
            prefix="stop",
            died=lambda: died or set(),
        )
        for index, ranks in enumerate(NODES)
        for rank in ranks
    ]


def everybody_hears(ranks: list[StopAgreement]) -> None:
    asked = ranks[2].ask(Request(cause="SIGTERM", rank=2, grace_s=5.0))
    poll(lambda: all(rank.request() == asked for rank in ranks), what="all have heard")


def decisions(ranks: list[StopAgreement]) -> list[Decision]:
    found: dict[int, Decision] = {}

    def known() -> bool:
        for number, rank in enumerate(ranks):
            if (decision := rank.decision()) is not None:
                found[number] = decision
        return len(found) == len(ranks)

    poll(known, what="all know the decision")
    return [found[number] for number in range(len(ranks))]


def test_nobody_is_asked_before_somebody_asks(tmp_path: Path) -> None:
    assert [rank.request() for rank in ranks_of_two_nodes(tmp_path)] == [None] * 3


def test_decision_is_the_largest_first_step(tmp_path: Path) -> None:
    """Case I40."""
    ranks = ranks_of_two_nodes(tmp_path)
    everybody_hears(ranks)
    for rank, earliest in zip(ranks, (7, 8, 6), strict=True):
        assert rank.decision() is None
        rank.answer(earliest)
        rank.answer(99)  # an answer is given once
    assert decisions(ranks) == [Decision(step=8)] * 3


def test_rank_that_is_known_to_be_dead_ends_it_at_once_on_all_nodes(tmp_path: Path) -> None:
    ranks = ranks_of_two_nodes(tmp_path, died={1})
    everybody_hears(ranks)
    ranks[0].answer(7)
    ranks[2].answer(7)
    found = decisions([ranks[0], ranks[2]])
    assert found == [Decision(step=None, absent=(1,))] * 2


def test_rank_that_does_not_answer_ends_it_after_some_seconds(tmp_path: Path) -> None:
    ranks = ranks_of_two_nodes(tmp_path)
    everybody_hears(ranks)
    for rank in ranks[:2]:
        rank.answer(7)
    found = decisions(ranks[:2])  # the other node has died
    assert [decision.step for decision in found] == [None, None]


def test_files_of_older_attempts_are_removed_by_the_first_rank_of_a_node(tmp_path: Path) -> None:
    old = tmp_path / "node-0" / "a000001"
    old.mkdir(parents=True)
    ranks = ranks_of_two_nodes(tmp_path)
    ranks[1].clean()
    assert old.exists()
    ranks[0].clean()
    assert not old.exists()


@pytest.mark.parametrize(
    ("done", "failed", "achieved"),
    [
        ((), (), "nothing"),
        (("staging",), (), "copied"),
        (("staging", "local"), (), "sealed"),
        (("staging", "local", "peer"), (), "replicated"),
        (("staging", "local", "peer"), ("upload",), "replicated"),
        (("staging", "local"), ("peer",), "sealed"),
        (("staging", "local", "peer", "upload"), (), "committed"),
        (("staging", "local", "upload"), (), "committed"),
        (("staging",), ("local", "upload"), "nothing"),  # a full disk: the copy is gone with the arena
        (("staging", "local"), ("upload",), "sealed"),
    ],
)
def test_what_a_save_achieved(done: tuple[str, ...], failed: tuple[str, ...], achieved: str) -> None:
    handle = SaveHandle(CheckpointId(3, 1))
    if "peer" in (*done, *failed):
        handle.peer_completion = Future()
    for name in done:
        getattr(handle, f"{name}_completion").set_result(None)
    for name in failed:
        getattr(handle, f"{name}_completion").set_exception(UnavailableError("no"))
    assert _achieved(handle) == achieved
