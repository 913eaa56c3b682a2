"""Every kind of damage to every kind of object, in every tier: found, named, and mended from another copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt.client.repair import repair
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import attempt_key, group_key, layout_key, manifest_key, own_object_key, pin_key
from ckpt.ops.attempts import read_attempt
from ckpt.ops.catalog import latest, load_checkpoint
from ckpt.ops.commit import CommitState
from ckpt.ops.pins import is_pinned, pin
from ckpt.ops.prune import execute_prune, plan_deletion
from ckpt.ops.repair import RepairReport
from ckpt.ops.verify import verify_deep
from ckpt.storage.base import Store
from ckpt.storage.memory import MemoryStore
from ckpt.storage.peerfile import replicas_dir
from tests.support.builders import claim, memory_store
from tests.support.sealing import World, make_world
from tests.support.uploading import Node, changed

OLD, NEW = CheckpointId(10, 1), CheckpointId(20, 1)


@dataclass
class Run:
    """Two checkpoints: OLD is raw; NEW is compressed and borrows from OLD what did not change."""

    node: Node
    store: MemoryStore
    worlds: dict[CheckpointId, World]

    def key(self, kind: str, ident: CheckpointId = NEW, rank: int = 1) -> str:
        if kind == "group index":
            return group_key(ident, 0, 1)
        if kind == "layout":
            return layout_key(self.worlds[ident].layouts.digest)
        if kind == "attempt":
            return attempt_key(1)
        if kind == "borrows":
            return next(i.key for i in self.store.list_keys(f"index/{ident}/borrows-"))
        if kind == "borrowed segment":
            ident, rank = OLD, 0  # of which NEW needs the first half
        summary = load_checkpoint(self.store, ident).summary(rank)
        return own_object_key(summary.object_key, summary.pack)

    def content(self) -> dict[str, bytes]:
        return {info.key: self.store.get(info.key) for info in self.store.list_keys("")}

    def repair(self, ident: CheckpointId = NEW, *, dry_run: bool = False) -> RepairReport:
        return repair(self.store, ident, self.node.staging, self.node.run_key, dry_run=dry_run).report

    def lose_local_copies(self) -> None:
        shutil.rmtree(self.node.staging.run_dir(self.node.run_key))


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Run:
    store = memory_store()
    node = Node(tmp_path_factory.mktemp("node"), store)
    claim(store)
    world = make_world(rows=24, columns=512, groups=((0, 1),))
    later = changed(world, range(0, 24, 1)[6:18], 7)
    node.save(OLD, world)
    node.save(NEW, later, wanted="on")
    return Run(node, store, {OLD: world, NEW: later})


@pytest.fixture
def run(master: Run, tmp_path: Path) -> Run:
    """A copy of the master, staging directory included."""
    store = MemoryStore(f"memory://{tmp_path.name}-{id(tmp_path)}/{master.store.url.rpartition('/')[2]}")
    for key, data in master.content().items():
        store.put(key, data)
    shutil.copytree(master.node.staging.path, tmp_path / "staging")
    node = Node(tmp_path / "staging", store)
    folders = node.staging.path / "runs"
    (folders / master.node.run_key).rename(folders / node.run_key)
    return Run(node, store, master.worlds)


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "first bit flipped": lambda data: flip(data, 0),
    "bit flipped in the middle": lambda data: flip(data, len(data) // 2),
    "last bit flipped": lambda data: flip(data, len(data) - 1),
    "last byte cut off": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "a byte appended": lambda data: data + b"\0",
    "missing": lambda _: None,
}
KINDS = ("segment", "pack", "borrowed segment", "group index", "layout", "attempt", "borrows")


def harm(store: Store, key: str, damage: str) -> None:
    changed_data = DAMAGES[damage](store.get(key))
    if changed_data is None:
        store.delete([key])
    else:
        store.put(key, changed_data)


def is_harmless(kind: str, damage: str) -> bool:
    """JSON may end in white space; a bit of the attempt's text may be one that only people read; nobody needs
    the record of what was borrowed once its checkpoint is committed, and of a borrowed object only a part."""
    return (kind, damage) in {
        ("attempt", "last bit flipped"),
        ("attempt", "last byte cut off"),
        ("attempt", "bit flipped in the middle"),
        ("attempt", "missing"),
        ("borrows", "missing"),
        ("borrowed segment", "a byte appended"),
        ("borrowed segment", "last bit flipped"),
        ("borrowed segment", "last byte cut off"),
    }


def named(problems: list[CorruptError]) -> set[object]:
    return {p.context.get("key") or p.context.get("where") for p in problems}


@pytest.mark.fault(
    "Damage",
    "in the store: {kind}",
    "{damage}",
    "found by `verify --deep`, named, mended by `ckpt repair` byte for byte",
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_I124_damage_in_the_store_is_found_named_and_mended(run: Run, kind: str, damage: str) -> None:
    ident = OLD if kind == "segment" else NEW
    key = run.key(kind, ident)
    before = run.content()
    checkpoint = load_checkpoint(run.store, ident)
    harm(run.store, key, damage)
    damaged = run.content()

    if is_harmless(kind, damage):
        assert verify_deep(checkpoint) == [] or kind == "attempt"
        return
    assert key in named(verify_deep(checkpoint))
    dry = run.repair(ident, dry_run=True)
    assert (key in {one.key for one in dry.mended}, dry.left) == (True, [])
    assert run.content() == damaged

    report = run.repair(ident)

    assert ([one.key for one in report.mended], report.left) == ([key], [])
    assert verify_deep(load_checkpoint(run.store, ident)) == []
    if kind == "attempt":
        assert read_attempt(run.store, 1).parent is None
        assert latest(run.store) == NEW
    else:
        assert run.content() == before
    for each, world in run.worlds.items():
        run.node.check(each, world)
    assert run.repair(ident).mended == []


@pytest.mark.fault(
    "Damage",
    "in the store: two objects of one checkpoint swapped",
    "objects put under each other's key",
    "found, mended",
)
def test_I124_two_objects_of_one_checkpoint_swapped(run: Run) -> None:
    for ident, kind in ((OLD, "segment"), (NEW, "pack")):
        before = run.content()
        first, second = (run.key(kind, ident, rank) for rank in (0, 1))
        run.store.put(first, before[second])
        run.store.put(second, before[first])
        assert {first, second} <= named(verify_deep(load_checkpoint(run.store, ident)))
        assert {one.key for one in run.repair(ident).mended} == {first, second}
        assert run.content() == before


@pytest.mark.fault(
    "Damage",
    "in the store: objects of another step",
    "objects put under another step's keys",
    "found, mended",
)
def test_I124_objects_of_another_step(run: Run) -> None:
    for kind in ("segment", "group index"):
        before = run.content()
        key = run.key(kind, OLD)
        run.store.put(key, before[run.key("pack" if kind == "segment" else kind, NEW)])
        assert key in named(verify_deep(load_checkpoint(run.store, OLD)))
        assert [one.key for one in run.repair(OLD).mended] == [key]
        assert run.content() == before


@pytest.mark.fault(
    "Damage",
    "in the store, no copy left: {kind}",
    "object damaged, copies removed",
    "named; repair changes nothing",
)
@pytest.mark.parametrize("kind", ["segment", "pack", "group index", "layout"])
def test_without_a_copy_nothing_is_put_and_what_is_left_is_named(run: Run, kind: str) -> None:
    ident = OLD if kind == "segment" else NEW
    key = run.key(kind, ident)
    harm(run.store, key, "bit flipped in the middle")
    damaged = run.content()
    run.lose_local_copies()

    report = run.repair(ident)

    assert report.mended == []
    assert key in named(report.left)
    assert run.content() == damaged


def test_good_chunks_of_a_damaged_object_are_kept_and_only_the_bad_one_is_fetched(run: Run) -> None:
    harm(run.store, run.key("segment", OLD), "bit flipped in the middle")
    (one,) = run.repair(OLD).mended
    assert one.sources["local"] == 1
    assert one.sources["remote"] == sum(one.sources.values()) - 1 > 1


def test_replicas_mend_the_store(run: Run) -> None:
    replicas = replicas_dir(run.node.staging).path
    replicas.mkdir()
    (run.node.staging.path / "runs").rename(replicas / "runs")
    (run.node.staging.path / "runs").mkdir()
    before = run.content()
    for kind, ident in (("segment", OLD), ("group index", NEW), ("layout", NEW)):
        harm(run.store, run.key(kind, ident), "missing") if kind != "layout" else None
    report = run.repair(NEW)
    assert report.left == []
    assert any("replica" in one.sources for one in report.mended)
    assert run.content() == before


@pytest.mark.fault(
    "Damage",
    "in the store and in the copy, at different places",
    "bits flipped in both",
    "mended chunk by chunk",
)
def test_damage_in_store_and_copy_at_different_places_is_mended(run: Run) -> None:
    """No tier has a whole segment any more; together they have every chunk."""
    before = run.content()
    key = run.key("segment", OLD)
    harm(run.store, key, "last bit flipped")
    path = run.node.staging.segment_path(run.node.run_key, OLD, 1)
    path.write_bytes(flip(path.read_bytes(), 0))
    report = run.repair(OLD)
    assert {one.key for one in report.mended} == {key, str(path)}
    assert run.content() == before
    assert path.read_bytes() == before[key]


@pytest.mark.fault(
    "Damage",
    "on a node: {kind} of the {tier} copy",
    "{damage}",
    "found, replaced from the store byte for byte",
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("tier", ["local", "replica"])
@pytest.mark.parametrize("kind", ["segment", "index"])
def test_I124_damaged_copies_on_a_node_are_replaced_from_the_store(
    run: Run, kind: str, tier: str, damage: str
) -> None:
    place = run.node.staging
    if tier == "replica":
        place = replicas_dir(place)
        place.path.mkdir()
        (run.node.staging.path / "runs").rename(place.path / "runs")
    folder = place.checkpoint_dir(run.node.run_key, NEW)
    path = folder / ("segment-00001.safetensors" if kind == "segment" else "segment-00001.index")
    good, store = path.read_bytes(), run.content()
    data = DAMAGES[damage](good)
    if data is None and kind == "index":
        path.unlink()  # without its index a segment is debris, not a copy
        assert run.repair().mended == []
        return
    path.unlink() if data is None else path.write_bytes(data)

    assert [one.code for one in run.repair(dry_run=True).mended]
    assert (path.read_bytes() if path.exists() else None) == data
    report = run.repair()

    assert [one.key for one in report.mended] == [str(folder / "segment-00001.safetensors")]
    assert report.left == []
    assert path.read_bytes() == good
    assert run.content() == store
    assert run.repair().mended == []


def test_a_copy_that_the_store_cannot_replace_is_left_for_its_good_chunks(run: Run) -> None:
    path = run.node.staging.segment_path(run.node.run_key, OLD, 1)
    broken = flip(path.read_bytes(), 0)
    path.write_bytes(broken)
    harm(run.store, run.key("segment", OLD), "first bit flipped")
    report = run.repair(OLD)
    assert report.mended == []
    assert {error.code for error in report.left} == {"no-copy", "digest"}
    assert path.read_bytes() == broken


@pytest.mark.fault("Damage", "in the store: manifest", "{damage}", "named; repair changes nothing")
@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "missing"])
def test_a_damaged_manifest_is_named_and_never_made_up(run: Run, damage: str) -> None:
    harm(run.store, manifest_key(NEW), damage)
    damaged = run.content()
    with pytest.raises(CorruptError) as caught:
        load_checkpoint(run.store, NEW)
    assert manifest_key(NEW) in str(caught.value)
    report = run.repair()
    assert (report.mended, len(report.left)) == ([], 1)
    assert run.content() == damaged


def test_a_missing_manifest_is_no_checkpoint(run: Run) -> None:
    harm(run.store, manifest_key(NEW), "missing")
    with pytest.raises(NotFoundError):
        run.repair()
    assert latest(run.store) == OLD


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_pin_counts_by_its_key_alone(run: Run, damage: str) -> None:
    pin(run.store, OLD)
    harm(run.store, pin_key(OLD), damage)
    assert is_pinned(run.store, OLD) == (damage != "missing")


@pytest.mark.fault(
    "Races",
    "a checkpoint is pruned while it is repaired",
    "prune inside the repair's first put",
    "it stays pruned; the newest is whole",
)
def test_a_checkpoint_pruned_during_its_repair_stays_pruned(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm(run.store, run.key("segment", OLD), "first bit flipped")
    execute = run.store.put_parts

    def prune_first(*args: object, **kwargs: object) -> None:
        execute_prune(run.store, plan_deletion(run.store, [OLD]))
        execute(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(run.store, "put_parts", prune_first)
    with pytest.raises(CkptError) as caught:
        run.repair(OLD)
    assert caught.value.code in ("no-checkpoint", "no-copy")
    assert latest(run.store) == NEW
    run.node.check(NEW, run.worlds[NEW])


def test_a_borrowed_object_keeps_what_its_pruned_owner_had_for_others(run: Run) -> None:
    """OLD is pruned, NEW still holds chunks in its object: they come back where NEW's table says."""
    execute_prune(run.store, plan_deletion(run.store, [OLD]))
    held = [info.key for info in run.store.list_keys("data/") if str(OLD) in info.key]
    key = held[-1]
    before = run.content()
    for damage in ("first bit flipped", "cut in half", "missing"):
        harm(run.store, key, damage)
        if verify_deep(load_checkpoint(run.store, NEW)) == []:
            run.store.put(key, before[key])  # the damage was where nobody needs a byte
            continue
        report = run.repair()
        assert [one.key for one in report.mended] == [key]
        run.node.check(NEW, run.worlds[NEW])
        run.store.put(key, before[key])


def test_repair_twice_and_after_a_commit_by_another(run: Run) -> None:
    harm(run.store, run.key("pack"), "missing")
    assert len(run.repair().mended) == 1
    assert run.repair().mended == []
    assert run.node.commit(NEW) is CommitState.ALREADY
