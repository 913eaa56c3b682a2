"""The server's settings: one frozen record, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckpt.errors import InvalidInputError
from ckpt.plan.liveness import LivenessPolicy
from ckpt.rpc.access import PeerAccess
from ckpt.rpc.channel import is_loopback
from ckpt_server.tokens import MIN_TOKEN_CHARS

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a staging server runs.

    Attributes:
        staging: the node's staging directory.
        embedded: started by a trainer; leaves by itself when it has nothing to do.
        listen: ``host:port`` addresses beside the unix socket; port 0 takes a free one.
        tls_cert, tls_key: PEM files of the TCP listeners.
        tls_client_ca: PEM file of the authority whose certificates TCP clients must show; None: none needed.
        token: what TCP clients must send, good for everything; None with ``insecure``.
        tokens_file: more tokens, with scopes and runs (see ckpt_server.tokens).
        client_stall_s: TCP: a call whose client keeps the server waiting for so long is cut off.
        insecure: plain text without a token; loopback addresses only.
        keep_local: newest committed steps kept on NVMe of a run that does not say how many.
        upload_concurrency: segments uploaded at once per run, and parts in flight per segment.
        part_nbytes: wanted part size of an upload, bytes.
        compression: of uploads, for runs that do not say: "auto" (where it pays), "on", "off".
        scan_interval_s: how often the staging directory is looked through.
        idle_exit_s: embedded: leave after so long without work and without clients.
        linger_s: embedded: leave after so long without clients and without any progress of pending work.
        abandon_grace_s: age at which a step that others overtook is given up.
        stop_grace_s: how long a stopping server waits for the object that is being uploaded.
        peer_listen: ``host:port`` that other nodes' servers and trainers reach, served like ``listen`` and
            made known in peer.json; None: no peers.
        peer_advertise: what is made known instead, where others see another name or port.
        domain: failure domain of this node.
        peer_access: how this server gets in at others.
        peer_lost_s: a peer that does not answer for so long counts as lost: its copies go to another node.
        adopt_after_s: an owner that does not answer for so long counts as gone: its replicas are committed.
        peer_linger_s: embedded, with replicas here or elsewhere: stay so long after the last call, unless the
            run was ended in order.
        replica_quota_nbytes: most bytes of other nodes' replicas kept here; 0: as the disk has room.
        metrics_listen: ``host:port`` that serves Prometheus metrics over HTTP (HTTPS with ``tls_cert``), open
            to whoever reaches it: they tell URLs of runs and sizes, no contents; None: not served.
        liveness: when a rank counts as hung or slow.
    """

    staging: Path
    embedded: bool = False
    listen: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token: str | None = None
    tokens_file: Path | None = None
    client_stall_s: float = 30.0
    insecure: bool = False
    keep_local: int = 2
    upload_concurrency: int = 4
    part_nbytes: int = 16 * 1024 * 1024
    compression: str = "auto"
    scan_interval_s: float = 2.0
    idle_exit_s: float = 10.0
    linger_s: float = 3600.0
    abandon_grace_s: float = 600.0
    stop_grace_s: float = 20.0
    peer_listen: str | None = None
    peer_advertise: str | None = None
    domain: str = ""
    peer_access: PeerAccess = field(default_factory=PeerAccess)
    peer_lost_s: float = 60.0
    adopt_after_s: float = 300.0
    peer_linger_s: float = 900.0
    replica_quota_nbytes: int = 0
    metrics_listen: str | None = None
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)

    def __post_init__(self) -> None:
        if self.upload_concurrency < 1 or self.part_nbytes < 1:
            raise InvalidInputError("--upload-concurrency and --part-mib must be at least 1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidInputError("--tls-cert and --tls-key go together")
        for address in self.tcp:
            self._check_address(address)
        if self.metrics_listen is not None:
            _split_address("--metrics-listen", self.metrics_listen)
        if self.peer_advertise is not None and self.peer_listen is None:
            raise InvalidInputError("--peer-advertise needs --peer-listen")

    @property
    def tcp(self) -> tuple[str, ...]:
        """Every TCP address; that for peers comes last."""
        return (*self.listen, self.peer_listen) if self.peer_listen else self.listen

    def _check_address(self, address: str) -> None:
        host = _split_address("--listen and --peer-listen", address)
        if self.insecure:
            if not is_loopback(host):
                raise InvalidInputError(
                    "--insecure serves loopback addresses only; give --tls-cert, --tls-key and --token-file",
                    code="insecure",
                    address=address,
                )
            return
        if self.tls_cert is None or not (self.token or self.tokens_file or self.tls_client_ca):
            raise InvalidInputError(
                "a TCP address needs --tls-cert, --tls-key and one of --token-file, --tokens-file and "
                "--tls-client-ca (or --insecure on loopback)",
                code="insecure",
                address=address,
            )
        if self.token is not None and len(self.token) < MIN_TOKEN_CHARS:
            raise InvalidInputError("the token is too short", code="token", smallest=MIN_TOKEN_CHARS)


def _split_address(option: str, address: str) -> str:
    """Return the host of ``host:port``. Raises InvalidInputError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInputError(f"{option}: give HOST:PORT", address=address)
    return host
