"""A crash of the real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt.errors import ConflictError, UnavailableError
from ckpt.storage.conditional import commit_put
from ckpt.storage.open import open_store
from tests.support.ceph import Radosgw, install


@pytest.fixture
def durable_radosgw(radosgw: Radosgw) -> Iterator[Radosgw]:
    """A gateway of our own that keeps its data; the shared one has shown that this machine can run one."""
    gateway = Radosgw(install(), store="bluestore").start()
    yield gateway
    gateway.stop()


@pytest.mark.slow
def test_what_the_store_acknowledged_survives_its_crash(durable_radosgw: Radosgw) -> None:
    store = open_store(
        f"s3://{durable_radosgw.make_bucket()}/run", durable_radosgw.options | {"retries": "1"}
    )
    for number in range(20):
        store.put(f"k{number:02d}", bytes([number]) * 10_000)
    data = bytes(range(256)) * 50_000
    store.put_parts("big", [data], most_nbytes=len(data), part_nbytes=5 << 20, concurrency=2)
    assert commit_put(store, "manifest", b"by one", b"one")
    durable_radosgw.kill()
    with pytest.raises(UnavailableError):
        store.get("manifest")
    durable_radosgw.restart()
    assert [info.key for info in store.list_keys("k")] == [f"k{number:02d}" for number in range(20)]
    assert [store.get(f"k{number:02d}") for number in range(20)] == [bytes([n]) * 10_000 for n in range(20)]
    assert store.get("big") == data
    assert not commit_put(store, "manifest", b"by two", b"two")
    with pytest.raises(ConflictError):
        store.put_new("manifest", b"")
