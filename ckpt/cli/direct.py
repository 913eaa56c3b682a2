"""The backend that works on the store itself, and looks into this machine's staging directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ckpt.cli.backend import OnBytes, OnDeleted, OnSwept
from ckpt.cli.describe import describe, details_of, problem_of
from ckpt.cli.records import (
    CopiesRow,
    Details,
    Listing,
    MendedRow,
    Policy,
    PrunePlan,
    Repair,
    Row,
    RunRow,
    Shown,
    Sweep,
    SweptRow,
    VerdictRow,
    Verified,
)
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.events import get_logger
from ckpt.format import keys
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId, same_run, split_run_url
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
from ckpt.ops.holdings import node_holdings, sealed_paths
from ckpt.ops.identity import absence, find_foreign
from ckpt.ops.pins import is_pinned, list_pins, pin, unpin
from ckpt.plan.retention import Verdict, newest_first
from ckpt.storage.base import Store
from ckpt.storage.open import open_store
from ckpt.storage.staging import StagingDir, default_staging_path

__all__ = ["DirectBackend"]

_WORKERS = 16


class DirectBackend:
    """See :class:`ckpt.cli.backend.Backend`.

    Args:
        options: of :func:`ckpt.storage.open.open_store`.
        staging: this node's staging directory, for the marks and paths of local copies.
    """

    def __init__(self, options: Mapping[str, str], *, staging: Path | None = None) -> None:
        self._options = options
        self._staging = StagingDir(staging or default_staging_path())
        self._stores: dict[str, Store] = {}

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def listing(self, url: str, *, with_copies: bool = False) -> Listing:
        store = self._store(url)
        committed = {info.ident: info for info in list_checkpoints(store)}
        local = self._staging.sealed_checkpoints(keys.run_key(url))
        if not committed and not local:
            with self._explained(url):
                require_run(store)
        pins = list_pins(store)
        chosen, problem = None, None
        try:
            chosen = latest(store)
        except CorruptError as error:
            problem = problem_of(error)
        run_id = read_run_id(store) or ""
        copies: dict[CheckpointId, list[CopiesRow]] | None = None
        if with_copies:
            here = node_holdings(self._staging, keys.run_key(url))
            copies = {held.ident: [_copies(held)] for held in here if same_run(held.run_id, run_id)}
        rows = [
            _row(
                ident,
                committed.get(ident),
                chosen=chosen,
                pinned=ident in pins,
                is_local=ident in local,
                copies=None if copies is None else copies.get(ident, []),
            )
            for ident in newest_first([*committed, *local])
        ]
        return Listing(rows=rows, problem=problem, run_id=run_id)

    def details(self, url: str, checkpoints: Sequence[str]) -> dict[str, Details | CkptError]:
        store = self._store(url)

        def read(text: str) -> Details | CkptError:
            try:
                return details_of(read_manifest(store, CheckpointId.parse(text)))
            except (CorruptError, NotFoundError) as error:  # one bad row must not hide the others
                return error

        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-list") as pool:
            return dict(zip(checkpoints, pool.map(read, checkpoints), strict=True))

    def show(self, url: str, checkpoint: str) -> Shown:
        store = self._store(url)
        with self._explained(url):
            ident = resolve(store, checkpoint)
        opened = load_checkpoint(store, ident)
        run_key = keys.run_key(url)
        return describe(
            url,
            opened.manifest,
            opened.layouts,
            opened.summaries(),
            pinned=is_pinned(store, opened.ident),
            local_paths=sealed_paths(self._staging, run_key, opened.ident, opened.manifest.run_id),
            copies=[
                _copies(held)
                for held in node_holdings(self._staging, run_key, opened.ident)
                if same_run(held.run_id, opened.manifest.run_id)
            ],
            foreign=find_foreign(store, opened.manifest),
        )

    def verify(self, url: str, checkpoint: str, *, deep: bool, on_bytes: OnBytes) -> Verified:
        # Here, and in the two below: they load numpy, which a listing should not wait for.
        from ckpt.ops.verify import verify_deep, verify_quick

        store = self._store(url)
        with self._explained(url):
            ident = resolve(store, checkpoint)
        found: list[CkptError] = []
        checked = 0

        def progress(done: int, total: int) -> None:
            nonlocal checked
            checked = done
            on_bytes(done, total)

        try:
            opened = load_checkpoint(store, ident)
            if (foreign := find_foreign(store, opened.manifest)) is not None:
                found.append(foreign)
            found += verify_deep(opened, progress=progress) if deep else verify_quick(opened)
        except CorruptError as error:  # not even the manifest or the layouts can be read
            found.append(error)
        return Verified(checkpoint=str(ident), checked_nbytes=checked, problems=list(map(problem_of, found)))

    def repair(self, url: str, checkpoint: str, *, peers: Sequence[str], dry_run: bool) -> Repair:
        # Here: it loads gRPC, which no other command needs where the store is opened directly.
        from ckpt.client.repair import repair
        from ckpt.rpc.access import PeerAccess

        store = self._store(url)
        ident = resolve(store, checkpoint)
        access = PeerAccess.from_environment()
        found = repair(
            store, ident, self._staging, keys.run_key(url), peers=peers, access=access, dry_run=dry_run
        )
        return Repair(
            checkpoint=str(ident),
            mended=[
                MendedRow(key=one.key, code=one.code, sources=dict(one.sources))
                for one in found.report.mended
            ],
            left=list(map(problem_of, found.report.left)),
            unreachable={target: problem_of(error) for target, error in found.unreachable.items()},
        )

    def plan_prune(self, url: str, policy: Policy) -> PrunePlan:
        from ckpt.ops.prune import execute_prune, plan_deletion, plan_retention

        store = self._store(url)
        require_run(store)
        if policy.checkpoints:
            verdicts = plan_deletion(store, [resolve(store, text) for text in policy.checkpoints])
        else:
            verdicts = plan_retention(store, keep_last=policy.keep_last, keep_every=policy.keep_every)
        report = execute_prune(store, verdicts, dry_run=True)
        rows = [VerdictRow(checkpoint=str(v.ident), keep=v.keep, reason=v.reason) for v in report.verdicts]
        return PrunePlan(
            verdicts=rows,
            objects=report.deleted_objects,
            held=list(map(str, report.held)),
            freed=list(map(str, report.freed)),
        )

    def prune(self, url: str, plan: PrunePlan, on_deleted: OnDeleted) -> int:
        from ckpt.ops.prune import execute_prune

        verdicts = [
            Verdict(CheckpointId.parse(row.checkpoint), keep=row.keep, reason=row.reason)
            for row in plan.verdicts
        ]
        with _each_deletion(on_deleted):
            return execute_prune(self._store(url), verdicts).deleted_objects

    def sweep(self, url: str, *, older_than_s: float, dry_run: bool, force: bool, on_swept: OnSwept) -> Sweep:
        from ckpt.ops.sweep import check_grace, sweep, sweep_uploads

        check_grace(older_than_s, force=force)
        store = self._store(url)
        require_run(store)
        rows = []
        for found in sweep(store, older_than_s=older_than_s, dry_run=dry_run):
            rows.append(SweptRow(checkpoint=str(found.ident), objects=found.objects))
            on_swept(found.objects)
        uploads = sweep_uploads(store, older_than_s=older_than_s, dry_run=dry_run)
        return Sweep(rows=rows, uploads=uploads)

    def pin(self, url: str, checkpoint: str, *, pinned: bool) -> str:
        store = self._store(url)
        ident = resolve(store, checkpoint)
        (pin if pinned else unpin)(store, ident)
        return str(ident)

    def runs(self, root: str) -> list[RunRow]:
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-runs") as pool:
            return list(pool.map(self._run, self._run_urls(root)))

    def _run(self, url: str) -> RunRow:
        store = self._open(url)
        try:
            chosen = latest(store)
            count = sum(1 for _ in list_checkpoints(store))
        finally:
            store.close()
        name = split_run_url(url)[1]
        return RunRow(run=name, url=url, checkpoints=count, latest=str(chosen) if chosen else None)

    def _run_urls(self, root: str) -> list[str]:
        store = self._open(root)
        try:
            return [f"{root}/{name}" for name in list_runs(store)]
        finally:
            store.close()

    @contextmanager
    def _explained(self, url: str) -> Iterator[None]:
        """Where the block finds that there is no run at ``url``, say what there is near it."""
        try:
            yield
        except NotFoundError as error:
            if error.code != "no-run":
                raise
            raise absence(url, self._open) from error

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            split_run_url(url)  # a bucket without a run is the user's slip, not the store's
            self._stores[url] = self._open(url)
        return self._stores[url]

    def _open(self, url: str) -> Store:
        options = dict(self._options)
        if url.startswith("fsspec+s3://"):
            # Somebody waits: this engine's own six take half a minute where nobody listens.
            options.setdefault("retries", "2")
        return open_store(url, options)


def _row(
    ident: CheckpointId,
    info: CheckpointInfo | None,
    *,
    chosen: CheckpointId | None,
    pinned: bool,
    is_local: bool,
    copies: list[CopiesRow] | None,
) -> Row:
    return Row(
        checkpoint=str(ident),
        step=ident.step,
        attempt=ident.attempt,
        committed=info is not None,
        committed_at=info.committed_at if info else None,
        latest=ident == chosen,
        pinned=pinned,
        local=is_local,
        copies=copies,
    )


def _copies(held: Held) -> CopiesRow:
    return CopiesRow(node="this node", here=True, ranks=list(held.own), replica_ranks=list(held.replicas))


@contextmanager
def _each_deletion(on_deleted: OnDeleted) -> Iterator[None]:
    """Call ``on_deleted`` for every "prune.done" that execute_prune logs meanwhile."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "event", "") == "prune.done":
                on_deleted(1)

    log = get_logger("ops.prune")
    level, listener = log.level, Listener()
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(listener)
