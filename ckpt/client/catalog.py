"""Typed client of the Catalog service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpt.client.base import Client
from ckpt.format.ids import CheckpointId
from ckpt_proto.v1 import catalog_pb2, catalog_pb2_grpc

__all__ = ["CatalogClient"]


class CatalogClient(Client):
    """Lists, pins, prunes, sweeps, verifies, repairs through a server. Thread-safe; calls have deadlines.

    Args:
        target: ``unix:/path`` or ``host:port``.
        token, ca: for TCP; see :func:`ckpt.rpc.channel.open_channel`.
        timeout_s: deadline of each call.
    """

    def __init__(
        self, target: str, *, token: str | None = None, ca: Path | None = None, timeout_s: float = 120.0
    ) -> None:
        super().__init__(target, token=token, ca=ca, timeout_s=timeout_s)
        self._stub = catalog_pb2_grpc.CatalogStub(self._connection.channel)  # type: ignore[no-untyped-call]

    def list_runs(self, root: str = "") -> list[str]:
        """URLs of the runs below ``root``, or of those registered at the server. Raises CkptError."""
        reply = self._connection.call(self._stub.ListRuns, catalog_pb2.ListRunsRequest(root=root))
        return list(reply.urls)

    def list_checkpoints(self, url: str, *, page_size: int = 0) -> Iterator[catalog_pb2.CheckpointInfo]:
        """Yield the checkpoints of a run, newest first, page by page. Raises CkptError."""
        for page in self.list_pages(url, page_size=page_size):
            yield from page.checkpoints

    def list_pages(
        self, url: str, *, page_size: int = 0, with_copies: bool = False
    ) -> Iterator[catalog_pb2.ListCheckpointsResponse]:
        """Yield the pages themselves, at least one; the first one names the latest. Raises CkptError."""
        token = ""
        while True:
            request = catalog_pb2.ListCheckpointsRequest(
                url=url, page_size=page_size, page_token=token, with_copies=with_copies
            )
            reply = self._connection.call(self._stub.ListCheckpoints, request)
            yield reply
            token = reply.next_page_token
            if not token:
                return

    def get_manifest(
        self, url: str, checkpoint: str = "latest", *, manifest_only: bool = False
    ) -> catalog_pb2.GetManifestResponse:
        """One checkpoint in full, or only its manifest and whether it is pinned. Raises NotFoundError."""
        request = catalog_pb2.GetManifestRequest(url=url, checkpoint=checkpoint, manifest_only=manifest_only)
        reply: catalog_pb2.GetManifestResponse = self._connection.call(self._stub.GetManifest, request)
        return reply

    def pin(self, url: str, checkpoint: str, *, pinned: bool = True) -> CheckpointId:
        """Pin (or unpin) a checkpoint against retention; returns which one it was. Raises NotFoundError."""
        request = catalog_pb2.PinRequest(url=url, checkpoint=checkpoint, pinned=pinned)
        return CheckpointId.from_proto(self._connection.call(self._stub.Pin, request).id)

    def prune(
        self,
        url: str,
        *,
        keep_last: int = 0,
        keep_every: int = 0,
        checkpoints: Sequence[str] = (),
        dry_run: bool = False,
    ) -> catalog_pb2.PruneResponse:
        """Delete by policy, or exactly ``checkpoints``.

        Raises:
            RefusedError: data would be lost that must not be.
            InvalidInputError: neither a policy nor checkpoints.
        """
        request = catalog_pb2.PruneRequest(
            url=url, keep_last=keep_last, keep_every=keep_every, checkpoints=checkpoints, dry_run=dry_run
        )
        reply: catalog_pb2.PruneResponse = self._connection.call(self._stub.Prune, request, timeout_s=600.0)
        return reply

    def sweep(
        self, url: str, *, older_than_s: float, dry_run: bool = False, force: bool = False
    ) -> Iterator[catalog_pb2.SweepProgress]:
        """Delete what never came to be a checkpoint, and yield what went; the last message has ``done``.

        Raises:
            InvalidInputError: code "grace": less than an hour, without ``force``.
            NotFoundError: code "no-run".
            CorruptError: a manifest cannot be read, so nothing may be deleted.
        """
        request = catalog_pb2.SweepRequest(url=url, older_than_s=older_than_s, dry_run=dry_run, force=force)
        return self._connection.stream(self._stub.Sweep, request, timeout_s=24 * 3600.0)

    def repair(
        self, url: str, checkpoint: str = "latest", *, peers: Sequence[str] = (), dry_run: bool = False
    ) -> catalog_pb2.RepairResponse:
        """Put again what is damaged of a checkpoint; ``peers`` are asked from the server's node.

        Raises:
            NotFoundError: no such checkpoint, or it was pruned meanwhile.
        """
        request = catalog_pb2.RepairRequest(url=url, checkpoint=checkpoint, peers=peers, dry_run=dry_run)
        reply: catalog_pb2.RepairResponse = self._connection.call(
            self._stub.Repair, request, timeout_s=24 * 3600.0
        )
        return reply

    def verify(
        self, url: str, checkpoint: str = "latest", *, deep: bool = False, timeout_s: float = 24 * 3600.0
    ) -> Iterator[catalog_pb2.VerifyProgress]:
        """Check a checkpoint; yields progress with the problems found. The last one has ``done``."""
        request = catalog_pb2.VerifyRequest(url=url, checkpoint=checkpoint, deep=deep)
        return self._connection.stream(self._stub.Verify, request, timeout_s=timeout_s)
