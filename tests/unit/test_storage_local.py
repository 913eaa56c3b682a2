"""Durable writes and what only the directory store does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.errors import ConflictError, InvalidInputError, NotFoundError, UnavailableError
from ckpt.storage.base import ObjectInfo
from ckpt.storage.durable import TEMP_PREFIX, write_durably
from ckpt.storage.local import LocalStore
from ckpt.storage.open import open_store

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_durably_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_durably(tmp_path / "f", b"one")
    write_durably(tmp_path / "f", memoryview(b"two"))
    assert (tmp_path / "f").read_bytes() == b"two"
    assert names(tmp_path) == ["f"]


def test_write_durably_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        write_durably(tmp_path / "missing" / "f", b"")
    (tmp_path / "f").mkdir()
    with pytest.raises(UnavailableError):
        write_durably(tmp_path / "f", b"")
    assert names(tmp_path) == ["f"]


def test_a_write_that_fails_in_the_middle_keeps_the_old_file(tmp_path: Path) -> None:
    """Case I05."""
    write_durably(tmp_path / "f", b"old")
    # A file size limit stands in for a full disk: both fail in the middle of a write.
    program = f"""
import resource, signal
from ckpt.errors import UnavailableError
from ckpt.storage.durable import write_durably
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_durably({str(tmp_path / "f")!r}, bytes(4 << 20))
except UnavailableError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "refused\n", done.stderr
    assert (tmp_path / "f").read_bytes() == b"old"
    assert names(tmp_path) == ["f"]


def test_a_killed_writer_leaves_whole_values_and_no_listed_rest(tmp_path: Path) -> None:
    """Case I05."""
    program = f"""
import sys
from ckpt.storage.open import open_store
store = open_store("file://{tmp_path}/run")
number = 0
while True:
    store.put_new(f"k/{{number:06d}}", bytes([number % 256]) * 300_000)
    print(number, flush=True)
    number += 1
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    acknowledged = -1
    for line in process.stdout:
        acknowledged = int(line)
        if acknowledged == 20:
            process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.stdout.close()
    store = open_store(f"file://{tmp_path}/run")
    keys = [info.key for info in store.list_keys("")]
    assert acknowledged + 1 <= len(keys) <= acknowledged + 2
    for number, key in enumerate(keys):
        assert store.get(key) == bytes([number % 256]) * 300_000


def test_unfinished_files_are_not_listed_and_their_names_are_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    (tmp_path / f"{TEMP_PREFIX}123").write_bytes(b"half")
    assert [info.key for info in store.list_keys("")] == ["a"]
    for key in (
        f"{TEMP_PREFIX}x",
        f"d/{TEMP_PREFIX}x",
        "../a",
        "a/../b",
        "/a",
        "a//b",
        "",
        "a/",
        "a\0b",
        ".",
    ):
        with pytest.raises(InvalidInputError):
            store.put(key, b"")


def test_a_listing_stats_only_what_it_yields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for number in range(50):
        store.put(f"m/{number:03d}", b"")
    asked: list[str] = []
    head = LocalStore._head

    def counted(self: LocalStore, key: str) -> ObjectInfo:
        asked.append(key)
        return head(self, key)

    monkeypatch.setattr(LocalStore, "_head", counted)
    assert [info.key for info in store.list_keys("m/", limit=2)] == ["m/000", "m/001"]
    assert asked == ["m/000", "m/001"]


def test_empty_folders_go_with_their_last_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.put("data/1/a", b"")
    store.put("data/2/b", b"")
    store.delete(["data/1/a"])
    assert names(tmp_path / "run" / "data") == ["2"]
    store.delete(["data/2/b"])
    assert names(tmp_path / "run") == []


def test_what_a_crashed_writer_left_goes_with_the_last_object_once_it_is_old(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for folder, age_s in (("old", 4000), ("new", 10)):
        store.put(f"{folder}/a", b"")
        store.put(f"{folder}/b", b"")
        rest = tmp_path / folder / f"{TEMP_PREFIX}1"
        rest.write_bytes(b"half")
        modified = rest.stat().st_mtime - age_s
        os.utime(rest, (modified, modified))
    store.delete(["old/a", "new/a"])
    assert names(tmp_path / "old") == [f"{TEMP_PREFIX}1", "b"]
    store.delete(["old/b", "new/b"])
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == [f"{TEMP_PREFIX}1"]


def test_puts_survive_deletes_that_remove_their_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            store.put("d/e/other", b"")
            store.delete(["d/e/other"])

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(churn)
        try:
            for number in range(60):
                store.put(f"d/e/{number}", b"v")
                assert store.get(f"d/e/{number}") == b"v"
                store.delete([f"d/e/{number}"])
        finally:
            stop.set()
        other.result()


def test_a_folder_that_another_process_made_and_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_mkdir, calls = os.mkdir, []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        calls.append(path)
        if len(calls) == 1:  # at the system call it existed; just after it does not
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        real_mkdir(path, mode)

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "mkdir", mkdir)
    store.put("d/key", b"v")
    assert store.get("d/key") == b"v"
    assert calls == [tmp_path / "d"] * 2


def test_a_link_to_nowhere_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match="a file is where a directory is needed"):
        LocalStore(tmp_path).put("d/key", b"v")


def test_without_hard_links_the_probe_says_so_and_put_new_still_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(self: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    store = LocalStore(tmp_path)
    assert store.probe_conditional() is False
    store.put_new("k", b"1")
    with pytest.raises(ConflictError):
        store.put_new("k", b"2")
    assert store.get("k") == b"1"


def test_a_key_that_is_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"")
    with pytest.raises(InvalidInputError):
        store.put("a", b"")
    with pytest.raises(InvalidInputError):
        store.put("a/b/c", b"")
    assert [info.key for info in store.list_keys("")] == ["a/b"]


def test_an_unreadable_folder_is_no_empty_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"")

    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UnavailableError) as caught:
        list(store.list_keys(""))
    assert caught.value.code == "denied"
