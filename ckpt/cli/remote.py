"""The backend that asks a staging server over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ckpt.client.catalog import CatalogClient
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.format.ids import CheckpointId, split_run_url
from ckpt.format.layout import LayoutSet
from ckpt.format.problem import error_from_info
from ckpt_proto.v1 import catalog_pb2

__all__ = ["RemoteBackend"]

_WORKERS = 8
# Checkpoints deleted per call: a call has a deadline, and between calls the progress is shown.
_PRUNED_PER_CALL = 100
_PAGE_SIZE = 10_000


class RemoteBackend:
    """See :class:`ckpt.cli.backend.Backend`. Arguments as :class:`ckpt.client.CatalogClient`."""

    def __init__(self, target: str, *, token: str | None = None, ca: Path | None = None) -> None:
        self._client = CatalogClient(target, token=token, ca=ca)

    def close(self) -> None:
        self._client.close()

    def listing(self, url: str, *, with_copies: bool = False) -> Listing:
        found, chosen, problem, run_id = self._list(url, with_copies=with_copies)
        if not found:
            with self._explained(url):
                self._require_run(url)
        return Listing(
            rows=[_row(info, chosen, with_copies=with_copies) for info in found],
            problem=problem_of(problem) if problem else None,
            run_id=run_id,
        )

    def details(self, url: str, checkpoints: Sequence[str]) -> dict[str, Details | CkptError]:
        def read(text: str) -> Details | CkptError:
            try:
                return details_of(self._client.get_manifest(url, text, manifest_only=True).manifest)
            except (CorruptError, NotFoundError) as error:  # one bad row must not hide the others
                return error

        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-list") as pool:
            return dict(zip(checkpoints, pool.map(read, checkpoints), strict=True))

    def show(self, url: str, checkpoint: str) -> Shown:
        with self._explained(url):
            reply = self._client.get_manifest(url, checkpoint)
        return describe(
            url,
            reply.manifest,
            LayoutSet.decode(reply.layouts.SerializeToString(deterministic=True)),
            reply.segments,
            pinned=reply.pinned,
            local_paths={copy.rank: copy.path for copy in reply.local_copies},
            copies=map(_copies, reply.copies),
            foreign=error_from_info(reply.foreign) if reply.HasField("foreign") else None,
        )

    def verify(self, url: str, checkpoint: str, *, deep: bool, on_bytes: OnBytes) -> Verified:
        problems: list[CkptError] = []
        checked, ident = 0, checkpoint
        with self._explained(url):
            for message in self._client.verify(url, checkpoint, deep=deep):
                ident = str(CheckpointId.from_proto(message.id))
                problems += map(error_from_info, message.problems)
                checked = message.checked_bytes
                if message.total_bytes:
                    on_bytes(checked, message.total_bytes)
        return Verified(checkpoint=ident, checked_nbytes=checked, problems=list(map(problem_of, problems)))

    def repair(self, url: str, checkpoint: str, *, peers: Sequence[str], dry_run: bool) -> Repair:
        reply = self._client.repair(url, checkpoint, peers=peers, dry_run=dry_run)
        return Repair(
            checkpoint=str(CheckpointId.from_proto(reply.id)),
            mended=[MendedRow(key=one.key, code=one.code, sources=dict(one.sources)) for one in reply.mended],
            left=[problem_of(error_from_info(info)) for info in reply.problems],
            unreachable={
                target: problem_of(error_from_info(info)) for target, info in reply.unreachable.items()
            },
        )

    def plan_prune(self, url: str, policy: Policy) -> PrunePlan:
        reply = self._client.prune(
            url,
            keep_last=policy.keep_last,
            keep_every=policy.keep_every,
            checkpoints=policy.checkpoints,
            dry_run=True,
        )
        rows = [
            VerdictRow(
                checkpoint=str(CheckpointId.from_proto(verdict.id)), keep=verdict.keep, reason=verdict.reason
            )
            for verdict in reply.verdicts
        ]
        return PrunePlan(
            verdicts=rows,
            objects=reply.deleted_objects,
            held=[str(CheckpointId.from_proto(other)) for other in reply.held],
            freed=[str(CheckpointId.from_proto(other)) for other in reply.freed],
        )

    def prune(self, url: str, plan: PrunePlan, on_deleted: OnDeleted) -> int:
        # By name, not by the policy again: what was shown is what goes, whatever was committed meanwhile.
        condemned = plan.condemned[::-1]  # oldest first: a failure in the middle leaves the newer ones
        objects = 0
        for start in range(0, len(condemned), _PRUNED_PER_CALL):
            batch = condemned[start : start + _PRUNED_PER_CALL]
            objects += self._client.prune(url, checkpoints=batch).deleted_objects
            on_deleted(len(batch))
        return objects

    def sweep(self, url: str, *, older_than_s: float, dry_run: bool, force: bool, on_swept: OnSwept) -> Sweep:
        rows = []
        uploads: int | None = None
        for message in self._client.sweep(url, older_than_s=older_than_s, dry_run=dry_run, force=force):
            if message.done:
                uploads = message.aborted_uploads if message.uploads_listed else None
                continue
            ident = CheckpointId.from_proto(message.id)
            rows.append(SweptRow(checkpoint=str(ident), objects=message.objects))
            on_swept(message.objects)
        return Sweep(rows=rows, uploads=uploads)

    def pin(self, url: str, checkpoint: str, *, pinned: bool) -> str:
        return str(self._client.pin(url, checkpoint, pinned=pinned))

    def runs(self, root: str) -> list[RunRow]:
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-runs") as pool:
            return list(pool.map(self._run, self._client.list_runs(root)))

    def _run(self, url: str) -> RunRow:
        found, chosen, problem, _ = self._list(url)
        if problem is not None:
            raise problem
        count = sum(1 for info in found if info.location != "local")
        name = split_run_url(url)[1]
        return RunRow(run=name, url=url, checkpoints=count, latest=str(chosen) if chosen else None)

    def _list(
        self, url: str, *, with_copies: bool = False
    ) -> tuple[list[catalog_pb2.CheckpointInfo], CheckpointId | None, CkptError | None, str]:
        """Every checkpoint; the latest; why that is not known; the run's id."""
        found: list[catalog_pb2.CheckpointInfo] = []
        chosen, problem, run_id = None, None, ""
        for page in self._client.list_pages(url, page_size=_PAGE_SIZE, with_copies=with_copies):
            found += page.checkpoints
            run_id = run_id or page.run_id
            if page.HasField("latest"):
                chosen = CheckpointId.from_proto(page.latest)
            if page.HasField("latest_problem"):
                problem = error_from_info(page.latest_problem)
        return found, chosen, problem, run_id

    @contextmanager
    def _explained(self, url: str) -> Iterator[None]:
        """Where the server finds that there is no run at ``url``, say what there is near it, if that may be
        known.
        """
        try:
            yield
        except NotFoundError as error:
            if error.code != "no-run":
                raise
            # Here: a client of a server does without the operations on stores, until something is wrong.
            from ckpt.ops.identity import absence_among

            try:
                found = absence_among(url, folders=self._names, holds_run=lambda at, name: True)
            except CkptError:  # this token does not reach so far
                raise error from None
            raise found from error

    def _names(self, root: str) -> list[str]:
        return [split_run_url(url)[1] for url in self._client.list_runs(root)]

    def _require_run(self, url: str) -> None:
        if url in self._client.list_runs():
            return
        try:
            self._client.get_manifest(url, "latest", manifest_only=True)
        except (CorruptError, NotFoundError) as error:
            if error.code == "no-run":
                raise


def _row(info: catalog_pb2.CheckpointInfo, chosen: CheckpointId | None, *, with_copies: bool) -> Row:
    ident = CheckpointId.from_proto(info.id)
    committed = info.location != "local"
    return Row(
        checkpoint=str(ident),
        step=ident.step,
        attempt=ident.attempt,
        committed=committed,
        committed_at=info.committed_at if committed else None,
        latest=ident == chosen,
        pinned=info.pinned,
        local=info.location != "remote",
        copies=list(map(_copies, info.copies)) if with_copies else None,
    )


def _copies(copies: catalog_pb2.NodeCopies) -> CopiesRow:
    return CopiesRow(
        node=copies.node,
        here=copies.here,
        ranks=list(copies.ranks),
        replica_ranks=list(copies.replica_ranks),
        problem=problem_of(error_from_info(copies.problem)) if copies.HasField("problem") else None,
    )
