"""Reading while others delete or damage: an error that says so, never a half-read result."""

from __future__ import annotations

import pytest

from ckpt.errors import CorruptError
from ckpt.format.keys import segment_key
from ckpt.ops import catalog
from ckpt.ops.fetch import fetch_tensor
from ckpt.ops.prune import execute_prune, plan_retention
from tests.support.builders import build_checkpoint, claim, memory_store


def test_I57_a_reader_of_a_checkpoint_that_is_pruned_meanwhile_gets_an_error() -> None:
    store = memory_store()
    claim(store)
    old = build_checkpoint(store, 20, world_size=3)
    build_checkpoint(store, 30, world_size=3)
    reader = catalog.load_checkpoint(store, old.ident)  # has begun: manifest and layouts are read
    execute_prune(store, plan_retention(store, keep_last=1))
    for name in reader.layouts:
        with pytest.raises(CorruptError) as caught:
            fetch_tensor(reader, name)
        assert caught.value.code == "missing"


def test_I57_and_one_that_has_the_indexes_already_too() -> None:
    store = memory_store()
    claim(store)
    built = build_checkpoint(store, 20, world_size=2)
    reader = catalog.load_checkpoint(store, built.ident)
    name = max(reader.layouts, key=lambda item: reader.layouts[item].nbytes)
    fetch_tensor(reader, name)  # indexes are remembered now
    store.delete([segment_key(built.ident, rank) for rank in range(2)])
    with pytest.raises(CorruptError) as caught:
        fetch_tensor(reader, name)
    assert caught.value.code == "missing"
