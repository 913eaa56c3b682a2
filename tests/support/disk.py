"""A real ext4 of its own, in a file behind a loop device: it can be filled, become read-only, and go away."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Disk", "DiskUnavailableHere"]

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_BALLAST = "ballast"


class DiskUnavailableHere(Exception):
    """This machine gives us no loop device; the text says why, in one line."""


class Disk:
    """Mounted at ``path``.

    Args:
        folder: holds the image and the mount point; made here.
        nbytes: of the image.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.path = folder / "disk"
        self._image = folder / "image"
        self.path.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(nbytes)
        self._run("mkfs.ext4", "-q", "-F", "-N", "1024", str(self._image))

    @classmethod
    @contextmanager
    def mounted(cls, folder: Path, nbytes: int = 256 << 20) -> Iterator[Disk]:
        """Raises DiskUnavailableHere."""
        if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
            raise DiskUnavailableHere("mounting a file system needs root and mkfs.ext4")
        disk = cls(folder, nbytes)
        disk.mount()
        try:
            yield disk
        finally:
            with suppress(DiskUnavailableHere):
                disk.unmount()

    def mount(self) -> None:
        """The journal is replayed, as after a power cut."""
        self._run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path))

    def unmount(self) -> None:
        self._run("umount", str(self.path))

    def fill(self) -> None:
        """Leave no room for a large file (blocks), nor for any new one (inodes)."""
        folder = self.path / _BALLAST
        folder.mkdir()
        with (folder / "blocks").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        with suppress(OSError):
            for number in itertools.count():
                (folder / str(number)).touch()

    def make_room(self) -> None:
        shutil.rmtree(self.path / _BALLAST)

    def turn_read_only(self) -> None:
        """What ext4 does when it finds itself damaged: read-only at once, whoever has files open."""
        with Path("/proc/mounts").open() as mounts:
            device = next(line.split()[0] for line in mounts if line.split()[1] == str(self.path))
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")

    def cut_off(self) -> None:
        """From now on every call fails with EIO, and what is not on the disk yet never comes there."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    @staticmethod
    def _run(*argv: str) -> None:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DiskUnavailableHere(f"{argv[0]}: {done.stderr.strip().splitlines()[-1:]}")
