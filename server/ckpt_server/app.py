"""Wires the components; start and stop order on one screen."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from ckpt import __version__
from ckpt.clock import Clock, SystemClock
from ckpt.errors import CkptError, UnavailableError
from ckpt.events import event, get_logger
from ckpt.rpc.channel import MAX_MESSAGE_NBYTES, MAX_REQUEST_NBYTES
from ckpt.storage.aside import aside_nbytes
from ckpt.storage.durable import write_durably
from ckpt.storage.leftovers import LEFTOVER_S, sweep_leftovers
from ckpt.storage.peerfile import write_peer_file
from ckpt.storage.spares import drop_spares
from ckpt.storage.staging import StagingDir, os_errors
from ckpt_proto.v1 import (
    catalog_pb2_grpc,
    peer_pb2_grpc,
    replica_pb2_grpc,
    restore_pb2_grpc,
    staging_pb2_grpc,
)
from ckpt_server.access import AccessInterceptor
from ckpt_server.adopter import Adopter
from ckpt_server.bulk_service import bulk_handlers
from ckpt_server.catalog_service import CatalogService
from ckpt_server.checkpoints import Checkpoints
from ckpt_server.guard import StallGuard
from ckpt_server.health import Health
from ckpt_server.intake import Intake
from ckpt_server.interceptors import Activity, ErrorInterceptor
from ckpt_server.keeper import ReplicaKeeper
from ckpt_server.liveness import MAX_HEARTS, Liveness
from ckpt_server.lock import write_server_file
from ckpt_server.metrics import Metrics
from ckpt_server.peer_service import PeerService
from ckpt_server.peers import Peers
from ckpt_server.pipeline import Pipeline
from ckpt_server.recoveries import publish_ledger, publish_recoveries
from ckpt_server.replica_dir import ReplicaDir
from ckpt_server.replica_service import ReplicaService
from ckpt_server.replicator import Replicator
from ckpt_server.restore_service import RestoreService
from ckpt_server.runs import Runs
from ckpt_server.settings import Settings
from ckpt_server.staging_service import MAX_WATCHERS, StagingService
from ckpt_server.steps import StepTable
from ckpt_server.tls import server_credentials
from ckpt_server.tokens import Tokens
from ckpt_server.trainers import living

__all__ = ["App", "advertised"]

_log = get_logger("server.app")

_SCANS_PER_RETAIN = 10
_LOOK_S = 0.5
_RPC_THREADS = MAX_WATCHERS + MAX_HEARTS + 32
# Calls at once per listener; more are told so at once instead of waiting in memory. 500 clients that restore
# beside the heartbeats of a node must fit.
_MAX_CALLS = 4 * _RPC_THREADS
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_NBYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    # Per connection; a client waits for a place, others are not held up.
    ("grpc.max_concurrent_streams", 64),
    # Connections that never say anything.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", 1024),
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    # A client whose machine vanished must not hold its stream's segment for long.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients ping through long quiet calls; that is no abuse (I122).
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)


class App:
    """A staging server. The caller owns the directory (see ckpt_server.lock) for its whole life.

    ``start`` returns when clients are served; ``wait`` blocks until it is time to go; ``stop`` ends it.
    """

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._staging = StagingDir(settings.staging)
        self._activity = Activity(self._clock)
        self._health = Health()
        self._table = StepTable()
        self._liveness = Liveness(settings.liveness, self._clock)
        self._runs = Runs(self._staging, workers=settings.upload_concurrency, clock=self._clock)
        self._pipeline = Pipeline(self._staging, self._table, settings, self._clock)
        self._intake = Intake(self._staging, self._runs, self._table, self._pipeline, self._clock)
        self._metrics = Metrics(settings, self._staging, self._runs, self._table, self._clock)
        self._peers = Peers(None, settings.peer_access, self._clock)
        self._replicator = Replicator(
            self._staging,
            self._runs,
            self._table,
            self._peers,
            peer_lost_s=settings.peer_lost_s,
            clock=self._clock,
        )
        self._replicas = ReplicaDir(self._staging)
        self._adopter = Adopter(self._replicas, settings, self._clock)
        self._keeper = ReplicaKeeper(
            self._staging,
            self._replicas,
            self._peers,
            self._adopter,
            settings,
            self._clock,
        )
        # Apart: whatever clients on the network do, the trainers of this node are served.
        self._pools = [
            ThreadPoolExecutor(_RPC_THREADS, thread_name_prefix=name) for name in ("ckpt-rpc", "ckpt-rpc-tcp")
        ]
        self._guard: StallGuard | None = None
        self._leave = threading.Event()
        self._scanner = threading.Thread(target=self._scan_loop, name="ckpt-scan", daemon=True)
        self._scans = 0  # only the scanning thread (and start, before it)
        self._servers: list[grpc.Server] = []
        self._server_file: Path | None = None
        self._peer_file: Path | None = None

    def start(self) -> None:
        """Find pending work, bind, serve, and write server.json. Raises CkptError."""
        self._staging.ensure()
        for place in (self._staging, self._replicas.files):
            sweep_leftovers(place, before=self._clock.now() - LEFTOVER_S)
        if kept := aside_nbytes(self._staging):
            event(_log, logging.WARNING, "staging.aside", staging=self._staging.path, nbytes=kept)
        metrics = self._metrics.start()
        self._scan()
        servers = self._make_servers()
        listen = self._bind(*servers)
        for server in servers:
            server.start()
            self._servers.append(server)
        self._scanner.start()
        self._health.serving()
        if self._settings.peer_listen is not None:
            target = advertised(self._settings, listen[-1])
            self._peers.me, self._peer_file = write_peer_file(
                self._staging, target=target, domain=self._settings.domain
            )
        self._server_file = write_server_file(
            self._staging, version=__version__, listen=listen, metrics=metrics
        )
        event(
            _log,
            logging.INFO,
            "server.ready",
            target=self._staging.socket_target(),
            listen=",".join(listen),
            pid=os.getpid(),
        )

    def request_stop(self) -> None:
        """Make :meth:`wait` return. Safe in a signal handler."""
        self._leave.set()

    def wait(self) -> str:
        """Block until a stop was asked for or, embedded, nothing is left to do. Returns the reason."""
        while not self._leave.wait(_LOOK_S):
            self._liveness.look()
            reason = self._done_reason() if self._settings.embedded else None
            if reason is not None:
                self._drop_spares()
                event(_log, logging.INFO, "server.leaving", reason=reason)
                return reason
        return "signal"

    def stop(self) -> bool:
        """Stop intake, let the object on its way be finished within the grace, close everything.

        Returns:
            False where a job outlasted the grace; what it did is done again after the next start.
        """
        # First of all: who starts now must wait for the lock and not count on this server.
        for known in (self._server_file, self._peer_file):
            if known is not None:
                known.unlink(missing_ok=True)
        self._health.stopping()
        self._leave.set()
        self._table.close()
        deadline = self._clock.monotonic() + self._settings.stop_grace_s
        ends = [server.stop(grace=1.0) for server in self._servers]
        for queues in (self._replicator, self._keeper):
            queues.close(self._clock.monotonic())  # nothing new begins; what is on its way is cut off next
        self._peers.close()
        closed = [self._runs.close(deadline), self._replicator.close(deadline), self._keeper.close(deadline)]
        ended = all(closed)
        for end in ends:
            end.wait(5.0)
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        if self._guard is not None:
            self._guard.close()
        self._metrics.stop()
        event(_log, logging.INFO, "server.stopped", clean=ended)
        return ended

    def _make_servers(self) -> list[grpc.Server]:
        """One server for the unix socket and, where asked for, one for TCP that wants the token."""
        chains: list[list[grpc.ServerInterceptor]] = [[ErrorInterceptor(self._activity)]]
        if self._settings.tcp:
            chains.append([ErrorInterceptor(self._activity), *self._gate()])
        checkpoints = Checkpoints(self._runs)
        staging = StagingService(
            staging=self._staging,
            settings=self._settings,
            runs=self._runs,
            table=self._table,
            intake=self._intake,
            pipeline=self._pipeline,
            liveness=self._liveness,
            clock=self._clock,
            version=__version__,
            replicator=self._replicator,
        )
        replica = ReplicaService(
            replicas=self._replicas,
            peers=self._peers,
            quota_nbytes=self._settings.replica_quota_nbytes,
            own_step_nbytes=self._largest_step_nbytes,
            make_room=self._keeper.make_room,
            make_way=self._adopter.make_way,
            on_greet=self._keeper.greeted,
        )
        restore = RestoreService(staging=self._staging, checkpoints=checkpoints)
        catalog = CatalogService(
            staging=self._staging,
            runs=self._runs,
            checkpoints=checkpoints,
            access=self._settings.peer_access,
        )
        peer = PeerService(staging=self._staging)
        servers = []
        for pool, interceptors in zip(self._pools, chains, strict=False):
            server = grpc.server(
                pool, interceptors=interceptors, options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS
            )
            staging_pb2_grpc.add_StagingServicer_to_server(staging, server)  # type: ignore[no-untyped-call]
            catalog_pb2_grpc.add_CatalogServicer_to_server(catalog, server)  # type: ignore[no-untyped-call]
            restore_pb2_grpc.add_RestoreServicer_to_server(restore, server)  # type: ignore[no-untyped-call]
            peer_pb2_grpc.add_PeerServicer_to_server(peer, server)  # type: ignore[no-untyped-call]
            replica_pb2_grpc.add_ReplicaServicer_to_server(replica, server)  # type: ignore[no-untyped-call]
            server.add_generic_rpc_handlers((bulk_handlers(staging, restore, peer, replica),))
            self._health.add_to(server)
            servers.append(server)
        return servers

    def _gate(self) -> list[grpc.ServerInterceptor]:
        """What stands before every call over TCP."""
        settings = self._settings
        self._guard = StallGuard(settings.client_stall_s, self._clock)
        if settings.insecure:
            return [self._guard]
        tokens = None
        if settings.token or settings.tokens_file:
            tokens = Tokens(settings.token, settings.tokens_file, self._clock)
        return [self._guard, AccessInterceptor(tokens, self._staging)]

    def _bind(self, local: grpc.Server, remote: grpc.Server | None = None) -> list[str]:
        """Bind the socket, private from its first moment, and the TCP addresses; return the latter."""
        path = self._staging.socket_path()
        path.unlink(missing_ok=True)  # ours: we hold the lock
        before = os.umask(0o177)
        try:
            local.add_insecure_port(f"unix:{path}")
            path.chmod(0o600)
        except (RuntimeError, OSError) as error:
            raise UnavailableError("cannot bind the socket", code="bind", path=path) from error
        finally:
            os.umask(before)
        if remote is None:
            return []
        bound = [self._bind_tcp(remote, address) for address in self._settings.listen]
        return [*bound, self._bind_for_peers(remote)] if self._settings.peer_listen else bound

    def _bind_for_peers(self, server: grpc.Server) -> str:
        """Where any port will do, the one from before: others know it, and need not notice a restart."""
        address = self._settings.peer_listen or ""
        host, _, port = address.rpartition(":")
        remembered = self._staging.path / "peer.port"
        with contextlib.suppress(OSError, ValueError, UnavailableError):
            if port == "0":
                return self._bind_tcp(server, f"{host}:{int(remembered.read_text())}")
        bound = self._bind_tcp(server, address)
        if port == "0":
            with os_errors("the port for peers cannot be remembered", path=remembered):
                write_durably(remembered, bound.rpartition(":")[2].encode())
        return bound

    def _bind_tcp(self, server: grpc.Server, address: str) -> str:
        settings = self._settings
        try:
            if settings.tls_cert is not None and settings.tls_key is not None:
                found = server_credentials(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
                port = server.add_secure_port(address, found)
            else:
                port = server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise UnavailableError("cannot listen", code="bind", address=address) from error
        return f"{address.rpartition(':')[0]}:{port}"

    def _scan(self) -> None:
        try:
            self._intake.scan()
            publish_recoveries(self._runs.all(), self._staging)
            publish_ledger(self._runs.all(), self._staging, self._clock)
            if self._scans % _SCANS_PER_RETAIN == 0:
                for run in self._runs.all():
                    self._pipeline.retain(run, remote=False)
            self._scans += 1
            self._replicator.scan()
            self._keeper.scan()
        except CkptError as error:
            event(_log, logging.WARNING, "scan.failed", error=error)

    def _scan_loop(self) -> None:
        while not self._leave.wait(self._settings.scan_interval_s):
            self._scan()

    def _drop_spares(self) -> None:
        """No trainer is left to overwrite them, and after this no server to remove them."""
        for run in self._runs.all():
            drop_spares(self._staging, run.key)

    def _done_reason(self) -> str | None:
        """Embedded: why to leave now, or None."""
        idle_s = self._activity.idle_s()
        if idle_s < self._settings.idle_exit_s or living(self._staging):
            return None
        if self._is_for_others(idle_s):
            return None
        if not any(run.has_work for run in self._runs.all()) and not self._keeper.has_work:
            return "idle"
        stuck_s = min(idle_s, self._clock.monotonic() - self._pipeline.progressed_at)
        return "stuck" if stuck_s > self._settings.linger_s else None

    def _is_for_others(self, idle_s: float) -> bool:
        """Embedded: whether to stay because other nodes may need what is here, or their steps need us."""
        if self._keeper.has_uncommitted:
            return idle_s <= self._settings.linger_s
        if idle_s > self._settings.peer_linger_s:
            return False
        return self._keeper.is_needed() or any(
            run.config.replication_factor > 1 and not self._staging.is_ended(run.key)
            for run in self._runs.all()
        )

    def _largest_step_nbytes(self) -> int:
        return max((sum(record.nbytes.values()) for record in self._table.records()), default=0)


def advertised(settings: Settings, bound: str) -> str:
    """How other nodes reach the address ``bound`` (host:port), for peer.json.

    A wildcard address is no target: it becomes this host's name.
    """
    host, _, port = bound.rpartition(":")
    wanted, _, wanted_port = (settings.peer_advertise or "").partition(":")
    if wanted:
        return f"{wanted}:{wanted_port or port}"
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "::") else bound  # noqa: S104
