"""Which run a checkpoint or a segment belongs to, by records, manifests and indexes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, InvalidInputError, NotFoundError, RefusedError
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId, same_run
from ckpt.format.keys import attempt_key, group_key, manifest_key
from ckpt.format.manifest import encode_manifest
from ckpt.format.peer import PeerNode
from ckpt.ops.attempts import NO_CLAIM, claim_attempt, list_attempts, read_attempt, read_run_id
from ckpt.ops.catalog import latest, list_checkpoints, read_manifest
from ckpt.ops.commit import publish_complete
from ckpt.ops.identity import absence, belongs, find_foreign, require_own
from ckpt.ops.prune import execute_prune, plan_deletion, plan_retention
from ckpt.ops.records import repair_records
from ckpt.plan.choice import NodeHoldings, of_one_life
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from tests.support.builders import FakeClock, build_checkpoint, claim, memory_store

ID = CheckpointId(10, 1)
A, B = "a" * 32, "b" * 32


def begin(store: Store) -> str:
    """Start the run; returns its id."""
    claim(store)
    return read_run_id(store) or ""


def forget_ids(store: Store) -> None:
    """Make the attempt records those of an older version."""
    for number in list_attempts(store):
        body = json.loads(store.get(attempt_key(number)))
        del body["run_id"]
        store.put(attempt_key(number), json.dumps(body).encode())


# --- the run id ---


def test_every_attempt_of_a_life_has_the_first_ones_claim_as_run_id() -> None:
    store = memory_store()
    assert read_run_id(store) is None
    numbers = [claim(store) for _ in range(4)]
    records = [read_attempt(store, number) for number in numbers]
    assert {record.run_id for record in records} == {records[0].claim_id}
    assert len({record.claim_id for record in records}) == 4
    assert read_run_id(store) == records[0].claim_id


@given(st.lists(st.sampled_from(["claim", "delete", "old", "lose"]), max_size=12))
def test_run_ids_are_one_per_life_whatever_versions_start_it(moves: list[str]) -> None:
    store = memory_store()
    lives: list[set[str]] = [set()]
    for move in moves:
        if move == "delete":
            store.delete([info.key for info in store.list_keys("")])
            lives.append(set())
        elif move == "lose" and (newest := next(list_attempts(store), 1)) > 1:
            store.delete([attempt_key(newest)])
        elif move in ("claim", "old"):
            number = claim(store)
            if move == "old":  # a version that knows nothing of run ids
                body = json.loads(store.get(attempt_key(number)))
                store.put(
                    attempt_key(number), json.dumps({k: body[k] for k in body if k != "run_id"}).encode()
                )
            lives[-1].add(read_run_id(store) or "")
    assert all(len(ids) <= 1 and "" not in ids for ids in lives)
    assert len(set().union(*lives)) == sum(map(len, lives))


def test_without_attempts_the_newest_manifest_says_the_id_and_the_next_attempt_keeps_it() -> None:
    store = memory_store()
    run_id = begin(store)
    build_checkpoint(store, 10, run_id=run_id)
    store.delete([attempt_key(1)])
    assert read_run_id(store) == run_id
    assert claim_attempt(store, parent=ID, world_size=2, host="h", clock=FakeClock()) == 2
    assert read_attempt(store, 2).run_id == run_id


def test_a_damaged_record_is_passed_over() -> None:
    store = memory_store()
    run_id = begin(store)
    claim(store)
    store.put(attempt_key(2), b"{")
    assert read_run_id(store) == run_id
    store.put(attempt_key(1), b"{")
    assert read_run_id(store) == ""


# --- checkpoints ---


def other_life(store: Store) -> None:
    begin(store)
    build_checkpoint(store, 10, run_id=A)


def renamed(store: Store) -> None:
    edit(store, begin(store), "another-name")


def alone(store: Store) -> None:
    edit(store, A, "another-name")


def alone_same_name(store: Store) -> None:
    build_checkpoint(store, 10, run_id=A)


def old_version(store: Store) -> None:
    begin(store)
    build_checkpoint(store, 10)


def old_renamed(store: Store) -> None:
    begin(store)
    forget_ids(store)
    edit(store, "", "another-name")


def old_foreign(store: Store) -> None:
    claim(store, world_size=7)
    edit(store, "", "another-name")


def edit(store: Store, run_id: str, name: str) -> None:
    """Commit step 10, then make its manifest one of a run called ``name``."""
    build_checkpoint(store, 10, run_id=run_id)
    manifest = read_manifest(store, ID)
    manifest.run = name
    store.put(manifest_key(ID), encode_manifest(manifest))


@pytest.mark.parametrize(
    ("make", "is_foreign"),
    [
        (other_life, True),
        (renamed, False),
        (alone, True),
        (alone_same_name, False),
        (old_version, False),
        (old_renamed, False),
        (old_foreign, True),
    ],
)
def test_whose_a_checkpoint_is(make: Callable[[Store], None], is_foreign: bool) -> None:
    store = memory_store()
    make(store)
    found = find_foreign(store, read_manifest(store, ID))
    assert (found is not None) == is_foreign
    if found is not None:
        assert found.code == "other-run"
        assert found.context["checkpoint"] == ID
        with pytest.raises(RefusedError):
            require_own(store, read_manifest(store, ID))


def test_repair_makes_no_attempt_of_another_runs_checkpoint() -> None:
    store = memory_store()
    other_life(store)
    before = store.get(attempt_key(1))
    assert list(repair_records(store, read_manifest(store, ID), [], dry_run=False)) == []
    assert store.get(attempt_key(1)) == before
    build_checkpoint(store, 10, 5, run_id=A)
    assert list(repair_records(store, read_manifest(store, CheckpointId(10, 5)), [], dry_run=False)) == []
    assert next(list_attempts(store)) == 1


def test_a_checkpoint_copied_alone_begins_a_run_once_it_is_repaired() -> None:
    store = memory_store()
    alone(store)
    assert find_foreign(store, read_manifest(store, ID)) is not None
    assert len(list(repair_records(store, read_manifest(store, ID), [], dry_run=False))) == 1
    assert find_foreign(store, read_manifest(store, ID)) is None
    assert (claim(store, parent=ID), read_run_id(store)) == (2, A)


def test_a_repaired_record_keeps_the_run_id() -> None:
    store = memory_store()
    run_id = begin(store)
    build_checkpoint(store, 10, run_id=run_id)
    store.delete([attempt_key(1)])
    assert list(repair_records(store, read_manifest(store, ID), [], dry_run=False)) == [
        (attempt_key(1), "missing")
    ]
    assert (read_attempt(store, 1).claim_id, read_run_id(store)) == (NO_CLAIM, run_id)


def test_groups_of_two_lives_do_not_make_a_checkpoint() -> None:
    store = memory_store()
    build_checkpoint(store, 10, group_size=1, groups=[0], commit=False, run_id=A)
    with pytest.raises(CorruptError) as caught:
        build_checkpoint(store, 10, group_size=1, groups=[1], run_id=B)
    assert (caught.value.code, caught.value.context["field"]) == ("group-identity", "run_id")


def test_a_group_that_an_older_version_published_fits() -> None:
    store = memory_store()
    build_checkpoint(store, 10, group_size=1, groups=[0], commit=False, run_id=A)
    build_checkpoint(store, 10, group_size=1, groups=[1])
    assert read_manifest(store, ID).run_id == A


def test_retention_deletes_nothing_while_another_runs_checkpoint_counts_as_latest() -> None:
    store = memory_store()
    run_id = begin(store)
    for step in (10, 20, 30):
        build_checkpoint(store, step, run_id=run_id)
    foreign = build_checkpoint(store, 5, 9, run_id=A).ident
    for verdicts in (plan_retention(store, keep_last=1), plan_deletion(store, [ID])):
        with pytest.raises(RefusedError) as caught:
            execute_prune(store, verdicts)
        assert (caught.value.code, caught.value.context["checkpoint"]) == ("other-run", foreign)
    assert len(list(list_checkpoints(store))) == 4
    assert execute_prune(store, plan_deletion(store, [foreign])).deleted == (foreign,)
    assert latest(store) == CheckpointId(30, 1)
    with pytest.raises(RefusedError) as caught:
        plan_deletion(store, [CheckpointId(30, 1)])
    assert caught.value.code == "last-good"
    assert execute_prune(store, plan_retention(store, keep_last=1)).deleted == (CheckpointId(20, 1), ID)


# --- segments ---


def test_a_segment_belongs_where_its_attempt_does() -> None:
    store = memory_store()
    with pytest.raises(RefusedError) as caught:
        belongs(store, A, 1)
    assert caught.value.code == "run-gone"
    assert belongs(store, "", 1)  # an older version's: as it always was
    run_id = begin(store)
    assert belongs(store, run_id, 1)
    assert belongs(store, run_id, 2)
    assert not belongs(store, A, 1)
    assert not belongs(store, A, 7)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.sampled_from(["", A, B]))),
    st.sampled_from([None, "", A]),
)
def test_what_nodes_hold_is_parted_by_life(entries: list[tuple[int, int, str]], run_id: str | None) -> None:
    def held(step: int, other: str) -> Held:
        ident = CheckpointId(step, 1)
        return Held(ident=ident, world_size=2, is_committed=False, own=(0,), replicas=(), run_id=other)

    nodes = [
        NodeHoldings(
            node=PeerNode(node_id=str(number), target=None, domain="d", host=f"host{number}"),
            in_job=True,
            held=tuple(held(step, other) for node, step, other in entries if node == number),
        )
        for number in range(4)
    ]
    ours, strangers = of_one_life(nodes, run_id)
    kept = {(item.node.host, h.ident.step, h.run_id) for item in ours for h in item.held}
    given_ = {(f"host{node}", step, other) for node, step, other in entries}
    expected = {e for e in given_ if run_id is not None and same_run(e[2], run_id)}
    assert kept == expected
    assert {(s.host, s.ident.step, s.run_id) for s in strangers} == given_ - expected


def test_what_is_held_says_its_life_on_the_wire() -> None:
    held = Held(ident=ID, world_size=2, is_committed=True, own=(0,), replicas=(1,), run_id=A)
    assert Held.from_proto(held.to_proto()) == held
    assert Held.from_json(json.loads(json.dumps(held.to_json()))) == held
    assert Held.from_proto(replace(held, run_id="").to_proto()).run_id == ""


# --- nothing there ---


def make_runs(root: Path, *names: str) -> None:
    for name in names:
        claim(open_store(f"file://{root}/{name}"))


def near(root: Path, name: str) -> NotFoundError:
    return absence(f"file://{root}/{name}", open_store)


def test_absence_names_what_is_near(tmp_path: Path) -> None:
    assert near(tmp_path / "store", "run").code == "empty-store"
    make_runs(tmp_path / "store", "run-1", "Llama", *(f"x{number}" for number in range(40)))
    (tmp_path / "store" / "run-3").mkdir()  # no run
    found = near(tmp_path / "store", "run-2")
    assert (found.code, found.context["similar_runs"]) == ("no-run", ["run-1"])
    assert len(found.context["other_runs"]) == 4  # type: ignore[arg-type]
    assert near(tmp_path / "store", "llama").context["similar_runs"] == ["Llama"]
    assert near(tmp_path, "store").context["runs_below"] == ["Llama", "run-1", "x0", "x1", "x10"]
    with pytest.raises(InvalidInputError):
        absence("s3://bucket", open_store)


def test_complete_checkpoints_without_any_manifest_are_committed_and_others_are_not() -> None:
    store = memory_store()
    claim(store)
    assert publish_complete(store) == []
    build_checkpoint(store, 10, commit=False)
    build_checkpoint(store, 20, commit=False)
    build_checkpoint(store, 30, groups=[0], commit=False)  # a rank is missing
    build_checkpoint(store, 40, commit=False)
    store.put(group_key(CheckpointId(40, 1), 0, 2), b"damaged")
    assert publish_complete(store) == [CheckpointId(20, 1), CheckpointId(10, 1)]
    assert latest(store) == CheckpointId(20, 1)
    build_checkpoint(store, 50, commit=False)
    assert publish_complete(store) == []  # there are manifests: the servers' business
    assert [info.ident.step for info in list_checkpoints(store)] == [20, 10]
