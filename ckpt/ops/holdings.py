"""What a node holds of a run: its own sealed segments and replicas of others', as its directory says.

A node tells others this in two sizes: which ranks of which checkpoints (a few bytes per rank), and for one
checkpoint the header of every segment (what its group index will say of it, about 200 bytes), from which the
whole checkpoint can be proved without reading the segments' indexes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckpt.digest import digest
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.events import event, get_logger
from ckpt.format.envelope import Kind, open_message
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId, same_run
from ckpt.format.manifest import single_header
from ckpt.storage.peerfile import replicas_dir
from ckpt.storage.staging import StagingDir
from ckpt_proto.v1 import disk_pb2

__all__ = ["node_holdings", "read_held_index", "read_held_layout", "sealed_paths", "segment_headers"]

_log = get_logger("holdings")


def node_holdings(staging: StagingDir, run_key: str, only: CheckpointId | None = None) -> list[Held]:
    """Return what this node holds of a run, ascending by step, then attempt. A run it lacks: nothing.

    Files are looked for, not read, but for one index per checkpoint, own and replica. Where those are of two
    lives of the run, there is one entry for each.

    Args:
        staging: of the node.
        run_key: the run's folder in it.
        only: this checkpoint alone.

    Raises:
        UnavailableError: the directory cannot be read.
    """
    places = (staging, replicas_dir(staging))
    idents = {ident for place in places for ident in place.checkpoints(run_key)}
    found = []
    for ident in sorted(idents if only is None else idents & {only}):
        own, replicas = (_held_in(place, run_key, ident) for place in places)
        if own is not None and replicas is not None and same_run(own.run_id, replicas.run_id):
            own = replace(
                own,
                replicas=tuple(rank for rank in replicas.own if rank not in own.own),
                is_committed=own.is_committed or replicas.is_committed,
            )
            replicas = None
        if own is not None:
            found.append(own)
        if replicas is not None:
            found.append(replace(replicas, own=(), replicas=replicas.own))
    return found


def _held_in(place: StagingDir, run_key: str, ident: CheckpointId) -> Held | None:
    """What one directory holds, as if it were the node's own."""
    ranks = _whole_segments(place, run_key, ident)
    index = _first_index(place, run_key, ident, ranks)
    if index is None:
        return None
    return Held(
        ident=ident,
        world_size=index.world_size,
        is_committed=place.is_committed(run_key, ident),
        own=tuple(ranks),
        replicas=(),
        run_id=index.run_id,
    )


def _whole_segments(place: StagingDir, run_key: str, ident: CheckpointId) -> list[int]:
    """The sealed ranks whose file is there too."""
    ranks = place.sealed_ranks(run_key, ident)
    return [rank for rank in ranks if place.segment_path(run_key, ident, rank).is_file()]


def _first_index(
    place: StagingDir, run_key: str, ident: CheckpointId, ranks: Iterable[int]
) -> disk_pb2.SegmentIndex | None:
    """The first index that can be read; None where none can."""
    for rank in ranks:
        try:
            return place.read_index(run_key, ident, rank)
        except CkptError as error:
            _report(ident, rank, error)
    return None


def segment_headers(staging: StagingDir, run_key: str, ident: CheckpointId) -> Iterator[disk_pb2.GroupHeader]:
    """Yield the header of each segment of ``ident`` that this node holds, a damaged index left out.

    The digest in its summary is of the sealed index file, by which two copies of one segment are known to be
    the same.

    Raises:
        UnavailableError: the directory cannot be read.
    """
    for held in node_holdings(staging, run_key, ident):
        for rank in sorted(held.ranks):
            try:
                data = read_held_index(staging, run_key, ident, rank)
                index = open_message(Kind.SEGMENT_INDEX, data, disk_pb2.SegmentIndex(), where="a held index")
            except (CorruptError, NotFoundError) as error:
                _report(ident, rank, error)
                continue
            yield single_header(index, index_digest=digest(data))


def sealed_paths(staging: StagingDir, run_key: str, ident: CheckpointId, run_id: str) -> dict[int, str]:
    """Return the path of each segment of ``ident`` that is sealed on this node and of this life of the run.

    Raises:
        UnavailableError: the directory cannot be read.
    """
    found = {}
    for rank in staging.sealed_ranks(run_key, ident):
        with contextlib.suppress(CorruptError, NotFoundError):
            if not same_run(staging.read_index(run_key, ident, rank).run_id, run_id):
                continue
        found[rank] = str(staging.segment_path(run_key, ident, rank))
    return found


def read_held_index(staging: StagingDir, run_key: str, ident: CheckpointId, rank: int) -> bytes:
    """Return the index file, envelope included, of a segment that this node holds itself or as a replica.

    Raises:
        NotFoundError: it holds neither.
        CorruptError: what it has is damaged, or belongs to another segment.
    """
    problem: CkptError | None = None
    for place in (staging, replicas_dir(staging)):
        try:
            place.read_index(run_key, ident, rank)
            return place.read_index_bytes(run_key, ident, rank)
        except NotFoundError:
            continue
        except CorruptError as error:
            problem = error
    raise problem or NotFoundError("this node does not hold the segment", checkpoint=ident, rank=rank)


def read_held_layout(staging: StagingDir, run_key: str, layout_digest: bytes) -> bytes:
    """Return the layout set's bytes. Raises NotFoundError, CorruptError."""
    try:
        return staging.layout(run_key, layout_digest)
    except (NotFoundError, CorruptError):
        return replicas_dir(staging).layout(run_key, layout_digest)


def _report(ident: CheckpointId, rank: int, error: CkptError) -> None:
    event(_log, logging.WARNING, "holdings.bad_index", checkpoint=ident, rank=rank, error=error)
