"""The Catalog service: what exists, in the store and on this node; pins, pruning, verification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grpc

from ckpt.client.repair import repair
from ckpt.client.whereabouts import find_copies
from ckpt.errors import CorruptError, InvalidInputError
from ckpt.format import keys
from ckpt.format.ids import CheckpointId, same_run
from ckpt.format.problem import error_to_info
from ckpt.ops.attempts import read_run_id
from ckpt.ops.catalog import (
    CheckpointInfo,
    latest,
    list_checkpoints,
    list_runs,
    load_checkpoint,
    read_manifest,
    require_run,
    resolve,
)
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.holdings import sealed_paths
from ckpt.ops.identity import find_foreign
from ckpt.ops.pins import is_pinned, list_pins, pin, unpin
from ckpt.ops.prune import execute_prune, plan_deletion, plan_retention
from ckpt.ops.sweep import check_grace, sweep, sweep_uploads
from ckpt.rpc.access import PeerAccess
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import catalog_pb2, catalog_pb2_grpc, common_pb2
from ckpt_server.checkpoints import Checkpoints
from ckpt_server.runs import Runs
from ckpt_server.verification import verification

__all__ = ["CatalogService"]

_PAGE_SIZE = 1000
_PAGE_SIZE_MOST = 10_000


class CatalogService(catalog_pb2_grpc.CatalogServicer):
    """Thread-safe. Every listing and every "latest" goes through ckpt.ops.catalog."""

    def __init__(
        self, *, staging: StagingDir, runs: Runs, checkpoints: Checkpoints, access: PeerAccess
    ) -> None:
        self._access = access
        self._staging = staging
        self._runs = runs
        self._checkpoints = checkpoints

    def ListRuns(
        self, request: catalog_pb2.ListRunsRequest, context: grpc.ServicerContext
    ) -> catalog_pb2.ListRunsResponse:
        if not request.root:
            return catalog_pb2.ListRunsResponse(urls=[run.config.url for run in self._runs.all()])
        return catalog_pb2.ListRunsResponse(urls=_runs_below(request.root.rstrip("/")))

    def ListCheckpoints(
        self, request: catalog_pb2.ListCheckpointsRequest, context: grpc.ServicerContext
    ) -> catalog_pb2.ListCheckpointsResponse:
        store = self._runs.store_for(request.url)
        size = min(request.page_size or _PAGE_SIZE, _PAGE_SIZE_MOST)
        after = CheckpointId.parse(request.page_token) if request.page_token else None
        local = self._staging.sealed_checkpoints(keys.run_key(request.url))
        pins = list_pins(store)
        rows = _merge(list_checkpoints(store), local)
        copies = self._by_checkpoint(request.url) if request.with_copies else {}
        response = catalog_pb2.ListCheckpointsResponse() if after else _first_page(store)
        for ident, info in rows:
            if after is not None and _order(ident) >= _order(after):
                continue
            if len(response.checkpoints) == size:
                last = CheckpointId.from_proto(response.checkpoints[-1].id)
                response.next_page_token = str(last)
                break
            row = _row(ident, info, is_local=ident in local, pinned=ident in pins)
            row.copies.extend(copies.get(ident, ()))
            response.checkpoints.append(row)
        return response

    def GetManifest(
        self, request: catalog_pb2.GetManifestRequest, context: grpc.ServicerContext
    ) -> catalog_pb2.GetManifestResponse:
        if request.manifest_only:
            store = self._runs.store_for(request.url)
            ident = resolve(store, request.checkpoint or "latest")
            return catalog_pb2.GetManifestResponse(
                manifest=read_manifest(store, ident), pinned=is_pinned(store, ident)
            )
        checkpoint = self._checkpoints.find(request.url, request.checkpoint)
        return catalog_pb2.GetManifestResponse(
            manifest=checkpoint.manifest,
            layouts=common_pb2.LayoutSet.FromString(checkpoint.layouts.encode()),
            segments=checkpoint.summaries(),
            pinned=is_pinned(checkpoint.store, checkpoint.ident),
            local_copies=self._copies(request.url, checkpoint),
            copies=self._on_nodes(request.url, checkpoint),
            foreign=_foreign(checkpoint),
        )

    def Pin(self, request: catalog_pb2.PinRequest, context: grpc.ServicerContext) -> catalog_pb2.PinResponse:
        store = self._runs.store_for(request.url)
        ident = resolve(store, request.checkpoint)
        (pin if request.pinned else unpin)(store, ident)
        return catalog_pb2.PinResponse(id=ident.to_proto())

    def Prune(
        self, request: catalog_pb2.PruneRequest, context: grpc.ServicerContext
    ) -> catalog_pb2.PruneResponse:
        store = self._runs.store_for(request.url)
        require_run(store)
        if request.checkpoints:
            if request.keep_last or request.keep_every:
                raise InvalidInputError("give a policy or checkpoints, not both")
            verdicts = plan_deletion(store, [resolve(store, text) for text in request.checkpoints])
        else:
            verdicts = plan_retention(store, keep_last=request.keep_last, keep_every=request.keep_every)
        report = execute_prune(store, verdicts, dry_run=request.dry_run)
        return catalog_pb2.PruneResponse(
            verdicts=[
                catalog_pb2.PruneVerdict(
                    id=verdict.ident.to_proto(), keep=verdict.keep, reason=verdict.reason
                )
                for verdict in report.verdicts
            ],
            deleted_objects=report.deleted_objects,
            held=[ident.to_proto() for ident in report.held],
            freed=[ident.to_proto() for ident in report.freed],
        )

    def Sweep(
        self, request: catalog_pb2.SweepRequest, context: grpc.ServicerContext
    ) -> Iterator[catalog_pb2.SweepProgress]:
        check_grace(request.older_than_s, force=request.force)
        store = self._runs.store_for(request.url)
        require_run(store)
        for found in sweep(store, older_than_s=request.older_than_s, dry_run=request.dry_run):
            yield catalog_pb2.SweepProgress(id=found.ident.to_proto(), objects=found.objects)
        uploads = sweep_uploads(store, older_than_s=request.older_than_s, dry_run=request.dry_run)
        yield catalog_pb2.SweepProgress(
            done=True, uploads_listed=uploads is not None, aborted_uploads=uploads or 0
        )

    def Verify(
        self, request: catalog_pb2.VerifyRequest, context: grpc.ServicerContext
    ) -> Iterator[catalog_pb2.VerifyProgress]:
        store = self._runs.store_for(request.url)
        ident = resolve(store, request.checkpoint or "latest")
        try:
            checkpoint = load_checkpoint(store, ident)
            if (foreign := _foreign(checkpoint)) is not None:
                yield catalog_pb2.VerifyProgress(id=ident.to_proto(), problems=[foreign])
            yield from verification(checkpoint, deep=request.deep, is_active=context.is_active)
        except CorruptError as error:  # not even the manifest or the layouts can be read
            yield catalog_pb2.VerifyProgress(id=ident.to_proto(), problems=[error_to_info(error)], done=True)

    def Repair(
        self, request: catalog_pb2.RepairRequest, context: grpc.ServicerContext
    ) -> catalog_pb2.RepairResponse:
        store = self._runs.store_for(request.url)
        ident = resolve(store, request.checkpoint or "latest")
        found = repair(
            store,
            ident,
            self._staging,
            keys.run_key(request.url),
            peers=request.peers,
            access=self._access,
            dry_run=request.dry_run,
        )
        return catalog_pb2.RepairResponse(
            id=ident.to_proto(),
            mended=[
                catalog_pb2.MendedObject(key=one.key, code=one.code, sources=one.sources)
                for one in found.report.mended
            ],
            problems=list(map(error_to_info, found.report.left)),
            unreachable={target: error_to_info(error) for target, error in found.unreachable.items()},
        )

    def _copies(self, url: str, checkpoint: Checkpoint) -> list[catalog_pb2.LocalCopy]:
        run_id = checkpoint.manifest.run_id
        paths = sealed_paths(self._staging, keys.run_key(url), checkpoint.ident, run_id)
        return [catalog_pb2.LocalCopy(rank=rank, path=path) for rank, path in paths.items()]

    def _on_nodes(self, url: str, checkpoint: Checkpoint) -> list[catalog_pb2.NodeCopies]:
        """What every node says of one checkpoint, those that hold nothing or do not answer too."""
        found = []
        for place in find_copies(self._staging, keys.run_key(url), self._access, checkpoint.ident):
            copies = catalog_pb2.NodeCopies(node=place.node, here=place.is_here)
            for held in place.held:
                if same_run(held.run_id, checkpoint.manifest.run_id):
                    copies.ranks.extend(held.own)
                    copies.replica_ranks.extend(held.replicas)
            if place.problem is not None:
                copies.problem.CopyFrom(error_to_info(place.problem))
            found.append(copies)
        return found

    def _by_checkpoint(self, url: str) -> dict[CheckpointId, list[catalog_pb2.NodeCopies]]:
        found: dict[CheckpointId, list[catalog_pb2.NodeCopies]] = {}
        for place in find_copies(self._staging, keys.run_key(url), self._access):
            for held in place.held:
                copies = catalog_pb2.NodeCopies(
                    node=place.node, here=place.is_here, ranks=held.own, replica_ranks=held.replicas
                )
                found.setdefault(held.ident, []).append(copies)
        return found


def _foreign(checkpoint: Checkpoint) -> common_pb2.ErrorInfo | None:
    found = find_foreign(checkpoint.store, checkpoint.manifest)
    return error_to_info(found) if found is not None else None


def _first_page(store: Store) -> catalog_pb2.ListCheckpointsResponse:
    """Which one is the latest, or why nobody knows; a listing is worth having all the same."""
    response = catalog_pb2.ListCheckpointsResponse(run_id=read_run_id(store) or "")
    try:
        chosen = latest(store)
    except CorruptError as error:
        response.latest_problem.CopyFrom(error_to_info(error))
        return response
    if chosen is not None:
        response.latest.CopyFrom(chosen.to_proto())
    return response


def _merge(
    committed: Iterable[CheckpointInfo], local: set[CheckpointId]
) -> Iterator[tuple[CheckpointId, CheckpointInfo | None]]:
    """Merge two newest-first sequences: what is committed, and what is only here."""
    waiting = sorted(local, key=_order)
    for info in committed:
        while waiting and _order(waiting[-1]) > _order(info.ident):
            yield waiting.pop(), None
        if waiting and waiting[-1] == info.ident:
            waiting.pop()
        yield info.ident, info
    while waiting:
        yield waiting.pop(), None


def _order(ident: CheckpointId) -> tuple[int, int]:
    return ident.attempt, ident.step


def _row(
    ident: CheckpointId, info: CheckpointInfo | None, *, is_local: bool, pinned: bool
) -> catalog_pb2.CheckpointInfo:
    row = catalog_pb2.CheckpointInfo(id=ident.to_proto(), pinned=pinned)
    if info is None:
        row.location = "local"
        return row
    row.location = "both" if is_local else "remote"
    row.committed_at = info.committed_at
    row.manifest_nbytes = info.nbytes
    return row


def _runs_below(root: str) -> list[str]:
    """URLs of the runs below a root."""
    store = open_store(root)
    try:
        return [f"{root}/{name}" for name in list_runs(store)]
    finally:
        store.close()
