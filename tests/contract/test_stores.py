"""Every backend against the store contract."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.storage.base import Store
from ckpt.storage.open import open_store
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


class TestS3fsMinistack(ConditionalContract):
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
