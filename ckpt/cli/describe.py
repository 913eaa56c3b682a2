"""Stored messages to the records that commands show. Both backends use it, so both show the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt.cli.records import CopiesRow, Details, MeshRow, Problem, SegmentRow, Shown, TensorRow
from ckpt.errors import CkptError
from ckpt.format.ids import CheckpointId
from ckpt.format.keys import own_object_key
from ckpt.format.layout import LayoutSet, Replicate, Shard, TensorLayout, storing_ranks
from ckpt.format.manifest import stored_nbytes
from ckpt.format.placement import Placement
from ckpt_proto.v1 import disk_pb2

__all__ = ["describe", "details_of", "problem_of"]


def problem_of(error: CkptError) -> Problem:
    """Return ``error`` as a record; context values become text, as they do on the wire."""
    context = {key: str(value) for key, value in sorted(error.context.items())}  # the wire keeps no order
    return Problem(kind=type(error).__name__, code=error.code, message=error.message, context=context)


def details_of(manifest: disk_pb2.Manifest) -> Details:
    """Return what a listing shows of a manifest."""
    return Details(
        nbytes=manifest.nbytes,
        world_size=manifest.world_size,
        tensor_count=manifest.tensor_count,
        parent=_parent(manifest),
        run=manifest.run,
        run_id=manifest.run_id,
    )


def describe(
    url: str,
    manifest: disk_pb2.Manifest,
    layouts: LayoutSet,
    segments: Iterable[disk_pb2.SegmentSummary],
    *,
    pinned: bool,
    local_paths: Mapping[int, str],
    copies: Iterable[CopiesRow],
    foreign: CkptError | None,
) -> Shown:
    """Return a checkpoint in full.

    Args:
        url: of the run.
        manifest, layouts, segments: as stored.
        pinned: whether it is.
        local_paths: the sealed copies, by rank.
        copies: what nodes hold of it.
        foreign: says that it is not of the run at the URL; None: it is.
    """
    ident = CheckpointId.from_proto(manifest.id)
    return Shown(
        url=url,
        checkpoint=str(ident),
        step=ident.step,
        attempt=ident.attempt,
        committed_at=manifest.committed_at,
        nbytes=manifest.nbytes,
        stored_nbytes=stored_nbytes(manifest),
        world_size=manifest.world_size,
        group_count=manifest.group_count,
        tensor_count=manifest.tensor_count,
        has_explicit_boxes=manifest.has_explicit_boxes,
        pinned=pinned,
        parent=_parent(manifest),
        references=[str(CheckpointId.from_proto(other)) for other in manifest.references],
        environment=dict(sorted(manifest.environment.items())),
        tensors=[_tensor(layout) for layout in layouts.values()],
        segments=[
            SegmentRow(
                rank=segment.rank,
                nbytes=segment.nbytes,
                stored_nbytes=stored_nbytes(segment),
                object_key=own_object_key(segment.object_key, segment.pack),
                local_path=local_paths.get(segment.rank),
            )
            for segment in sorted(segments, key=lambda item: item.rank)
        ],
        copies=list(copies),
        run=manifest.run,
        run_id=manifest.run_id,
        foreign=problem_of(foreign) if foreign is not None else None,
    )


def _parent(manifest: disk_pb2.Manifest) -> str | None:
    return str(CheckpointId.from_proto(manifest.parent)) if manifest.HasField("parent") else None


def _tensor(layout: TensorLayout) -> TensorRow:
    return TensorRow(
        name=layout.name,
        dtype=layout.dtype,
        shape=list(layout.global_shape),
        nbytes=layout.nbytes,
        mesh=MeshRow(shape=list(layout.mesh.shape), names=list(layout.mesh.names)),
        placements=[_placement(placement) for placement in layout.placements],
        ranks=sorted(storing_ranks([layout])),
    )


def _placement(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "Replicate()"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return f"StridedShard({placement.dim}, {placement.split_factor})"
