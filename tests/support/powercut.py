"""What a disk may hold after a power cut: from the system calls of a process, every state that was possible.

The model is what POSIX promises and no more, which covers what ext4 and XFS do, delayed allocation and
journal order included:

- written data is durable from the next fsync or fdatasync of that file on; before it may be all there, not
  there at all (an empty file), there as zeros of the right length, or there in its first half;
- a change of a directory (create, link, rename, remove) is durable from the next fsync of that directory on;
  before, any subset of the changes may have reached the disk, in any directory, whatever their order was;
  a rename within a directory is one change, a rename between two is two.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.format.ids import CheckpointId

__all__ = ["Disk", "State", "record", "states"]

_TRACED = "openat,creat,write,pwrite64,ftruncate,fallocate,fsync,fdatasync,mkdir,rename,renameat,renameat2"
_TRACED += ",link,linkat,unlink,unlinkat,rmdir,close"
_CALL = re.compile(rb"^(\d+) +(\w+)\((.*)\) += (-?\d+)(.*)$", re.DOTALL)
_CUT_OFF = re.compile(rb"^(\d+) +(.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(rb"^(\d+) +<\.\.\. \w+ resumed>(.*)$", re.DOTALL)
_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_FD = re.compile(rb"^(?:AT_FDCWD|\d+)<([^>]*)>")
_SAID = re.compile(r"^([a-z]+) (\d{12}\.a\d{6})$", re.MULTILINE)
_MOST_SUBSETS = 4  # changes that are pending at once of which every subset is tried; of more, a sample

Call = tuple[str, list[bytes], bytes, int]  # name, strings, all arguments, result


def record(argv: list[str], log: Path, *, cwd: Path) -> list[Call]:
    """Run a command under strace and return its calls that change files, in order."""
    traced = ["strace", "-f", "-qq", "-y", "--seccomp-bpf", "-s", "1000000", "-e", f"trace={_TRACED}"]
    traced += ["-e", "signal=none", "-o", str(log)]
    subprocess.run([*traced, *argv], check=True, cwd=cwd, stdout=subprocess.PIPE)
    return list(_calls(log.read_bytes().splitlines()))


def _calls(lines: Iterable[bytes]) -> Iterator[Call]:
    begun: dict[bytes, bytes] = {}
    for line in lines:
        if match := _CUT_OFF.match(line):
            begun[match[1]] = match[2]
            continue
        if match := _RESUMED.match(line):
            line = match[1] + b" " + begun.pop(match[1]) + match[2]
        if (match := _CALL.match(line)) and int(match[4]) >= 0:
            strings = [codecs.escape_decode(text)[0] for text in _STRING.findall(match[3])]
            rest = match[3] if match[2] != b"openat" else match[3] + b" = " + match[4] + match[5]
            yield match[2].decode(), strings, rest, int(match[4])


@dataclass(slots=True)
class _File:
    """An inode: what is on disk for certain, and what has been written since."""

    durable: bytes = b""
    now: bytes = b""
    is_dir: bool = False

    @property
    def is_clean(self) -> bool:
        return self.durable == self.now


Change = tuple[tuple[str, int | None], ...]  # of one directory: (name, inode; None: removed)


@dataclass(slots=True)
class _Folder:
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    now: dict[str, int] = field(default_factory=dict)

    def change(self, *entries: tuple[str, int | None]) -> None:
        self.pending.append(entries)
        _apply(self.now, entries)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []


def _apply(entries: dict[str, int], change: Change) -> None:
    for name, inode in change:
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


class Disk:
    """The files below ``root`` as calls change them.

    Attributes:
        said: (what, id) that the process has printed until now.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, _File] = {0: _File(is_dir=True)}
        self.folders: dict[int, _Folder] = {0: _Folder()}
        self.said: list[tuple[str, CheckpointId]] = []
        self._at: dict[int, int] = {}  # descriptor -> offset of the next write

    def _walk(self, path: str) -> tuple[int, str] | None:
        """(Folder that holds it, name), or None where it is not below the root."""
        try:
            parts = Path(path).relative_to(self.root).parts
        except ValueError:
            return None
        folder = 0
        for part in parts[:-1]:
            folder = self.folders[folder].now[part]
        return folder, parts[-1] if parts else ""

    def _inode(self, path: str) -> int | None:
        found = self._walk(path)
        if found is None:
            return None
        folder, name = found
        return folder if not name else self.folders[folder].now.get(name)

    def _set(self, path: str, inode: int | None) -> None:
        found = self._walk(path)
        if found is not None:
            self.folders[found[0]].change((found[1], inode))

    def _new(self, path: str, *, is_dir: bool = False) -> int | None:
        if self._walk(path) is None or not Path(path).relative_to(self.root).parts:
            return None
        inode = len(self.files)
        self.files[inode] = _File(is_dir=is_dir)
        if is_dir:
            self.folders[inode] = _Folder()
        self._set(path, inode)
        return inode

    def apply(self, call: Call) -> None:
        """Do what the call did."""
        name, strings, rest, result = call
        texts = [text.decode(errors="replace") for text in strings]
        at = _FD.match(rest)
        path = at[1].decode(errors="replace") if at else ""
        if (
            name == "write"
            and strings
            and re.match(rb"\d+<(pipe|/dev/null)", rest)
            and rest.startswith(b"1<")
        ):
            self._hear(texts[0])
        elif name == "openat":
            self._open(texts[0] if texts[0].startswith("/") else f"{path}/{texts[0]}", rest, result)
        elif name in ("write", "pwrite64", "ftruncate", "fallocate", "fsync", "fdatasync"):
            inode = self._inode(path)
            if inode is not None:
                self._change_file(name, inode, strings, rest, result)
        elif name == "mkdir":
            self._new(texts[0], is_dir=True)
        elif name.startswith("rename"):
            self._rename(*texts)
        elif name.startswith("link"):
            inode = self._inode(texts[0])
            if inode is not None:
                self._set(texts[1], inode)
        elif name.startswith("unlink") or name == "rmdir":
            target = texts[0] if texts[0].startswith("/") else f"{path}/{texts[0]}"
            if self._inode(target) is not None:
                self._set(target, None)

    def _hear(self, text: str) -> None:
        for what, ident in _SAID.findall(text):  # what helper processes write to pipes is something else
            self.said.append((what, CheckpointId.parse(ident)))

    def _open(self, path: str, rest: bytes, fd: int) -> None:
        self._at[fd] = 0
        if self._walk(path) is None:
            return
        inode = self._inode(path)
        if inode is None and b"O_CREAT" in rest:
            inode = self._new(path)
        if inode is not None and b"O_TRUNC" in rest:
            self.files[inode].now = b""

    def _change_file(self, name: str, inode: int, strings: list[bytes], rest: bytes, result: int) -> None:
        file = self.files[inode]
        if name in ("fsync", "fdatasync"):
            file.durable = file.now
            if file.is_dir:
                self.folders[inode].sync()
            return
        numbers = [int(text) for text in re.findall(rb", (\d+)(?=,|$)", _STRING.sub(b"", rest))]
        if name in ("ftruncate", "fallocate"):
            length = numbers[-1]
            kept = file.now[:length] if name == "ftruncate" else file.now
            file.now = kept + bytes(max(0, length - len(kept)))
            return
        fd = int(rest.split(b"<")[0])
        start = numbers[-1] if name == "pwrite64" else self._at.get(fd, 0)
        if name == "write":
            self._at[fd] = start + result
        before = file.now[:start] + bytes(max(0, start - len(file.now)))
        file.now = before + strings[-1][:result] + file.now[start + result :]

    def _rename(self, old: str, new: str) -> None:
        source, target = self._walk(old), self._walk(new)
        inode = self._inode(old)
        if source is None or target is None or inode is None:
            return
        if source[0] == target[0]:
            self.folders[source[0]].change((source[1], None), (target[1], inode))
        else:
            self.folders[source[0]].change((source[1], None))
            self.folders[target[0]].change((target[1], inode))


@dataclass(frozen=True, slots=True)
class State:
    """What the disk may hold after a cut.

    Attributes:
        tree: path below the root -> content; None: a directory.
        said: what had been promised by then.
    """

    tree: Mapping[str, bytes | None]
    said: tuple[tuple[str, CheckpointId], ...]

    @property
    def key(self) -> int:
        """Equal for equal states."""
        return hash((frozenset(self.tree.items()), self.said))

    def write(self, root: Path) -> None:
        """Make ``root`` hold exactly this."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path in sorted(self.tree):
            content = self.tree[path]
            if content is None:
                (root / path).mkdir(mode=0o700)
            else:
                (root / path).write_bytes(content)


def states(calls: list[Call], root: Path, dice: random.Random) -> Iterator[State]:
    """Yield every state that a power cut may leave: between any two calls, each once.

    A cut later than just before a sync only adds what a subset of the changes of a cut there has as well; so
    it is enough to cut before each sync, before each promise, and at the end.
    """
    disk = Disk(root)
    seen: set[int] = set()
    for call in [*calls, ("fsync", [], b"", 0)]:
        if call[0] in ("fsync", "fdatasync") or (call[0] == "write" and call[2].startswith(b"1<")):
            for state in _cut(disk, dice):
                if state.key not in seen:
                    seen.add(state.key)
                    yield state
        disk.apply(call)


def _cut(disk: Disk, dice: random.Random) -> Iterator[State]:
    pending = [(inode, i) for inode, folder in disk.folders.items() for i in range(len(folder.pending))]
    dirty = any(not file.is_clean for file in disk.files.values())
    for chosen in _subsets(pending, dice):
        for torn in ("all", "nothing", "zeros", "half") if dirty else ("all",):
            tree: dict[str, bytes | None] = {}
            _grow(disk, 0, "", set(chosen), torn, tree)
            yield State(tree, tuple(disk.said))


def _subsets(pending: list[tuple[int, int]], dice: random.Random) -> Iterator[tuple[tuple[int, int], ...]]:
    if len(pending) <= _MOST_SUBSETS:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    yield ()
    yield tuple(pending)
    for one in pending:  # each alone, and all but each
        yield (one,)
        yield tuple(other for other in pending if other != one)
    for _ in range(8):
        yield tuple(one for one in pending if dice.random() < 0.5)


def _grow(
    disk: Disk, inode: int, path: str, chosen: set[tuple[int, int]], torn: str, tree: dict[str, bytes | None]
) -> None:
    folder = disk.folders[inode]
    entries = dict(folder.durable)
    for i, change in enumerate(folder.pending):
        if (inode, i) in chosen:
            _apply(entries, change)
    for name, child in entries.items():
        below = f"{path}/{name}" if path else name
        if disk.files[child].is_dir:
            tree[below] = None
            _grow(disk, child, below, chosen, torn, tree)
        else:
            tree[below] = _content(disk.files[child], torn)


def _content(file: _File, torn: str) -> bytes:
    return file.now if torn == "all" else _torn(file.durable, file.now, torn)


@functools.cache
def _torn(durable: bytes, now: bytes, torn: str) -> bytes:
    if torn == "nothing" or durable == now:
        return durable
    half = len(now) // 2 if torn == "half" else 0
    old = durable[half : len(now)]
    return now[:half] + old + bytes(len(now) - half - len(old))
