"""Chunks that are encrypted before they leave the node: exact with the key, and of no use without it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ckpt.errors import CkptError, CorruptError, InvalidInputError
from ckpt.format.chunks import StoredChunk, stored_chunks
from ckpt.format.crypt import ChunkKey, decrypt_chunk, encrypt_chunk
from ckpt.format.ids import CheckpointId
from ckpt.ops.catalog import load_checkpoint
from ckpt.ops.copies import NodeCopies
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.repair import repair_checkpoint
from ckpt.ops.verify import verify_deep, verify_quick
from ckpt.storage.base import Store
from ckpt.storage.key_source import KeySource, environment_keys
from ckpt.storage.memory import MemoryStore
from tests.support.sealing import World, make_world
from tests.support.uploading import Node, changed

ID, NEXT, LAST = (CheckpointId(step, 1) for step in (10, 20, 30))
OLD = ChunkKey("old", bytes(range(32)))
NEW = ChunkKey("new", bytes(range(32, 64)))


def key_file(folder: Path, *keys: ChunkKey) -> Path:
    path = folder / "keys"
    path.write_text("# name key\n" + "".join(f"{key.name} {key.secret.hex()}\n" for key in keys))
    path.chmod(0o600)
    return path


@pytest.fixture
def world() -> World:
    return make_world()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return MemoryStore(f"memory://{tmp_path.name}/run")


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keys are at hand, as a restoring process has them."""
    monkeypatch.setenv("CKPT_ENCRYPTION_KEYS", str(key_file(tmp_path, OLD, NEW)))


def objects(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list_keys("data/")}


def chunks_of(store: Store, ident: CheckpointId, rank: int = 0) -> list[StoredChunk]:
    return stored_chunks(load_checkpoint(store, ident).segment_index(rank))


@pytest.mark.parametrize("compression", ["off", "on"])
def test_what_is_stored_is_encrypted_and_comes_back(
    tmp_path: Path, store: Store, world: World, compression: str
) -> None:
    node = Node(tmp_path / "node", store, key=OLD)
    node.save(ID, world, wanted=compression)
    node.check(ID, world)
    assert verify_quick(load_checkpoint(store, ID)) == []
    assert {chunk.key for chunk in chunks_of(store, ID)} == {OLD.label}
    rows = [world.tensors["weight"][row].tobytes() for row in (0, 10, 63)]
    for data, row in itertools.product(objects(store).values(), rows):
        assert row not in data
        assert b"safetensors" not in data
        assert b"__metadata__" not in data


def test_unchanged_chunks_are_borrowed_encrypted(tmp_path: Path, store: Store, world: World) -> None:
    node = Node(tmp_path / "node", store, key=OLD)
    node.save(ID, world)
    later = changed(world, range(4), seed=5)
    done = node.save(NEXT, later)
    assert sum(each.borrowed_nbytes for each in done) > 0
    node.check(NEXT, later)
    node.check(ID, world)


@pytest.mark.parametrize(("before", "after"), [(None, OLD), (OLD, NEW), (OLD, None)])
def test_another_key_borrows_nothing(
    tmp_path: Path, store: Store, world: World, before: ChunkKey | None, after: ChunkKey | None
) -> None:
    Node(tmp_path / "before", store, key=before).save(ID, world)
    node = Node(tmp_path / "after", store, key=after)
    done = node.save(NEXT, world)
    assert sum(each.borrowed_nbytes for each in done) == 0
    assert {chunk.key for chunk in chunks_of(store, NEXT)} == {after.label if after else ""}
    node.check(NEXT, world)
    node.check(ID, world)


def test_a_missing_and_a_wrong_key_are_told_apart_from_damage(
    tmp_path: Path, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Node(tmp_path / "node", store, key=OLD).save(ID, world)
    wrong = ChunkKey("old", bytes(32))
    for folder, present in (("a", [NEW]), ("b", [wrong])):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv("CKPT_ENCRYPTION_KEYS", str(key_file(tmp_path / folder, *present)))
        checkpoint = load_checkpoint(store, ID)
        for call in (lambda c: fetch_tensor(c, "weight"), verify_deep):
            with pytest.raises(InvalidInputError) as caught:
                call(checkpoint)
            assert caught.value.code == "encryption-key"
            assert "old" in str(caught.value)
    monkeypatch.delenv("CKPT_ENCRYPTION_KEYS")
    with pytest.raises(InvalidInputError):
        fetch_tensor(load_checkpoint(store, ID), "weight")


def test_a_flipped_bit_is_damage_and_named(tmp_path: Path, store: Store, world: World) -> None:
    Node(tmp_path / "node", store, key=OLD).save(ID, world)
    chunk = chunks_of(store, ID)[1]
    data = bytearray(store.get(chunk.object_key))
    data[chunk.offset + 20] ^= 1
    store.put(chunk.object_key, bytes(data))
    (problem,) = verify_deep(load_checkpoint(store, ID))
    assert problem.code == "decrypt"
    assert problem.context["chunk"] == 1


@pytest.mark.parametrize("compression", ["off", "on"])
def test_a_damaged_chunk_is_put_again_encrypted(
    tmp_path: Path, store: Store, world: World, compression: str
) -> None:
    """From the sealed segment on the node, which is plain."""
    node = Node(tmp_path / "node", store, key=OLD)
    node.save(ID, world, wanted=compression)
    chunk = chunks_of(store, ID)[1]
    data = bytearray(store.get(chunk.object_key))
    data[chunk.offset + 20] ^= 1
    store.put(chunk.object_key, bytes(data))
    repair_checkpoint(store, ID, NodeCopies(node.staging, node.run_key))
    node.check(ID, world)
    assert world.tensors["weight"][10].tobytes() not in store.get(chunk.object_key)


def test_chunks_cannot_change_places(tmp_path: Path, store: Store, world: World) -> None:
    """Within a segment, between ranks, and between checkpoints."""
    node = Node(tmp_path / "node", store, key=OLD)
    node.save(ID, world)
    node.save(NEXT, changed(world, range(64), seed=9))
    first, second = chunks_of(store, ID)[1:3]
    places = [(first, second), (first, chunks_of(store, ID, 1)[1]), (first, chunks_of(store, NEXT)[1])]
    for ours, other in places:
        assert ours.nbytes == other.nbytes
        before = store.get(ours.object_key)
        moved = store.get_range(other.object_key, other.offset, other.nbytes)
        store.put(
            ours.object_key,
            before[: ours.offset] + bytes(moved) + before[ours.offset + ours.nbytes :],
        )
        assert [problem.code for problem in verify_deep(load_checkpoint(store, ID))] == ["decrypt"]
        store.put(ours.object_key, before)
    node.check(ID, world)


def test_everything_that_is_bound_counts() -> None:
    good = StoredChunk(
        object_key="data/00/x", offset=0, nbytes=33, raw_nbytes=5, codec=0, digest=bytes(16), key=OLD.label
    )
    bound = {"run": "run", "object_key": "data/00/x", "codec": 0, "raw_nbytes": 5, "digest": bytes(16)}
    assert decrypt_chunk(OLD, good, encrypt_chunk(OLD, b"hello", **bound), run="run") == b"hello"
    for change in (
        {"run": "other"},
        {"object_key": "data/00/y"},
        {"codec": 1},
        {"raw_nbytes": 6},
        {"digest": b"\1" * 16},
    ):
        with pytest.raises(CorruptError):
            decrypt_chunk(OLD, good, encrypt_chunk(OLD, b"hello", **(bound | change)), run="run")
    for data in (b"", b"short", bytes(27), bytes(100)):
        with pytest.raises(CorruptError):
            decrypt_chunk(OLD, good, data, run="run")


def test_nonces_differ() -> None:
    bound = {"run": "run", "object_key": "x", "codec": 0, "raw_nbytes": 1, "digest": bytes(16)}
    assert len({encrypt_chunk(OLD, b"x", **bound)[:12] for _ in range(1000)}) == 1000


def test_an_upload_that_is_repeated_is_whole(tmp_path: Path, store: Store, world: World) -> None:
    """The note was lost; the object is written again, with other nonces, and the table still fits."""
    node = Node(tmp_path / "node", store, key=OLD)
    node.seal(ID, world)
    node.upload(ID, 0)
    node.staging.uploaded_path(node.run_key, ID, 0).unlink()
    node.upload(ID, 0)
    node.upload(ID, 1)
    node.publish(ID, world)
    node.commit(ID)
    node.check(ID, world)


# --- where keys come from ---


def test_a_command_gives_keys(tmp_path: Path) -> None:
    script = tmp_path / "get-key"
    script.write_text(
        f'#!/bin/sh\n[ "$2" = old ] && echo {OLD.secret.hex()} && exit 0\necho secret; exit 3\n'
    )
    script.chmod(0o700)
    source = KeySource(None, f"{script} --name", "old")
    assert source.writing() == OLD
    assert source.labelled(OLD.label) == OLD
    with pytest.raises(InvalidInputError) as caught:
        source.labelled(NEW.label)
    assert caught.value.context["exit"] == 3
    assert "secret" not in str(caught.value)


def test_without_a_name_nothing_is_encrypted() -> None:
    assert environment_keys({}).writing() is None


@pytest.mark.parametrize(
    "text", ["old", "old xyz", f"old {'0' * 63}", f"a {'0' * 64}\na {'1' * 64}", "a b c"]
)
def test_malformed_key_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InvalidInputError):
        KeySource(path, None, None)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, OLD)
    path.chmod(0o640)
    with pytest.raises(InvalidInputError):
        KeySource(path, None, None)


@pytest.mark.parametrize("name", ["", "#", "../x", "-rf", "a b", "a\n"])
def test_names_that_are_no_names(tmp_path: Path, name: str) -> None:
    """A label comes from the store, and the name in it becomes an argument of the command."""
    with pytest.raises(CkptError):
        KeySource(None, "/bin/echo", None).labelled(f"{name}#{'0' * 16}")


def test_secrets_are_not_shown() -> None:
    assert OLD.secret.hex() not in repr(OLD)
    assert repr(OLD.secret) not in repr(OLD)
