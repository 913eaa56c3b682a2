"""Which steps nodes have in common, and whom a reader asks first."""

from __future__ import annotations

from ckpt.format.held import Held, ranks_from_text, ranks_to_text
from ckpt.format.ids import CheckpointId
from ckpt.format.peer import PeerNode
from ckpt.plan.choice import NodeHoldings, Source, nearest_first, sources, standings

STEP = CheckpointId(30, 1)


def node(name: str, *, target: str | None = "", domain: str = "d", ranks: tuple[int, ...] = ()) -> PeerNode:
    address = f"{name}:1" if target == "" else target
    return PeerNode(node_id=name, target=address, domain=domain, host=name, ranks=ranks)


def holds(
    of: PeerNode,
    own: tuple[int, ...] = (),
    replicas: tuple[int, ...] = (),
    *,
    in_job: bool = True,
    committed: bool = False,
    world: int = 4,
) -> NodeHoldings:
    held = Held(ident=STEP, world_size=world, is_committed=committed, own=own, replicas=replicas)
    return NodeHoldings(node=of, in_job=in_job, held=(held,))


def test_ranks_travel_as_ranges() -> None:
    for ranks, text in [((), ""), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((0, 1, 5, 7, 8), "0-1,5,7-8")]:
        assert ranks_to_text(ranks) == text
        assert ranks_from_text(text) == ranks


def test_holdings_survive_both_wire_forms() -> None:
    held = Held(ident=STEP, world_size=9, is_committed=True, own=(0, 1), replicas=(4, 6))
    assert Held.from_json(held.to_json()) == held
    assert Held.from_proto(held.to_proto()) == held


def test_a_step_is_usable_when_nodes_together_have_every_rank() -> None:
    """Case I10."""
    a, b = node("a"), node("b")
    assert standings([holds(a, (0, 1)), holds(b, (2,))])[STEP].missing == (3,)
    whole = standings([holds(a, (0, 1)), holds(b, (2, 3))])[STEP]
    assert whole.is_usable
    # The node of 2 and 3 is gone; its replicas are on the other.
    assert standings([holds(a, (0, 1), (2, 3))])[STEP].is_usable
    # ... or it has left the job and still answers.
    assert standings([holds(a, (0, 1)), holds(b, (2, 3), in_job=False)])[STEP].is_usable


def test_a_committed_step_is_the_stores_affair() -> None:
    a, b = node("a"), node("b")
    assert not standings([holds(a, (0, 1)), holds(b, (2, 3), committed=True)])[STEP].is_usable


def test_a_node_without_an_address_is_a_source_for_itself_only() -> None:
    a, b = node("a", target=None), node("b")
    apart = standings([holds(a, (0, 1)), holds(b, (2, 3))])[STEP]
    assert (apart.missing, apart.unreachable, apart.is_usable) == ((), (0, 1), False)
    assert apart.is_only_unreachable
    assert standings([holds(a, (0, 1, 2, 3))])[STEP].is_usable  # the only node of the job
    replicated = standings([holds(a, (0, 1)), holds(b, (2, 3), (0, 1))])[STEP]
    assert replicated.is_usable


def test_each_address_is_a_source_once_with_its_replicas() -> None:
    a, b = node("a"), node("b", target=None)
    found = list(sources([holds(a, (0, 1), (2,)), holds(b, (3,)), holds(a, (0, 1), (2,))], STEP))
    assert found == [Source(target="a:1", domain="d", ranks=(0, 1, 2))]
    assert list(sources([holds(a, (0,))], CheckpointId(31, 1))) == []


def test_readers_ask_their_own_domain_first_and_begin_with_different_nodes() -> None:
    found = [Source(target=name, domain=name[0], ranks=(0,)) for name in ("a1", "a2", "b1", "b2")]
    order = [
        [source.target for source in nearest_first(found, domain="b", own_target="b3", reader=reader)]
        for reader in range(2)
    ]
    assert order == [["b1", "b2", "a1", "a2"], ["b2", "b1", "a2", "a1"]]
    left = nearest_first(found, domain="a", own_target="a1", reader=0)
    assert [source.target for source in left] == ["a2", "b1", "b2"]
