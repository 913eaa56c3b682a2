"""What is sent of a segment: nothing that the checkpoint before it holds; compressed; all verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.digest import Buffer
from ckpt.errors import CorruptError, NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import DATA, borrows_key, held_key, manifest_key, segment_key
from ckpt.ops.borrow import MOST_REFERENCES
from ckpt.ops.catalog import load_checkpoint, read_manifest
from ckpt.ops.commit import CommitState
from ckpt.ops.prune import execute_prune, plan_deletion, plan_retention
from ckpt.ops.verify import verify_deep, verify_quick
from ckpt.storage.base import Store
from ckpt_server.compression import Compression, pays
from tests.support.builders import CountingStore, FakeClock, claim, memory_store, swept
from tests.support.sealing import World, make_world
from tests.support.uploading import CHUNK, Node, changed


def ident(step: int, attempt: int = 1) -> CheckpointId:
    return CheckpointId(step, attempt)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    store = CountingStore(memory_store())
    claim(store)
    return Node(tmp_path / "staging", store)


@pytest.fixture
def world() -> World:
    """One rank with 512 KiB of floats: 130 chunks."""
    return make_world(rows=64, columns=2048, groups=((0,),))


def references(store: Store, one: CheckpointId) -> list[int]:
    return [other.step for other in read_manifest(store, one).references]


def test_unchanged_chunks_are_not_sent_and_tables_stay_flat(node: Node, world: World) -> None:
    whole = node.save(ident(10), world)[0]
    assert whole.sent_nbytes == whole.nbytes
    second = changed(world, range(3, 4), 1)
    third = changed(second, range(3, 4), 2)
    for step, now in ((20, second), (30, third)):
        (done,) = node.save(ident(step), now)
        assert 0 < done.sent_nbytes == done.stored_nbytes <= 3 * CHUNK  # a row of 8 KiB
        assert done.borrowed_nbytes == done.nbytes - done.sent_nbytes
        node.check(ident(step), now)
    assert references(node.store, ident(30)) == [10]  # where the bytes are, not [20]
    assert read_manifest(node.store, ident(30)).stored_nbytes == done.sent_nbytes
    node.check(ident(10), world)


def test_a_segment_that_did_not_change_at_all_has_no_object(node: Node, world: World) -> None:
    node.save(ident(10), world)
    (done,) = node.save(ident(20), world)
    assert (done.sent_nbytes, done.stored_nbytes, done.borrowed_nbytes) == (0, 0, done.nbytes)
    assert not [info.key for info in node.store.list_keys(DATA) if str(ident(20)) in info.key]
    node.check(ident(20), world)


def test_chunks_that_are_alike_are_sent_once(node: Node, world: World) -> None:
    zeros = replace(world, tensors={**world.tensors, "weight": np.zeros_like(world.tensors["weight"])})
    (done,) = node.save(ident(10), zeros)
    assert done.sent_nbytes <= 4 * CHUNK  # header, one of zeros, two with the rest
    assert done.borrowed_nbytes == 0
    node.check(ident(10), zeros)


def test_a_chunk_of_another_rank_is_borrowed_too(node: Node) -> None:
    both = make_world(rows=64, columns=2048, groups=((0, 1),))
    node.save(ident(10), both)
    weight = both.tensors["weight"]
    swapped = replace(both, tensors={**both.tensors, "weight": np.concatenate([weight[32:], weight[:32]])})
    done = node.save(ident(20), swapped)
    assert all(one.sent_nbytes <= 3 * CHUNK for one in done)
    node.check(ident(20), swapped)


def test_only_committed_checkpoints_of_the_own_line_lend(node: Node, world: World) -> None:
    node.save(ident(10), world, commit=False)
    assert node.save(ident(20), world, commit=False)[0].borrowed_nbytes == 0
    assert node.commit(ident(10)) is CommitState.COMMITTED
    claim(node.store, parent=None)
    assert node.save(ident(30, 2), world)[0].borrowed_nbytes == 0  # began afresh: no base
    claim(node.store, parent=ident(10))
    (done,) = node.save(ident(20, 3), world, parent=ident(10))
    assert done.sent_nbytes == 0
    node.check(ident(20, 3), world)


def test_references_are_bounded_and_old_objects_can_go(node: Node, world: World) -> None:
    last = MOST_REFERENCES + 6
    for step in range(1, last + 1):
        # Three quarters stay for the next one to borrow, so that each step has something in its own object.
        rows = 16 * (step % 4)
        world = changed(world, range(rows, rows + 16), step)
        node.save(ident(step), world)
        assert len(references(node.store, ident(step))) <= MOST_REFERENCES
        execute_prune(node.store, plan_retention(node.store, keep_last=1))
        node.check(ident(step), world)
    kept = {info.key.split("/")[2] for info in node.store.list_keys(DATA)}
    assert kept == {str(ident(step)) for step in [*references(node.store, ident(last)), last]}


def test_an_object_of_which_little_is_wanted_is_left_alone(node: Node, world: World) -> None:
    node.save(ident(10), world)
    (done,) = node.save(ident(20), changed(world, range(4, 64), 77))
    assert done.borrowed_nbytes == 0
    assert done.sent_nbytes == done.nbytes


class At(CountingStore):
    """Calls ``then`` once, right after a put of ``key``."""

    key = ""

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        if key == self.key:
            self.key = ""
            self.then()

    def then(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("before", [True, False])
def test_a_base_pruned_while_it_lends(tmp_path: Path, world: World, before: bool) -> None:
    """Pruned before the borrower looks again: nothing is borrowed. After: its objects are held."""
    store = At(memory_store())
    node = Node(tmp_path / "staging", store)
    node.save(ident(10), world)
    claim(store)
    claim(store, parent=None)
    node.save(ident(15, 2), changed(world, range(64), 9))  # so that 10 of attempt 1 is not the last good one

    def prune_base() -> None:
        report = execute_prune(store, plan_deletion(store, [ident(10)]))
        assert report.held == (ident(10),)  # the record was there

    now = changed(world, range(1), 1)
    node.seal(ident(20), now)
    if before:
        store.key, store.then = borrows_key(ident(20), ident(10)), prune_base  # type: ignore[method-assign]
    done = node.upload(ident(20))
    assert (done.borrowed_nbytes == 0) is before
    if not before:
        prune_base()
        assert swept(store, older_than_s=1e9, dry_run=True) == 0
    node.publish(ident(20), now)
    assert node.commit(ident(20)) is CommitState.COMMITTED
    node.check(ident(20), now)


def test_a_missing_object_is_not_borrowed_from(node: Node, world: World) -> None:
    node.save(ident(10), world)
    node.store.delete([segment_key(ident(10), 0)])
    (done,) = node.save(ident(20), world)
    assert done.sent_nbytes == done.nbytes
    node.check(ident(20), world)


def test_verify_finds_what_is_missing_of_borrowed_chunks(node: Node, world: World) -> None:
    node.save(ident(10), world)
    node.save(ident(20), changed(world, range(1), 1))
    assert verify_quick(load_checkpoint(node.store, ident(20))) == []
    key = segment_key(ident(10), 0)
    data = bytearray(node.store.get(key))
    data[-CHUNK * 3] ^= 1
    node.store.put(key, data)
    assert verify_quick(load_checkpoint(node.store, ident(20))) == []
    (problem,) = verify_deep(load_checkpoint(node.store, ident(20)))
    assert (problem.code, problem.context["key"]) == ("digest", key)
    node.store.delete([key])
    (problem,) = verify_quick(load_checkpoint(node.store, ident(20)))
    assert (problem.code, problem.context["key"]) == ("missing", key)


def test_a_damaged_chunk_ends_the_upload_and_nothing_is_stored(node: Node, world: World) -> None:
    node.seal(ident(10), world)
    path = node.staging.segment_path(node.run_key, ident(10), 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for wanted in ("off", "on"):
        with pytest.raises(CorruptError) as caught:
            node.upload(ident(10), wanted=wanted)
        assert (caught.value.code, caught.value.context["chunk"]) == ("digest", (len(data) - 1) // CHUNK)
    assert list(node.store.list_keys(DATA)) == []


def adamw_world(nbytes: int) -> World:
    """Values distributed like weights and moments of a trained model."""
    random = np.random.default_rng(0)
    world = make_world(rows=3 * 64, columns=nbytes // (3 * 64 * 4), groups=((0,),))
    weight = world.tensors["weight"].copy()
    weight[:64] = random.standard_normal(weight[:64].shape, dtype=np.float32) * 0.02
    gradients = random.standard_normal((2, *weight[:64].shape)) * 1e-4
    weight[64:128] = gradients[0]
    weight[128:] = gradients[1] ** 2
    return replace(world, tensors={**world.tensors, "weight": weight})


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_compression_is_exact_and_spares_what_it_should(node: Node, wanted: str) -> None:
    node.chunk_nbytes = 1 << 20  # a codec block of 128 KiB must not mix bytes of different significance
    world = adamw_world(6 << 20)
    (done,) = node.save(ident(10), world, wanted=wanted)
    manifest = read_manifest(node.store, ident(10))
    if wanted == "on":
        assert done.stored_nbytes == manifest.stored_nbytes <= 0.85 * done.nbytes
    else:
        assert done.stored_nbytes == done.nbytes
        assert not manifest.HasField("stored_nbytes")
    node.check(ident(10), world)
    (again,) = node.save(ident(20), changed(world, range(1), 3), wanted=wanted)
    assert again.sent_nbytes <= 1 << 20
    execute_prune(node.store, plan_retention(node.store, keep_last=1))
    node.check(ident(20), changed(world, range(1), 3))


def test_two_servers_that_pack_a_segment_differently_do_not_harm_each_other(
    tmp_path: Path, world: World
) -> None:
    store = memory_store()
    nodes = [Node(tmp_path / name, store) for name in ("one", "two")]
    world = adamw_world(1 << 20)
    for one, wanted in zip(nodes, ("on", "off"), strict=True):
        one.seal(ident(10), world)
        one.upload(ident(10), wanted=wanted)
    nodes[0].publish(ident(10), world)
    first = nodes[0].commit(ident(10))
    nodes[1].publish(ident(10), world)
    assert (first, nodes[1].commit(ident(10))) == (CommitState.COMMITTED, CommitState.ALREADY)
    nodes[1].check(ident(10), world)


def test_the_sweep_takes_an_object_that_the_committed_segment_does_not_name(
    node: Node, world: World, tmp_path: Path
) -> None:
    other = Node(tmp_path / "other", node.store)
    for one in (node, other):
        one.seal(ident(10), world)
    other.upload(ident(10), wanted="on")  # and it dies before it can publish
    node.save(ident(10), world)
    ours, stray = (
        segment_key(ident(10), 0),
        next(info.key for info in node.store.list_keys(DATA) if info.key.endswith(".pack")),
    )
    assert swept(node.store, older_than_s=3e9, clock=FakeClock(4e9)) == 0  # too young
    assert swept(node.store, older_than_s=1e6, dry_run=True, clock=FakeClock(4e9)) == 1
    assert swept(node.store, older_than_s=1e6, clock=FakeClock(4e9)) == 1
    assert [info.key for info in node.store.list_keys(DATA)] == [ours] != [stray]
    node.check(ident(10), world)
    assert swept(node.store, older_than_s=1e6, clock=FakeClock(4e9)) == 0


def test_what_was_sent_is_not_sent_again_after_a_crash(node: Node, world: World) -> None:
    node.seal(ident(10), world)
    assert node.upload(ident(10)).sent_nbytes > 0
    node.staging.uploaded_path(node.run_key, ident(10), 0).unlink()
    assert node.upload(ident(10)).sent_nbytes == 0
    node.publish(ident(10), world)
    assert node.commit(ident(10)) is CommitState.COMMITTED
    node.check(ident(10), world)


def test_held_objects_are_listed_and_go_with_the_last_user(node: Node, world: World) -> None:
    node.save(ident(10), world)
    node.save(ident(20), changed(world, range(1), 1))
    execute_prune(node.store, plan_deletion(node.store, [ident(10)]))
    with pytest.raises(NotFoundError):
        node.store.head(manifest_key(ident(10)))
    assert node.store.head(held_key(ident(10)))
    node.save(ident(30), changed(world, range(64), 2))
    report = execute_prune(node.store, plan_deletion(node.store, [ident(20)]))
    assert report.freed == (ident(10),)
    left = [info.key for info in node.store.list_keys("") if "000000000010" in info.key]
    assert left == []


def test_compression_pays_where_the_link_is_slower_than_what_it_spares() -> None:
    assert pays(link=50e6, codec=500e6, threads=1, ratio=0.85)
    assert not pays(link=100e6, codec=500e6, threads=1, ratio=0.85)
    assert pays(link=100e6, codec=500e6, threads=2, ratio=0.85)
    assert not pays(link=1.0, codec=500e6, threads=8, ratio=1.0)


def feed(policy: Compression, clock: FakeClock, *, rate: float) -> bool:
    """One upload of 64 MB as the policy wants it; returns whether it was compressed."""
    compressed = policy.choose("auto")
    with policy.sending(compressed=compressed) as sending:
        if compressed or policy.wants_samples:
            policy.encoded(raw_nbytes=8 << 20, stored_nbytes=int(0.8 * (8 << 20)), seconds=(8 << 20) / 500e6)
        clock.time += 64e6 / rate
        sending.nbytes = 64_000_000
    return compressed


def test_auto_switches_itself_on_and_off_as_the_link_changes() -> None:
    clock = FakeClock()
    policy = Compression(threads=1, clock=clock, name="run")
    assert not feed(policy, clock, rate=20e6)  # the first one measures
    assert [feed(policy, clock, rate=20e6) for _ in range(10)] == [True] * 10
    later = [feed(policy, clock, rate=2e9) for _ in range(64)]
    assert not any(later[-8:])  # a raw upload in between has seen the faster link
    assert sum(not one for one in later) > 40
    slower = [feed(policy, clock, rate=5e6) for _ in range(20)]
    assert any(slower[-8:])


def test_pinned_compression_is_what_was_asked_for() -> None:
    policy = Compression(threads=1, clock=FakeClock(), name="run")
    assert all(policy.choose("on") for _ in range(40))
    assert not any(policy.choose("off") for _ in range(40))


def test_side_by_side_uploads_count_as_one_link() -> None:
    clock = FakeClock()
    policy = Compression(threads=1, clock=clock, name="run")
    policy.encoded(raw_nbytes=1000, stored_nbytes=800, seconds=1000 / 500e6)
    with policy.sending(compressed=False) as one, policy.sending(compressed=False) as two:
        clock.time += 1.0
        one.nbytes = two.nbytes = 60_000_000  # 120 MB/s together: more than the 100 up to which it pays
    assert not policy.choose("auto")


def test_a_tiny_upload_says_nothing_about_the_link() -> None:
    clock = FakeClock()
    policy = Compression(threads=1, clock=clock, name="run")
    policy.encoded(raw_nbytes=1000, stored_nbytes=800, seconds=1e-6)
    with policy.sending(compressed=False) as one:
        clock.time += 1.0
        one.nbytes = 1000
    assert not policy.choose("auto")
