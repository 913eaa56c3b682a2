"""A range of a file into pieces of memory, whatever their sizes and places."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest

from ckpt.digest import digest
from ckpt.storage.direct import O_DIRECT
from ckpt.storage.scattered import PartsFiller, copy_into, read_parts_at

_NBYTES = (3 << 20) + 517


def _parts(sizes: list[int], shift: int) -> tuple[memoryview, list[memoryview]]:
    """Memory that begins ``shift`` bytes behind a page border, and its parts."""
    whole = memoryview(mmap.mmap(-1, sum(sizes) + 8192))[shift : shift + sum(sizes)]
    parts, at = [], 0
    for size in sizes:
        parts.append(whole[at : at + size])
        at += size
    return whole, parts


@pytest.mark.parametrize("shift", [0, 4, 31, 32, 100])
@pytest.mark.parametrize("sizes", [[_NBYTES - 5], [1, 4096, 70, (2 << 20) + 3, 1 << 19, 5]])
def test_what_is_read_and_its_digest_are_the_file_s(tmp_path: Path, shift: int, sizes: list[int]) -> None:
    content = random.Random(shift).randbytes(_NBYTES)
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        whole, parts = _parts(sizes, shift)
        count, found = read_parts_at(fd, 5, parts)
        wanted = content[5 : 5 + sum(sizes)]
        assert count == len(wanted)
        assert bytes(whole) == wanted
        assert found == digest(wanted)
        _, parts = _parts([_NBYTES, 10], shift)
        assert read_parts_at(fd, 9, parts)[0] == _NBYTES - 9  # short at the end of the file
    finally:
        os.close(fd)


@pytest.mark.parametrize("past", ["the cache", "nothing", "a flag that is refused"])
@pytest.mark.parametrize("kept_nbytes", [0, 1 << 20, (1 << 20) + 8192])
def test_pages_that_are_not_cached_are_read_as_well(tmp_path: Path, kept_nbytes: int, past: str) -> None:
    content = random.Random(7).randbytes(_NBYTES)
    path = tmp_path / "file"
    path.write_bytes(content)
    opened = []

    def past_cache() -> int:
        if past != "the cache":
            raise OSError(errno.EINVAL, "no direct reads here")
        opened.append(os.open(path, os.O_RDONLY | O_DIRECT))
        return opened[-1]

    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # dirty pages cannot be dropped
        for start in (0, 3):
            os.posix_fadvise(fd, kept_nbytes, 0, os.POSIX_FADV_DONTNEED)
            whole, parts = _parts(
                [1000] * 700 + [_NBYTES - 700_000 - start], 64
            )  # more than fit into one call
            found = read_parts_at(fd, start, parts, past_cache=None if past == "nothing" else past_cache)
            assert found == (_NBYTES - start, digest(content[start:]))
            assert bytes(whole) == content[start:]
        os.posix_fadvise(fd, kept_nbytes, 0, os.POSIX_FADV_DONTNEED)
        _, parts = _parts([_NBYTES, 10], 0)
        assert read_parts_at(fd, 9, parts, past_cache=past_cache)[0] == _NBYTES - 9  # short at the end
    finally:
        os.close(fd)
    for direct in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(direct)


def test_what_one_process_alone_wants_does_not_stay_in_the_page_cache(tmp_path: Path) -> None:
    """The path of a restart: the flusher wrote the segment past the cache."""
    path = tmp_path / "file"
    path.write_bytes(bytes(_NBYTES))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        _, parts = _parts([_NBYTES], 64)
        try:
            os.close(os.open(path, os.O_RDONLY | O_DIRECT))
        except OSError:
            pytest.skip("this file system has no direct reads")
        read_parts_at(fd, 0, parts, past_cache=lambda: os.open(path, os.O_RDONLY | O_DIRECT))
        with pytest.raises(BlockingIOError):
            os.preadv(fd, [bytearray(4096)], 1 << 20, os.RWF_NOWAIT)
    finally:
        os.close(fd)


def test_pieces_of_any_size_fill_parts_and_no_more() -> None:
    data = random.Random(1).randbytes(1000)
    whole, parts = _parts([10, 600, 390], 0)
    filler = PartsFiller(parts)
    for at in range(0, 1000, 77):
        filler.feed(data[at : at + 77])
    assert (bytes(whole), filler.nbytes, filler.digest()) == (data, 1000, digest(data))
    with pytest.raises(ValueError, match="more bytes"):
        filler.feed(b"x")
    whole, parts = _parts([1, 999], 3)
    copy_into(parts, data)
    assert bytes(whole) == data
    with pytest.raises(ValueError, match="999"):
        copy_into(parts, data[1:])
