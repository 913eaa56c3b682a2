"""A real S3 server for tests: Ceph's radosgw, unpacked from Debian's packages and run without root.

    python -m tests.support.ceph --install      download and unpack (about 65 MB), once
    python -m tests.support.ceph --run          start a gateway, print how to reach it, stop at Ctrl-C

Nothing is installed on the machine: the packages are unpacked under ``.cache/ceph`` of this repository, and
one monitor, one OSD and one gateway run as plain processes on loopback with their data in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support.s3 import S3Endpoint, free_port, start_process, stop_process

__all__ = ["CACHE", "Radosgw", "UnavailableHere", "install"]

CACHE = Path(os.environ.get("CEPH_CACHE") or Path(__file__).resolve().parents[2] / ".cache" / "ceph")
PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
_APT_S = 300


class UnavailableHere(Exception):
    """This machine cannot get or run radosgw; the text says why, in one line."""


def _apt_options(work: Path) -> list[str]:
    """Private state, lists and cache, so that no root is needed; the installed packages stay known."""
    for name in ("state/lists/partial", "cache/archives/partial", "debs"):
        (work / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "Dir::State": work / "state",
        "Dir::State::Lists": work / "state/lists",
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": work / "cache",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",
        "APT::Install-Recommends": "0",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def _run(argv: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=_APT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableHere(f"{argv[0]} took longer than {_APT_S} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UnavailableHere(f"{Path(argv[0]).name} {argv[-1]}: {lines[-1].strip()}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(cache: Path | None = None) -> Path:
    """Return the folder with the unpacked packages; download them first if they are not there.

    Raises:
        UnavailableHere: no apt, another distribution, no network.
    """
    cache = cache or CACHE
    root = cache / "root"
    with _locked(cache / "lock"):
        if root.is_dir():
            return root
        apt, unpack = shutil.which("apt-get"), shutil.which("dpkg-deb")
        if apt is None or unpack is None:
            raise UnavailableHere("no apt-get on this machine")
        work = cache / "work"
        shutil.rmtree(work, ignore_errors=True)
        options = _apt_options(work)
        _run([apt, *options, "update"])
        simulated = _run([apt, *options, "--simulate", "install", *PACKAGES])
        wanted = [
            f"{name}={version}" for name, version in re.findall(r"^Inst (\S+) .*?\((\S+)", simulated, re.M)
        ]
        if not wanted:
            raise UnavailableHere("the packages of Ceph are installed on this machine already; not supported")
        _run([apt, *options, "download", *wanted], cwd=work / "debs")
        for package in sorted((work / "debs").glob("*.deb")):
            _run([unpack, "-x", str(package), str(work / "root")])
        (work / "root").rename(root)  # complete or absent
        shutil.rmtree(work)
    return root


_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0]
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {data}/keyring
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 2
osd crush chooseleaf type = 0
osd objectstore = {store}
osd memory target = 1073741824
memstore device bytes = 8589934592
bluestore block size = 8589934592
bluestore block create = true
bluestore block wal create = false
bluestore block db create = false
osd class dir = {lib}/rados-classes
erasure code dir = {lib}/ceph/erasure-code
plugin dir = {lib}/ceph
run dir = {data}
admin socket =
pid file = {data}/$name.pid
log file = {data}/$name.log
mon data = {data}/mon
osd data = {data}/osd
mon cluster log file = {data}/cluster.log
crash dir = {data}/crash
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw enable ops log = false
rgw thread pool size = 32
rgw dns name = 127.0.0.1
"""


class Radosgw(S3Endpoint):
    """One gateway over one monitor and one OSD.

    Args:
        root: what :func:`install` returned.
        store: ``memstore`` (fast; a killed OSD forgets) or ``bluestore`` (keeps its data over a kill).
    """

    def __init__(self, root: Path, *, store: str = "memstore") -> None:
        self._root, self._store = root, store
        self._lib = next(iter(root.glob("usr/lib/*-linux-gnu")), root / "usr/lib")
        self.data = Path(tempfile.mkdtemp(prefix="ckpt-ceph-"))
        self._conf = self.data / "ceph.conf"
        self._log = self.data / "output.log"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _env(self) -> dict[str, str]:
        top, lib = self._root, self._lib
        folders = [lib, lib / "ceph", top / "usr/lib/ceph", top / "lib" / lib.name]
        return {
            "CEPH_CONF": str(self._conf),
            "LD_LIBRARY_PATH": ":".join(map(str, folders)),
            "PYTHONPATH": f"{top}/usr/lib/python3/dist-packages",
            "PATH": f"{top}/usr/bin:{top}/usr/sbin:{os.environ['PATH']}",
        }

    def _tool(self, *argv: str) -> str:
        return _run([self._binary(argv[0]), *argv[1:]], env=dict(os.environ) | self._env())

    def _binary(self, name: str) -> str:
        found = shutil.which(name, path=self._env()["PATH"])
        if found is None:
            raise UnavailableHere(f"the packages lack {name}")
        return found

    def _spawn(self, name: str, *argv: str) -> None:
        command = [self._binary(argv[0]), "-f", "-c", str(self._conf), *argv[1:]]
        self._processes[name] = start_process(command, env=self._env(), cwd=self.data, log=self._log)

    def start(self) -> Radosgw:
        """Make the cluster and start it: 10 to 25 s. Raises UnavailableHere when it does not come up."""
        try:
            self._make_monitor()
            self._start_monitor()
            self._make_osd()
            self._start_osd()
            self._start_gateway()
            self._make_user()
        except BaseException:
            self.stop()
            raise
        return self

    def _make_user(self) -> None:
        keys = ("--access-key", self.access_key_id, "--secret-key", self.secret_access_key)
        create = ("user", "create", "--uid", "test", "--display-name", "test")
        self._tool("radosgw-admin", "-n", "client.rgw", *create, *keys)

    def _make_monitor(self) -> None:
        fsid, mon_port = str(uuid.uuid4()), free_port()
        self.port = free_port()
        self._conf.write_text(
            _CONF.format(
                fsid=fsid, mon_port=mon_port, port=self.port, data=self.data, lib=self._lib, store=self._store
            )
        )
        for name in ("mon", "osd"):
            (self.data / name).mkdir()
        monmap, keyring = str(self.data / "monmap"), str(self.data / "keyring")
        address = f"[v2:127.0.0.1:{mon_port}]"
        self._tool("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
        allow = [word for who in ("mon", "osd", "mgr") for word in ("--cap", who, "allow *")]
        self._tool("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", *allow[:3])
        for name in ("client.admin", "client.rgw", "osd.0"):
            self._tool("ceph-authtool", keyring, "--gen-key", "-n", name, *allow)
        self._tool("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)

    def _start_monitor(self) -> None:
        self._spawn("mon", "ceph-mon", "-i", "a")

    def _make_osd(self) -> None:
        osd = str(uuid.uuid4())
        self._tool("ceph", "--connect-timeout", "20", "osd", "new", osd)
        self._tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)

    def _start_osd(self) -> None:
        self._spawn("osd", "ceph-osd", "-i", "0")
        deadline = time.monotonic() + 60
        while "1 up" not in self._tool("ceph", "--connect-timeout", "20", "osd", "stat"):
            if time.monotonic() > deadline:
                raise UnavailableHere("the OSD of radosgw did not come up")
            time.sleep(0.1)

    def _start_gateway(self) -> None:
        self._spawn("rgw", "radosgw", "-n", "client.rgw")
        try:
            self.wait_ready(self._processes["rgw"], self._log, start_s=90)
        except RuntimeError as error:
            raise UnavailableHere("radosgw did not come up") from error

    def kill(self) -> None:
        """SIGKILL: the gateway, and with bluestore the OSD and the monitor too (memstore would forget)."""
        for name in ("rgw",) if self._store == "memstore" else ("rgw", "osd", "mon"):
            stop_process(self._processes.pop(name))

    def restart(self) -> None:
        """Start again what :meth:`kill` killed, on the same ports and data."""
        if "mon" not in self._processes:
            self._start_monitor()
        if "osd" not in self._processes:
            self._start_osd()
        self._start_gateway()

    def stop(self) -> None:
        """Kill everything and remove the data."""
        for process in self._processes.values():
            stop_process(process)
        self._processes.clear()
        shutil.rmtree(self.data, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--install", action="store_true", help="download and unpack, then exit")
    action.add_argument("--run", action="store_true", help="start a gateway and wait for SIGINT or SIGTERM")
    parser.add_argument("--store", choices=["memstore", "bluestore"], default="memstore")
    chosen = parser.parse_args()
    try:
        root = install()
        print(f"radosgw is in {root}")
        if chosen.run:
            _serve(root, chosen.store)
    except UnavailableHere as error:
        # No failure: the tests that want it skip, and say so.
        print(f"radosgw cannot be had on this machine: {error}")


def _serve(root: Path, store: str) -> None:
    stop = {signal.SIGINT, signal.SIGTERM}
    gateway = Radosgw(root, store=store).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    try:
        for name, value in gateway.env.items():
            print(f"export {name}={value}", flush=True)
        signal.sigwait(stop)
    finally:
        gateway.stop()


if __name__ == "__main__":
    main()
