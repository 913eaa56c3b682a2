"""What is worth a replica, and which may go, against what must hold for any history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.ids import CheckpointId
from ckpt.plan.replicas import HeldReplica, replicas_to_drop, steps_to_replicate
from ckpt.plan.retention import newest_first

ids = st.builds(CheckpointId, st.integers(0, 30), st.integers(1, 3))
OWNERS = ("a", "b", "c")


@st.composite
def holdings(draw: st.DrawFn) -> list[HeldReplica]:
    keys = draw(st.sets(st.tuples(ids, st.sampled_from(range(3))), max_size=14))
    committed = draw(st.sets(st.sampled_from(sorted({i for i, _ in keys})))) if keys else set()
    return [
        HeldReplica(
            ident=ident,
            group=group,
            owner=OWNERS[group],
            committed=ident in committed,
            whole=draw(st.booleans()),
            given_up=ident not in committed and draw(st.integers(0, 4)) == 0,
        )
        for ident, group in sorted(keys)
    ]


@given(holdings(), st.integers(1, 3), st.sets(st.sampled_from(OWNERS)))
def test_nothing_uncommitted_goes_unless_given_up_and_the_newest_stay(
    held: list[HeldReplica], keep: int, current: set[str]
) -> None:
    dropped = replicas_to_drop(held, keep=keep, current=current)
    assert all(one.committed or one.given_up for one in dropped)
    assert all(one in dropped for one in held if one.given_up)
    left = [one for one in held if one not in dropped]
    for owner in OWNERS:
        mine = newest_first(
            one.ident for one in held if one.owner == owner and one.whole and not one.given_up
        )
        kept = {one.ident for one in left if one.owner == owner}
        if owner in current:
            assert kept >= set(mine[:keep])
    # Of every committed step that went there are newer whole ones; dropping again changes nothing.
    for one in dropped:
        if not one.given_up:
            newer = {o.ident for o in held if o.whole and key(o.ident) > key(one.ident)}
            assert len(newer) >= keep
    again = replicas_to_drop(left, keep=keep, current=current)
    assert [one for one in again if one.owner in current] == []


def key(ident: CheckpointId) -> tuple[int, int]:
    return ident.attempt, ident.step


@given(st.sets(ids, max_size=12), st.data(), st.integers(1, 3))
def test_what_is_sent_is_not_dropped_again_by_who_holds_it(
    sealed: set[CheckpointId], data: st.DataObject, keep: int
) -> None:
    committed = data.draw(st.sets(st.sampled_from(sorted(sealed)))) if sealed else set()
    wanted = steps_to_replicate(sealed, committed, keep=keep)
    assert wanted == sorted(wanted, key=key)
    assert set(wanted) >= sealed - committed
    assert set(newest_first(sealed)[:keep]) <= set(wanted)
    held = [
        HeldReplica(ident=ident, group=0, owner="a", committed=ident in committed, whole=True)
        for ident in wanted
    ]
    assert not replicas_to_drop(held, keep=keep, current={"a"})
