"""Logs that bound themselves when they are opened."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckpt.storage.logfile import LOG_MOST_NBYTES, open_log


def test_a_log_is_appended_to_until_it_is_large(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    for _ in range(2):
        with open_log(path) as log:
            log.write(b"line\n")
    assert path.read_bytes() == b"line\nline\n"
    with path.open("ab") as log:
        log.truncate(LOG_MOST_NBYTES)
    open_log(path).close()
    assert not path.with_name("server.log.1").exists()


def test_a_large_log_is_put_aside_once_and_the_one_before_goes(tmp_path: Path) -> None:
    path = tmp_path / "flusher.log"
    aside = tmp_path / "flusher.log.1"
    aside.write_bytes(b"oldest")
    path.write_bytes(b"old")
    with path.open("r+b") as log:
        log.truncate(LOG_MOST_NBYTES + 1)
    barrier = threading.Barrier(16)

    def start(number: int) -> None:
        barrier.wait()
        with open_log(path) as log:
            log.write(b"%d\n" % number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(start, range(16)))
    assert aside.read_bytes()[:3] == b"old"
    assert aside.stat().st_size == LOG_MOST_NBYTES + 1
    assert sorted(map(int, path.read_bytes().split())) == list(range(16))
    assert sorted(tmp_path.iterdir()) == [path, aside]
