"""Placement of replicas against what must hold for any cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import InvalidInputError
from ckpt.format.peer import PeerNode
from ckpt.plan.placement import choose_copies, place_replicas


def node(number: int, domain: str, *, target: str | None = "set") -> PeerNode:
    return PeerNode(
        node_id=f"{number:016x}",
        target=f"host{number}:1" if target else None,
        domain=domain,
        host=f"host{number}",
        ranks=(number,),
    )


@st.composite
def clusters(draw: st.DrawFn) -> list[PeerNode]:
    domains = draw(st.lists(st.integers(0, 5), min_size=1, max_size=24))
    return [node(number, f"rack{domain}") for number, domain in enumerate(domains)]


factors = st.integers(1, 5)
jumps = st.integers(0, 6)


@given(clusters(), factors, jumps)
def test_every_other_node_once_and_never_the_node_itself(
    nodes: list[PeerNode], factor: int, jump: int
) -> None:
    placed = place_replicas(nodes, factor=factor, jump=jump)
    assert placed.keys() == {one.node_id for one in nodes}
    for one in nodes:
        order = placed[one.node_id].order
        assert Counter(order) == Counter(other for other in nodes if other is not one)


@given(clusters(), factors)
def test_copies_are_apart_and_balanced_wherever_they_fit(nodes: list[PeerNode], factor: int) -> None:
    largest = max(Counter(one.domain for one in nodes).values())
    placed = place_replicas(nodes, factor=factor)
    loads = Counter(other.node_id for p in placed.values() for other in p.order[: factor - 1])
    if factor * largest > len(nodes):
        return
    assert all(placement.apart for placement in placed.values())
    for one in nodes:
        domains = [one.domain, *(other.domain for other in placed[one.node_id].order[: factor - 1])]
        assert len(set(domains)) == factor
    assert {loads[one.node_id] for one in nodes} == {factor - 1}


@given(clusters(), factors, jumps)
def test_copies_share_a_domain_only_where_there_is_no_other(
    nodes: list[PeerNode], factor: int, jump: int
) -> None:
    count = len({one.domain for one in nodes})
    for one in nodes:
        placement = place_replicas(nodes, factor=factor, jump=jump)[one.node_id]
        chosen = [one, *placement.order[: min(factor, len(nodes)) - 1]]
        assert len({other.domain for other in chosen}) >= min(len(chosen), count)
        assert placement.apart == (len({other.domain for other in chosen}) == factor)


@given(st.integers(1, 24), factors)
def test_one_domain_is_balanced_all_the_same(count: int, factor: int) -> None:
    nodes = [node(number, "rack") for number in range(count)]
    placed = place_replicas(nodes, factor=factor)
    loads = Counter(other.node_id for p in placed.values() for other in p.order[: factor - 1])
    assert {loads[one.node_id] for one in nodes} == {min(factor, count) - 1}


@given(st.integers(2, 16), st.integers(1, 15))
def test_jump_is_the_distance_of_the_copies(count: int, jump: int) -> None:
    nodes = [node(number, f"rack{number}") for number in range(count)]
    placed = place_replicas(nodes, factor=2, jump=jump)
    for number, one in enumerate(nodes):
        if jump % count:
            assert placed[one.node_id].order[0] is nodes[(number + jump) % count]


@given(clusters(), st.integers(2, 5), st.data())
def test_the_next_node_in_order_stands_in_for_a_lost_one(
    nodes: list[PeerNode], factor: int, data: st.DataObject
) -> None:
    owner = data.draw(st.sampled_from(nodes))
    order = place_replicas(nodes, factor=factor)[owner.node_id].order
    everyone = choose_copies(owner, order, factor=factor)
    assert len(everyone) == min(factor, len(nodes)) - 1
    lost = data.draw(st.sets(st.sampled_from([one.node_id for one in nodes])))
    left = choose_copies(owner, order, factor=factor, lost=lost)
    assert not lost & {one.node_id for one in left}
    alive = [one for one in order if one.node_id not in lost]
    assert len(left) == len(set(left)) == min(factor - 1, len(alive))
    # Those in domains of their own come first; the rest only where no such domain is left.
    reachable = {one.domain for one in alive} - {owner.domain}
    assert len({one.domain for one in left} - {owner.domain}) == min(len(left), len(reachable))


def test_node_that_cannot_be_reached_holds_nothing() -> None:
    nodes = [node(0, "a"), node(1, "b", target=None), node(2, "c")]
    order = place_replicas(nodes, factor=2)[nodes[0].node_id].order
    assert choose_copies(nodes[0], order, factor=2) == [nodes[2]]


def test_two_racks_of_two_are_crossed() -> None:
    nodes = [node(0, "a"), node(1, "a"), node(2, "b"), node(3, "b")]
    first = {
        number: place_replicas(nodes, factor=2)[one.node_id].order[0] for number, one in enumerate(nodes)
    }
    assert first == {0: nodes[2], 1: nodes[3], 2: nodes[0], 3: nodes[1]}


@pytest.mark.parametrize(("factor", "jump"), [(0, 0), (2, -1)])
def test_bad_numbers_are_refused(factor: int, jump: int) -> None:
    with pytest.raises(InvalidInputError):
        place_replicas([node(0, "a")], factor=factor, jump=jump)


def test_a_node_twice_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        place_replicas([node(0, "a"), node(0, "b")], factor=2)
