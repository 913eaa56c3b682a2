"""Chunked direct I/O: exact bytes, digests, sizes, fall-back, and errors that stop the work."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.digest import digest
from ckpt.errors import CorruptError, InvalidInputError, NotFoundError
from ckpt.storage import direct
from ckpt.storage.direct import ChunkReader, DirectFile, WriteReport, aligned_buffer, round_up, write_chunks

CHUNK = 64 << 10
SIZES = [0, 1, 4095, 4096, 4097, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 12345]


def write(
    path: Path,
    data: bytes | bytearray | memoryview,
    nbytes: int,
    *,
    threads: int = 2,
    use_direct: bool = True,
) -> WriteReport:
    with DirectFile(path, os.O_RDWR | os.O_CREAT, direct=use_direct) as file:
        return write_chunks(file, data, nbytes, chunk_nbytes=CHUNK, threads=threads)


def aligned(data: bytes) -> memoryview:
    """Return page-aligned memory that holds ``data`` and then something that must not reach the file."""
    buffer = aligned_buffer(round_up(len(data)))
    buffer[: len(data)] = data
    buffer[len(data) :] = b"\xee" * (len(buffer) - len(data))
    return buffer


def check(path: Path, data: bytes, report: WriteReport) -> None:
    assert path.read_bytes() == data
    assert report.digests == b"".join(digest(data[i : i + CHUNK]) for i in range(0, len(data), CHUNK))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_file_holds_exactly_the_bytes_and_every_chunk_is_digested(
    tmp_path: Path, nbytes: int, threads: int
) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    report = write(tmp_path / "file", aligned(data), nbytes, threads=threads)
    check(tmp_path / "file", data, report)


def test_larger_file_from_before_is_overwritten_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old" * CHUNK)
    data = random.Random(1).randbytes(CHUNK + 77)
    check(path, data, write(path, aligned(data), len(data)))


def test_source_that_ends_within_a_block_is_written_whole(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(2 * CHUNK + 77)
    buffer = aligned(data)[: len(data)]
    check(tmp_path / "file", data, write(tmp_path / "file", buffer, len(data)))


def test_unaligned_source_falls_back_to_the_page_cache_and_says_so(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(5 * CHUNK + 77)
    buffer = aligned_buffer(len(data) + 4096)
    buffer[1 : 1 + len(data)] = data
    report = write(tmp_path / "file", buffer[1:], len(data))
    assert not report.direct
    check(tmp_path / "file", data, report)


def test_file_system_that_refuses_direct_io_at_open_is_written_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", refusing_direct(os.open))
    data = random.Random(4).randbytes(3 * CHUNK)
    report = write(tmp_path / "file", aligned(data), len(data))
    assert not report.direct
    check(tmp_path / "file", data, report)


def refusing_direct(real: Callable[..., int]) -> Callable[..., int]:
    def opened(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *rest)

    return opened


def test_file_system_that_refuses_direct_io_at_write_is_written_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def write_refusing(fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write_refusing)
    data = random.Random(5).randbytes(7 * CHUNK + 1)
    report = write(tmp_path / "file", aligned(data), len(data), threads=4)
    assert not report.direct
    check(tmp_path / "file", data, report)


@pytest.mark.parametrize("limit", [4096, 1000, 12288])
def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:limit], offset))
    data = random.Random(6).randbytes(2 * CHUNK + 5)
    check(
        tmp_path / "file", data, write(tmp_path / "file", aligned(data), len(data), use_direct=limit != 1000)
    )


def test_first_error_stops_the_work_and_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "file", aligned(bytes(50 * CHUNK)), 50 * CHUNK)
    assert len(calls) <= 2


def test_room_is_reserved_first_so_that_a_full_disk_shows_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case I125."""

    def refuse(fd: int, nbytes: int) -> int:
        direct.ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(direct, "_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "file", aligned(bytes(CHUNK)), CHUNK)


@pytest.mark.parametrize(
    ("nbytes", "chunk_nbytes", "threads"),
    [(CHUNK + 1, CHUNK, 1), (10, 1000, 1), (10, CHUNK, 0), (-1, CHUNK, 1)],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, nbytes: int, chunk_nbytes: int, threads: int
) -> None:
    with DirectFile(tmp_path / "file", os.O_RDWR | os.O_CREAT) as file, pytest.raises(InvalidInputError):
        write_chunks(file, aligned_buffer(CHUNK), nbytes, chunk_nbytes=chunk_nbytes, threads=threads)


@pytest.mark.parametrize("nbytes", [1, 4096, CHUNK, 2 * CHUNK + 77])
@pytest.mark.parametrize("use_direct", [True, False])
def test_reader_returns_every_chunk(tmp_path: Path, nbytes: int, use_direct: bool) -> None:
    path = tmp_path / "file"
    data = random.Random(nbytes).randbytes(nbytes)
    path.write_bytes(data)
    buffer = aligned_buffer(CHUNK)
    with ChunkReader(path, nbytes=nbytes, chunk_nbytes=CHUNK, direct=use_direct) as reader:
        count = -(-nbytes // CHUNK)
        found = b"".join(bytes(reader.read(chunk, buffer)) for chunk in range(count))
        with pytest.raises(InvalidInputError):
            reader.read(count, buffer)
    assert found == data


def test_reader_refuses_a_file_of_another_size_and_one_cut_while_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(CHUNK))
    with pytest.raises(CorruptError) as caught:
        ChunkReader(path, nbytes=CHUNK + 1, chunk_nbytes=CHUNK)
    assert caught.value.code == "truncated"
    with ChunkReader(path, nbytes=CHUNK, chunk_nbytes=CHUNK) as reader:
        os.truncate(path, 100)
        with pytest.raises(CorruptError):
            reader.read(0, aligned_buffer(CHUNK))
    with pytest.raises(NotFoundError):
        ChunkReader(tmp_path / "absent", nbytes=1, chunk_nbytes=CHUNK)
