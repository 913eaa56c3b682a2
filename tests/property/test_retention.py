"""Retention against what must hold for any history and any policy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.ids import CheckpointId
from ckpt.plan.retention import newest_first, plan_prune

some_ids = st.builds(CheckpointId, st.integers(0, 40), st.integers(1, 4))


@st.composite
def histories(draw: st.DrawFn) -> tuple[set[CheckpointId], list[CheckpointId]]:
    """Checkpoints of a run and its current line, made by replaying starts, rollbacks and deletions."""
    present: set[CheckpointId] = set()
    line: list[CheckpointId] = []
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        if line:
            line = line[draw(st.integers(0, len(line))) :]  # resumed from an older one, or started afresh
        step = line[0].step if line else 0
        for _ in range(draw(st.integers(0, 4))):
            step += draw(st.integers(1, 10))
            line.insert(0, CheckpointId(step, attempt))
            present.add(line[0])
    gone = draw(st.sets(st.sampled_from(sorted(present)), max_size=3)) if present else set()
    return present - gone, line


@given(histories(), st.integers(1, 6), st.integers(0, 12), st.sets(some_ids, max_size=4))
def test_retention_laws(
    history: tuple[set[CheckpointId], list[CheckpointId]],
    keep_last: int,
    keep_every: int,
    pinned: set[CheckpointId],
) -> None:
    """Case I70."""
    present, line = history
    verdicts = plan_prune(
        sorted(present), line=line, keep_last=keep_last, keep_every=keep_every, pinned=pinned
    )
    assert [v.ident for v in verdicts] == newest_first(present)
    kept = {v.ident for v in verdicts if v.keep}
    assert len(kept) >= min(keep_last, len(present))
    assert kept >= present & pinned
    current = [ident for ident in line if ident in present]
    assert kept >= set(current[:keep_last])
    if keep_every:
        assert kept >= {ident for ident in current if ident.step % keep_every == 0}
    assert all(v.reason for v in verdicts)
    # Nothing is kept without a rule that says so.
    spare = kept - pinned - set(current[:keep_last])
    rest = [ident for ident in newest_first(present) if ident not in set(current)]
    filled = set(rest[: max(0, keep_last - len(current))])
    assert all(keep_every and ident.step % keep_every == 0 for ident in spare - filled)


@given(histories(), st.integers(1, 6), st.integers(0, 12), st.sets(some_ids, max_size=4))
def test_pruning_twice_changes_nothing_more(
    history: tuple[set[CheckpointId], list[CheckpointId]],
    keep_last: int,
    keep_every: int,
    pinned: set[CheckpointId],
) -> None:
    present, line = history
    first = plan_prune(present, line=line, keep_last=keep_last, keep_every=keep_every, pinned=pinned)
    left = [v.ident for v in first if v.keep]
    again = plan_prune(left, line=line, keep_last=keep_last, keep_every=keep_every, pinned=pinned)
    assert all(v.keep for v in again)
