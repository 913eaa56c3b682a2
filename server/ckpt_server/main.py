"""ckptd: parse, run until a signal, exit code.

Exit codes: 0 done, 1 failed, 2 usage, 3 another server owns the staging directory (embedded: 0, because
the server that another trainer started is as good).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt.clock import SystemClock
from ckpt.errors import CkptError, InvalidInputError
from ckpt.plan.liveness import LivenessPolicy
from ckpt.rpc.access import PeerAccess
from ckpt.storage.peerfile import failure_domain
from ckpt.storage.staging import StagingDir, default_staging_path
from ckpt.storage.standard_fds import fill_standard_fds
from ckpt_server.app import App
from ckpt_server.compression import COMPRESSION
from ckpt_server.lock import AlreadyRunningError, has_server_file, owned
from ckpt_server.settings import Settings
from ckpt_server.trainers import announce

__all__ = ["main", "run"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_OWNED = 3

# An embedded server looks for new trainers every second before it leaves; twice that is enough.
_LOOK_S = 0.2
_READY_LOOKS = 10
_TAKEOVER_S = 120.0


def run() -> None:
    """Entry point of ``ckptd`` and ``python -m ckpt_server``."""
    fill_standard_fds()
    _share_malloc_arenas()
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed
            stream.flush()
    # Upload threads that outlasted the grace may hold the interpreter's end for minutes; all they did
    # is done again after the next start.
    os._exit(code)


def _share_malloc_arenas() -> None:
    """Let all threads allocate from two arenas: with one each, as glibc has it, memory grows for hours, since
    what one thread frees no other can use (measured by tests.support.load: 0.1 MB a step of 64 ranks).
    """
    # Source: <malloc.h>, M_ARENA_MAX. Other C libraries have no mallopt, or no arenas.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-8, 2)


def main(arguments: Sequence[str]) -> int:
    """Run a server until SIGTERM or SIGINT (embedded: until it is done); return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        settings = _settings(options)
    except InvalidInputError as error:
        return _complain(error, EXIT_USAGE)
    staging = StagingDir(settings.staging)
    try:
        staging.ensure()
        if settings.embedded:
            return _run_embedded(staging, settings, options.trainer_pid or os.getppid())
        with owned(staging):
            return _serve(App(settings))
    except AlreadyRunningError as error:
        return _complain(error, EXIT_OWNED)
    except CkptError as error:
        return _complain(error, EXIT_FAILED)


def _run_embedded(staging: StagingDir, settings: Settings, trainer: int) -> int:
    """Serve, or make sure that another server will: one that is ready and has had the time to see that a
    new trainer counts on it. One that is leaving is waited for.
    """
    announce(staging, trainer)
    clock = SystemClock()
    deadline = clock.monotonic() + _TAKEOVER_S
    seen_ready = 0
    while True:
        try:
            with owned(staging):
                return _serve(App(settings))
        except AlreadyRunningError:
            # Gone from its first moment of leaving, so that nobody takes a leaving server for a ready one.
            seen_ready = seen_ready + 1 if has_server_file(staging) else 0
            if seen_ready > _READY_LOOKS:
                return 0
            if clock.monotonic() > deadline:
                raise
        clock.sleep(_LOOK_S)


def _serve(app: App) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: app.request_stop())
    with contextlib.suppress(OSError):
        os.nice(5)  # training comes first
    try:
        app.start()
        app.wait()
    finally:
        app.stop()
    return 0


def _complain(error: CkptError, code: int) -> int:
    sys.stderr.write(f"ckptd: {error}\n")
    return code


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        staging=Path(options.staging).absolute(),
        embedded=options.embedded,
        listen=tuple(options.listen),
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        tls_client_ca=options.tls_client_ca,
        tokens_file=options.tokens_file,
        client_stall_s=options.client_stall,
        # Where there is a tokens file, the one in the environment is how this server gets in at others.
        token=_token(options) if options.token_file or not options.tokens_file else None,
        insecure=options.insecure,
        metrics_listen=options.metrics_listen or None,
        keep_local=options.keep_local,
        upload_concurrency=options.upload_concurrency,
        part_nbytes=options.part_mib * 1024 * 1024,
        compression=options.compression,
        scan_interval_s=options.scan_interval,
        idle_exit_s=options.idle_exit,
        linger_s=options.linger,
        abandon_grace_s=options.abandon_grace,
        stop_grace_s=options.stop_grace,
        peer_listen=options.peer_listen or None,
        peer_advertise=options.peer_advertise or None,
        domain=options.failure_domain or failure_domain(),
        peer_access=PeerAccess(token=_token(options), ca=options.peer_ca),
        peer_lost_s=options.peer_lost,
        adopt_after_s=options.adopt_after,
        peer_linger_s=options.peer_linger,
        replica_quota_nbytes=options.replica_quota_mib * 1024 * 1024,
        liveness=LivenessPolicy(floor_s=options.hang_after, factor=options.hang_steps),
    )


def _token(options: argparse.Namespace) -> str | None:
    """From the file, or from the environment: an embedded server has its trainer's."""
    if options.token_file is not None:
        return _read_token(options.token_file)
    return os.environ.get("CKPT_SERVER_TOKEN") or None


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise InvalidInputError("cannot read the token file", path=path, reason=error.strerror) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckptd", description="Staging server: uploads sealed checkpoints, commits them, serves restores."
    )
    add = parser.add_argument
    add("--staging", default=str(default_staging_path()), help="staging directory of this node")
    add("--embedded", action="store_true", help="leave when nothing is pending and no client is connected")
    add("--listen", action="append", default=[], metavar="HOST:PORT", help="also serve TCP; repeatable")
    add("--tls-cert", type=Path, default=_path("CKPT_TLS_CERT"), help="PEM certificate of the TCP listeners")
    add("--tls-key", type=Path, default=_path("CKPT_TLS_KEY"), help="its private key")
    add(
        "--tls-client-ca",
        type=Path,
        default=_path("CKPT_TLS_CLIENT_CA"),
        help="PEM authority whose certificate TCP clients must show",
    )
    add("--token-file", type=Path, help="file with the token that TCP clients must send: good for everything")
    add(
        "--tokens-file",
        type=Path,
        default=_path("CKPT_TOKENS_FILE"),
        help="TOML file of tokens with scopes and runs",
    )
    add(
        "--client-stall",
        type=float,
        default=30.0,
        metavar="S",
        help="TCP: cut off a call whose client keeps it waiting for so long",
    )
    add(
        "--insecure",
        action="store_true",
        default=os.environ.get("CKPT_INSECURE") == "1",
        help="TCP without TLS and token; loopback addresses only",
    )
    add(
        "--metrics-listen",
        default=os.environ.get("CKPT_METRICS_LISTEN"),
        metavar="HOST:PORT",
        help="serve Prometheus metrics over HTTP there",
    )
    add("--keep-local", type=int, default=2, metavar="K", help="newest committed steps kept on NVMe")
    add("--upload-concurrency", type=int, default=4, metavar="N", help="segments at once, parts in flight")
    add("--part-mib", type=int, default=16, help="wanted part size of an upload, MiB")
    add("--compression", default="auto", choices=COMPRESSION, help="of uploads, for runs that do not say")
    add(
        "--scan-interval", type=float, default=2.0, metavar="S", help="seconds between looks at the directory"
    )
    add(
        "--idle-exit",
        type=float,
        default=10.0,
        metavar="S",
        help="embedded: leave after so long without work",
    )
    add("--trainer-pid", type=int, metavar="PID", help="embedded: whose end to wait for; default: the parent")
    add(
        "--linger",
        type=float,
        default=3600.0,
        metavar="S",
        help="embedded: leave after so long stuck and alone",
    )
    add(
        "--abandon-grace",
        type=float,
        default=600.0,
        metavar="S",
        help="age at which overtaken steps are given up",
    )
    add(
        "--hang-after",
        type=float,
        default=os.environ.get("CKPT_HANG_AFTER", "3"),
        metavar="S",
        help="a rank that stands still for less is fine (default: $CKPT_HANG_AFTER, 3)",
    )
    add(
        "--hang-steps",
        type=float,
        default=os.environ.get("CKPT_HANG_STEPS", "3"),
        metavar="N",
        help="so is one that stands still for less than N median steps (default: $CKPT_HANG_STEPS, 3)",
    )
    add("--stop-grace", type=float, default=20.0, metavar="S", help="wait so long for the object on its way")
    _add_peer_options(parser)
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _add_peer_options(parser: argparse.ArgumentParser) -> None:
    """See docs/replication.md. Defaults come from the environment, which is all an embedded server has."""

    def add(name: str, variable: str, default: str, **more: Any) -> None:
        parser.add_argument(name, default=os.environ.get(variable, default), **more)

    add(
        "--peer-listen", "CKPT_PEER_LISTEN", "", metavar="HOST:PORT", help="serve other nodes on this address"
    )
    add(
        "--peer-advertise",
        "CKPT_PEER_ADVERTISE",
        "",
        metavar="HOST[:PORT]",
        help="how other nodes reach it, where that differs",
    )
    add(
        "--failure-domain",
        "CKPT_FAILURE_DOMAIN",
        "",
        metavar="LABEL",
        help="what is lost together with this node",
    )
    parser.add_argument(
        "--peer-ca", type=Path, default=_path("CKPT_SERVER_CA"), help="PEM authority of the others"
    )
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    add(
        "--peer-lost",
        "CKPT_PEER_LOST",
        "60",
        **seconds,
        help="copies of a node silent for so long go elsewhere",
    )
    add(
        "--adopt-after",
        "CKPT_ADOPT_AFTER",
        "300",
        **seconds,
        help="replicas of a node silent for so long are committed",
    )
    add("--peer-linger", "CKPT_PEER_LINGER", "900", **seconds, help="embedded: stay so long for other nodes")
    add(
        "--replica-quota-mib",
        "CKPT_REPLICA_QUOTA_MIB",
        "0",
        type=int,
        help="most MiB of others' replicas; 0: no limit",
    )


def _path(variable: str) -> Path | None:
    found = os.environ.get(variable)
    return Path(found) if found else None


if __name__ == "__main__":
    run()
