"""Every backend against the store contract."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.clock import SystemClock
from ckpt.digest import digest
from ckpt.errors import CorruptError, NotFoundError
from ckpt.storage.base import HasUploads, ReadsFiles, Store
from ckpt.storage.durable import TEMP_PREFIX
from ckpt.storage.open import open_store
from ckpt.storage.s3fs_store import S3fsStore
from tests.contract.store_contract import ConditionalContract, StoreContract
from tests.support.ceph import Radosgw
from tests.support.s3 import Ministack, Rclone


class TestMemory(ConditionalContract):
    @pytest.fixture
    def reopen(self) -> Callable[[], Store]:
        url = f"memory://{uuid.uuid4().hex}/run"
        return lambda: open_store(url)


class TestLocal(ConditionalContract):
    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: open_store(f"file://{tmp_path}/root/run")

    def test_ST6_a_range_is_read_into_place_exactly_or_is_an_error(self, store: Store) -> None:
        assert isinstance(store, ReadsFiles)
        store.put("k", b"0123456789")
        first, second = bytearray(3), bytearray(4)
        found = store.read_parts("k", 2, [memoryview(first), memoryview(second)])
        assert (bytes(first), bytes(second), found) == (b"234", b"5678", digest(b"2345678"))
        with pytest.raises(CorruptError):
            store.read_parts("k", 4, [memoryview(first), memoryview(second)])
        with pytest.raises(NotFoundError):
            store.read_parts("gone", 0, [memoryview(first)])

    def test_what_crashed_writers_left_is_found_and_removed(self, store: Store, tmp_path: Path) -> None:
        """Case I100."""
        store.put("data/aa/k", b"value")
        left = tmp_path / "root" / "run" / "data" / "aa" / f"{TEMP_PREFIX}0123"
        left.write_bytes(b"half")
        check_uploads(store, 1)
        assert not left.exists()


def check_uploads(store: Store, count: int) -> None:
    """Abort ``count`` unfinished puts, and nothing else."""
    assert isinstance(store, HasUploads)
    keys, later = [info.key for info in store.list_keys("")], SystemClock().now() + 86400
    assert store.abort_uploads(before=SystemClock().now() - 86400, dry_run=False) == 0
    assert store.abort_uploads(before=later, dry_run=True) == count
    assert store.abort_uploads(before=later, dry_run=False) == count
    assert store.abort_uploads(before=later, dry_run=False) == 0
    assert [info.key for info in store.list_keys("")] == keys


class S3fsUploads:
    """For S3 through s3fs."""

    def test_uploads_that_never_ended_are_found_and_aborted(self, store: Store) -> None:
        """Case I100."""
        assert isinstance(store, S3fsStore)
        store.put("data/aa/k", b"value")
        bucket, _, prefix = store.url.removeprefix("fsspec+s3://").removeprefix("s3://").partition("/")
        for key in ("data/aa/k", "data/bb/other", "data/bb/other"):
            store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{key}")
        store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key="root/another-run/k")
        check_uploads(store, 3)


class TestFsspecFile(StoreContract):
    """Any file system that fsspec knows and that has no conditional put."""

    many = 1200

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: open_store(f"fsspec+file://{tmp_path}/root/run")

    def test_the_probe_says_no(self, store: Store) -> None:
        assert store.probe_conditional() is False


class TestObstoreMinistack(ConditionalContract):
    many = 1010

    @pytest.fixture
    def reopen(self, s3_server: Ministack) -> Callable[[], Store]:
        url = f"s3://{s3_server.make_bucket()}/root/run"
        return lambda: open_store(url, s3_server.options)


class TestS3fsMinistack(S3fsUploads, ConditionalContract):
    many = 1010

    @pytest.fixture
    def reopen(self, s3_server: Ministack) -> Callable[[], Store]:
        url = f"fsspec+s3://{s3_server.make_bucket()}/root/run"
        return lambda: open_store(url, s3_server.options)


class TestObstoreRadosgw(ConditionalContract):
    """The real store."""

    @pytest.fixture
    def reopen(self, radosgw: Radosgw) -> Callable[[], Store]:
        url = f"s3://{radosgw.make_bucket()}/root/run"
        return lambda: open_store(url, radosgw.options)


class TestS3fsRadosgwUploads(S3fsUploads):
    @pytest.fixture
    def store(self, radosgw: Radosgw) -> Store:
        return open_store(f"fsspec+s3://{radosgw.make_bucket()}/root/run", radosgw.options)


class TestS3fsRclone(StoreContract):
    """A server that ignores conditional puts; it answers 200 to a range, which obstore refuses."""

    many = 1010

    @pytest.fixture
    def reopen(self, rclone_server: Rclone) -> Callable[[], Store]:
        url = f"fsspec+s3://{rclone_server.make_bucket()}/root/run"
        return lambda: open_store(url, rclone_server.options)

    def test_the_probe_says_no(self, store: Store) -> None:
        assert store.probe_conditional() is False
        assert list(store.list_keys("")) == []
