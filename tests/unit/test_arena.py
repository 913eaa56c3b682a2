"""The arena: alignment, sharing, sealing, pre-faulting, growing."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest

from ckpt.errors import InvalidInputError
from ckpt_trainer_hooks import arena as module
from ckpt_trainer_hooks.arena import PAGE_NBYTES, Arena, arena_nbytes


def resident_pages(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512 // PAGE_NBYTES


def test_arena_is_page_aligned_zeroed_writable_and_whole_pages_long() -> None:
    with Arena(5000) as arena:
        assert arena.nbytes == len(arena.view) == 2 * PAGE_NBYTES
        assert arena.address % PAGE_NBYTES == 0
        assert bytes(arena.view) == bytes(arena.nbytes)
        arena.view[4999] = 7
        assert os.pread(arena.fd, 1, 4999) == b"\x07"


def test_arena_cannot_shrink_so_a_reader_never_faults() -> None:
    with Arena(PAGE_NBYTES) as arena:
        assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 0)


def test_prefault_provides_exactly_the_pages_asked_for_and_keeps_content() -> None:
    with Arena(64 * PAGE_NBYTES) as arena:
        assert resident_pages(arena) == 0
        arena.view[3 * PAGE_NBYTES] = 9
        arena.prefault(3 * PAGE_NBYTES + 100, 5 * PAGE_NBYTES + 1)
        assert resident_pages(arena) == 3
        assert arena.view[3 * PAGE_NBYTES] == 9
        arena.prefault_all()
        assert resident_pages(arena) == 64
        assert arena.view[3 * PAGE_NBYTES] == 9


def test_prefault_without_populate_write_allocates_and_keeps_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)  # what a kernel before 5.14 makes of it: EINVAL
    with Arena(64 * PAGE_NBYTES) as arena:
        arena.view[0] = 9
        arena.prefault_all()
        assert resident_pages(arena) == 64
        assert arena.view[0] == 9


def test_prefault_leaves_the_interpreter_to_others() -> None:
    """Case I116."""
    with Arena(256 << 20) as arena:
        turns = 0
        thread = threading.Thread(target=arena.prefault_all)
        thread.start()
        while thread.is_alive():
            turns += 1
        assert turns > 50  # with the GIL held there would be a turn per piece


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, PAGE_NBYTES + 1)])
def test_prefault_refuses_ranges_outside(start: int, stop: int) -> None:
    with Arena(1) as arena, pytest.raises(InvalidInputError):
        arena.prefault(start, stop)


def test_close_during_prefault_is_safe() -> None:
    arena = Arena(256 << 20)
    thread = threading.Thread(target=arena.prefault_all)
    thread.start()
    arena.close()
    thread.join(30)
    assert not thread.is_alive()
    arena.close()
    with pytest.raises(InvalidInputError):
        _ = arena.view


def test_closed_arena_lives_on_in_views_and_in_other_mappings() -> None:
    arena = Arena(PAGE_NBYTES)
    kept = arena.view[:10]
    other = mmap.mmap(arena.fd, PAGE_NBYTES)
    arena.view[0] = 5
    arena.close()
    assert kept[0] == other[0] == 5
    other.close()


def test_tail_lies_behind_the_padded_image() -> None:
    index, layout = b"i" * 5000, b"l" * 300
    with Arena(arena_nbytes(4097, len(index), len(layout))) as arena:
        tail = arena.write_tail(4097, index, layout)
        assert tail.index_offset == 2 * PAGE_NBYTES
        assert bytes(arena.view[tail.index_offset : tail.index_offset + tail.index_nbytes]) == index
        assert bytes(arena.view[tail.layout_offset : tail.layout_offset + tail.layout_nbytes]) == layout


def test_tail_that_does_not_fit_is_refused_and_grow_makes_room() -> None:
    arena = Arena(PAGE_NBYTES)
    with pytest.raises(InvalidInputError) as caught:
        arena.write_tail(PAGE_NBYTES, b"x", b"")
    assert caught.value.code == "arena-too-small"
    with arena.grow(arena_nbytes(PAGE_NBYTES, 1, 0)) as larger:
        assert larger.write_tail(PAGE_NBYTES, b"x", b"").index_offset == PAGE_NBYTES


def test_empty_arena_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        Arena(0)


def test_forked_child_has_no_mapping_of_the_arena() -> None:
    with Arena(PAGE_NBYTES) as arena:
        arena.view[0] = 1
        pid = os.fork()
        if pid == 0:
            held = "ckpt-arena" in Path("/proc/self/maps").read_text()
            os._exit(1 if held else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
