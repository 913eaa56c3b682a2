"""The store contract (ckpt/storage/base.py, ST1-ST8) as tests that every backend runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.digest import Buffer
from ckpt.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError
from ckpt.storage.base import Store

__all__ = ["ConditionalContract", "StoreContract"]

MIB = 1 << 20


def keys_of(store: Store, prefix: str = "", limit: int | None = None) -> list[str]:
    return [info.key for info in store.list_keys(prefix, limit=limit)]


def put_parts(
    store: Store, key: str, pieces: Iterable[Buffer], *, most_nbytes: int, part_nbytes: int
) -> None:
    store.put_parts(key, pieces, most_nbytes=most_nbytes, part_nbytes=part_nbytes, concurrency=2)


class StoreContract:
    """Subclasses provide the fixtures ``reopen`` (opens the same, at first empty store again) and ``store``.

    Attributes:
        many: objects in the paging test; more than a page of the service.
        part_nbytes: the smallest part the service takes.
    """

    many = 2500
    part_nbytes = 5 * MIB

    @pytest.fixture
    def store(self, reopen: Callable[[], Store]) -> Store:
        return reopen()

    def test_ST1_a_reader_sees_old_or_new_but_no_mixture(self, store: Store) -> None:
        store.put("k", bytes([0]) * MIB)
        done = threading.Event()

        def read() -> list[bool]:
            whole = []
            while not done.is_set():
                value = store.get("k")
                whole.append(len(value) == MIB == value.count(value[:1]))
            return whole

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                for value in range(1, 12):
                    store.put("k", bytes([value]) * MIB)
            finally:
                done.set()
            seen = reader.result()
        assert seen
        assert all(seen)

    def test_ST2_a_value_is_there_for_a_store_opened_later(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        store.put("put", b"1")
        store.put_new("new", b"2")
        store.put_parts("parts", [b"3"], most_nbytes=1, part_nbytes=self.part_nbytes, concurrency=1)
        store.close()
        later = reopen()
        assert [later.get(key) for key in ("put", "new", "parts")] == [b"1", b"2", b"3"]

    def test_ST2_a_store_that_is_open_sees_what_others_do(
        self, store: Store, reopen: Callable[[], Store]
    ) -> None:
        """Case I91."""
        writer = reopen()
        writer.put("a/1", b"1")
        assert keys_of(store) == ["a/1"]  # whatever it may remember, it remembers now
        assert list(store.list_dirs("")) == ["a"]
        assert store.head("a/1").nbytes == 1
        with pytest.raises(NotFoundError):
            store.head("a/2")
        writer.put("a/2", b"two")
        writer.put("b/3", b"3")
        writer.put("a/1", b"another")
        assert (store.get("a/2"), store.head("a/2").nbytes, store.head("a/1").nbytes) == (b"two", 3, 7)
        assert keys_of(store) == ["a/1", "a/2", "b/3"]
        assert list(store.list_dirs("")) == ["a", "b"]
        writer.delete(["a/1", "a/2"])
        assert keys_of(store) == ["b/3"]
        assert "b" in store.list_dirs("")  # what a file system keeps of "a" is its own affair
        for gone in (store.get, store.head):
            with pytest.raises(NotFoundError):
                gone("a/2")
        writer.close()

    def test_ST3_put_new_refuses_an_existing_key_and_leaves_it(self, store: Store) -> None:
        store.put_new("a/k", b"first")
        with pytest.raises(ConflictError):
            store.put_new("a/k", b"second")
        assert store.get("a/k") == b"first"

    def test_ST4_a_listing_is_in_byte_order_of_whole_keys(self, store: Store) -> None:
        # '-' and '.' sort before '/', '0' after it: a walk by folders gets this wrong.
        keys = ["a-b", "a.b", "a/b", "a/b.c", "a/b0/c", "a0", "aZ", "b/\u00fc", "b/\U0001f600", "z"]
        for key in reversed(keys):
            store.put(key, key.encode())
        assert keys_of(store) == keys
        assert keys_of(store, "a/") == ["a/b", "a/b.c", "a/b0/c"]
        assert keys_of(store, "a/b") == ["a/b", "a/b.c", "a/b0/c"]
        assert keys_of(store, "a/b0") == ["a/b0/c"]
        assert keys_of(store, "a") == keys[:7]
        assert keys_of(store, "b/\u00fc") == ["b/\u00fc"]
        assert keys_of(store, "a/", limit=2) == ["a/b", "a/b.c"]
        assert keys_of(store, "", limit=0) == []
        assert keys_of(store, "nothing/here/") == []

    def test_ST4_a_listing_tells_size_and_time(self, store: Store) -> None:
        store.put("k", b"12345")
        [info] = store.list_keys("k")
        assert (info.key, info.nbytes) == ("k", 5)
        assert info.modified_at > 1.6e9
        assert store.head("k").nbytes == 5

    def test_ST4_ST8_many_objects_and_folders_are_all_listed_and_all_deleted(self, store: Store) -> None:
        """Case I101."""
        keys = [f"many/{number:05d}/k" for number in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        store.put("other", b"")
        assert keys_of(store, "many/") == keys
        assert keys_of(store, "many/", limit=3) == keys[:3]
        assert keys_of(store, "many/", limit=1001) == keys[:1001]
        assert list(store.list_dirs("many/")) == [key.split("/")[1] for key in keys]
        store.delete(keys)
        assert keys_of(store) == ["other"]

    def test_ST8_folders_are_listed_without_what_is_below_them(self, store: Store) -> None:
        for key in ("file", "a.b/k", "a/k", "a/b/c/deep", "a/b/d", "a-b/k", "a0", "\u00fc x/k", "b%20/k"):
            store.put(key, b"")
        assert list(store.list_dirs("")) == ["a-b", "a.b", "a", "b%20", "\u00fc x"]
        assert list(store.list_dirs("a/")) == ["b"]
        assert list(store.list_dirs("a/b/")) == ["c"]
        assert list(store.list_dirs("a/b/c/")) == []
        assert list(store.list_dirs("nothing/here/")) == []

    def test_ST5_absence_is_not_found(self, store: Store) -> None:
        store.put("a/b", b"")
        for key in ("nope", "a", "a/b/c"):
            with pytest.raises(NotFoundError):
                store.get(key)
            with pytest.raises(NotFoundError):
                store.head(key)
            with pytest.raises(NotFoundError):
                store.get_range(key, 0, 1)
        store.delete(["nope", "a/nope"])
        store.delete([])

    def test_ST5_deleted_is_absent(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete(["a/b"])
        with pytest.raises(NotFoundError):
            store.get("a/b")
        store.put_new("a/b", b"2")
        assert store.get("a/b") == b"2"

    def test_ST6_a_range_is_exact_or_an_error(self, store: Store) -> None:
        store.put("k", b"0123456789")
        assert bytes(store.get_range("k", 0, 10)) == b"0123456789"
        assert bytes(store.get_range("k", 3, 4)) == b"3456"
        assert bytes(store.get_range("k", 9, 1)) == b"9"
        assert bytes(store.get_range("k", 10, 0)) == b""
        for start, nbytes in ((0, 11), (9, 2), (10, 1), (50, 5), (11, 0)):
            with pytest.raises(CorruptError) as caught:
                store.get_range("k", start, nbytes)
            assert caught.value.code == "short-object"

    @pytest.mark.parametrize("extra", [-1, 0, 1, 6 * MIB])
    def test_put_parts_keeps_every_byte(self, store: Store, extra: int) -> None:
        data = bytearray(self.part_nbytes + extra)
        for start in range(0, len(data), 4096):
            data[start : start + 8] = start.to_bytes(8, "little")
        data[-1] = 7
        view = memoryview(data)
        pieces = (view[start : start + 3 * MIB + 5] for start in range(0, len(view), 3 * MIB + 5))
        put_parts(store, "big", pieces, most_nbytes=len(data) + 1000, part_nbytes=self.part_nbytes)
        assert store.get("big") == data
        assert bytes(store.get_range("big", self.part_nbytes - 3, 2)) == data[-3 - extra :][:2]

    @pytest.mark.parametrize("size", [0, 1])
    def test_put_parts_takes_nearly_nothing(self, store: Store, size: int) -> None:
        put_parts(store, "small", [bytes(size)], most_nbytes=size, part_nbytes=self.part_nbytes)
        put_parts(store, "less", [b"", bytes(size)], most_nbytes=99 * MIB, part_nbytes=self.part_nbytes)
        assert store.get("small") == store.get("less") == bytes(size)
        put_parts(store, "none", [], most_nbytes=99 * MIB, part_nbytes=self.part_nbytes)
        assert store.get("none") == b""

    @pytest.mark.parametrize("good", [0, 1, 3])
    def test_a_value_whose_pieces_fail_is_not_stored(self, store: Store, good: int) -> None:
        def pieces() -> Iterator[bytes]:
            for _ in range(good):
                yield bytes(self.part_nbytes)
            raise CorruptError("damaged", code="digest")

        store.put("old", b"old")
        for key in ("new", "old"):
            with pytest.raises(CorruptError) as caught:
                put_parts(store, key, pieces(), most_nbytes=99 * MIB, part_nbytes=self.part_nbytes)
            assert caught.value.code == "digest"
        assert store.get("old") == b"old"
        with pytest.raises(NotFoundError):
            store.head("new")
        assert keys_of(store) == ["old"]

    def test_put_takes_any_buffer(self, store: Store) -> None:
        values: tuple[Buffer, ...] = (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4])
        for number, data in enumerate(values):
            store.put(f"k{number}", data)
            assert store.get(f"k{number}") == b"abc"

    @pytest.mark.parametrize("key", ["a b", "a%20b", "a+b&c=d", "\u00e4/\u4f60\u597d", "a#b?c", "dot.s/..x"])
    def test_keys_come_back_as_they_went(self, store: Store, key: str) -> None:
        store.put(key, b"v")
        assert keys_of(store) == [key]
        assert store.get(key) == b"v"
        store.delete([key])
        assert keys_of(store) == []

    def test_ST7_threads_share_a_store(self, store: Store) -> None:
        def work(number: int) -> bool:
            key, data = f"t/{number}", number.to_bytes(4, "little") * 5000
            store.put(key, data)
            return store.get(key) == data and bytes(store.get_range(key, 4, 4)) == data[:4]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(48)))

    def test_a_bad_range_is_refused(self, store: Store) -> None:
        store.put("k", b"0")
        for start, nbytes in ((-1, 1), (0, -1)):
            with pytest.raises(InvalidInputError):
                store.get_range("k", start, nbytes)


class ConditionalContract(StoreContract):
    """For backends that promise create-if-absent."""

    def test_ST3_of_eight_racers_one_wins(self, store: Store) -> None:
        assert store.probe_conditional()
        for number in range(6):
            key, barrier = f"race/{number}", threading.Barrier(8)

            def race(racer: int, key: str = key, barrier: threading.Barrier = barrier) -> int | None:
                barrier.wait()
                try:
                    store.put_new(key, bytes([racer]))
                except ConflictError:
                    return None
                return racer

            with ThreadPoolExecutor(8) as pool:
                winners = [racer for racer in pool.map(race, range(8)) if racer is not None]
            assert len(winners) == 1
            assert store.get(key) == bytes(winners)

    def test_the_probe_leaves_nothing_behind(self, store: Store) -> None:
        assert store.probe_conditional()
        assert keys_of(store) == []
