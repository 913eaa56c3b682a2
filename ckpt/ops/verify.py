"""Is a committed checkpoint whole? Quick: everything is there and fits. Deep: every byte is what was saved.

Both report all the damage they find, as a list of errors that name object and key. What is no damage is
raised: a store that cannot be reached (UnavailableError) says nothing about the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from ckpt.digest import Buffer, digest
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.format.chunks import StoredChunk, object_extents, stored_chunks
from ckpt.format.ids import CheckpointId
from ckpt.format.invariants import (
    check_coverage,
    check_groups,
    check_layouts,
    check_manifest,
    layout_digests,
)
from ckpt.format.keys import group_key, manifest_key, own_object_key
from ckpt.format.layout import LayoutSet
from ckpt.format.manifest import GroupIndex, stored_nbytes
from ckpt.format.segment import read_safetensors_header
from ckpt.format.summaries import Summaries
from ckpt.ops.checkpoint import Checkpoint
from ckpt.ops.groups import list_groups, read_group_header, read_layout, read_segment_index
from ckpt.ops.records import check_records
from ckpt.ops.stored import open_chunk
from ckpt.plan.save import plan_save
from ckpt.storage.base import Store
from ckpt_proto.v1 import disk_pb2

__all__ = ["Progress", "check_objects", "verify_deep", "verify_quick"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes checked, bytes in all) from the calling thread."""

_WORKERS = 16


def verify_quick(checkpoint: Checkpoint) -> list[CorruptError]:
    """Check that every object is there with the right size and that the invariants hold.

    Reads manifest, layouts and group headers; of segments only the size. Blocks: about one request per
    group and rank, 16 at a time.

    Returns:
        The problems; empty: none found.

    Raises:
        NotFoundError: the checkpoint was pruned meanwhile.
        UnavailableError: the store cannot be reached; nothing is known.
    """
    problems, groups, _ = _check_structure(checkpoint)
    problems += check_objects(checkpoint.store, groups)
    return _finish(checkpoint, problems)


def verify_deep(
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
    on_problem: Callable[[CorruptError], None] | None = None,
    workers: int = 4,
) -> list[CorruptError]:
    """Check as :func:`verify_quick`, then read every chunk and compare it with its digest.

    Also compared: the arrays in each segment with what the layout says that rank stores, and with the
    segment's own safetensors header. And read are the records beside it: its attempt, what it borrowed.

    Args:
        checkpoint: from ``load_checkpoint``.
        progress: see :data:`Progress`.
        on_problem: called with each problem as soon as it is found, from the calling thread.
        workers: chunks in flight; memory is ``workers`` times the chunk size, twice where compressed.

    Returns, Raises: as :func:`verify_quick`.
    """
    problems, groups, layouts = _check_structure(checkpoint)
    problems += check_objects(checkpoint.store, groups)
    problems += check_records(checkpoint.store, checkpoint.manifest)
    report = on_problem or (lambda _: None)
    for problem in problems:
        report(problem)
    done, total = 0, sum(segment.nbytes for group in groups for segment in group.header.segments)
    with ThreadPoolExecutor(workers, thread_name_prefix="ckpt-verify") as pool:
        for group in groups:
            for summary in group.header.segments:
                before = done
                for found, nbytes in _check_segment(checkpoint.store, pool, group, summary, layouts):
                    for problem in found:
                        problems.append(problem)
                        report(problem)
                    done += nbytes
                    if progress is not None:
                        progress(done, total)
                done = before + summary.nbytes  # also where its index was unreadable
    if progress is not None:
        progress(total, total)
    return _finish(checkpoint, problems)


def _finish(checkpoint: Checkpoint, problems: list[CorruptError]) -> list[CorruptError]:
    if not problems:
        return problems
    try:
        checkpoint.store.head(manifest_key(checkpoint.ident))
    except NotFoundError as error:
        raise NotFoundError(
            "checkpoint was deleted while it was verified", code="no-checkpoint", checkpoint=checkpoint.ident
        ) from error
    return problems


def _corrupt(errors: Iterable[CkptError]) -> list[CorruptError]:
    return [error for error in errors if isinstance(error, CorruptError)]


def _check_structure(
    checkpoint: Checkpoint,
) -> tuple[list[CorruptError], list[GroupIndex], dict[bytes, LayoutSet]]:
    """Check everything but the segments; return the problems and what could be read."""
    store = checkpoint.store
    groups, problems = _read_groups(store, checkpoint.ident, checkpoint.manifest.group_count)
    summaries = Summaries.of(groups)
    used = layout_digests(summaries)
    layouts: dict[bytes, LayoutSet] = {}
    for key in used:
        try:
            layouts[key] = read_layout(store, key)
        except CorruptError as error:
            problems.append(error)
    if problems:  # the invariants speak of the whole; with parts missing they would only repeat that
        return problems, groups, layouts
    problems += _corrupt(check_groups(checkpoint.ident, summaries))
    merged, found = check_layouts(used, layouts)
    problems += _corrupt(found)
    problems += _corrupt(check_coverage(merged, used, layouts))
    problems += _corrupt(check_manifest(checkpoint.manifest, summaries, merged))
    return problems, groups, layouts


def _read_groups(
    store: Store, ident: CheckpointId, count: int
) -> tuple[list[GroupIndex], list[CorruptError]]:
    try:
        listing = list_groups(store, ident)
    except CorruptError as error:
        return [], [error]

    def read(number: int) -> GroupIndex | CorruptError:
        key = group_key(ident, number, count)
        info = listing.objects.get(number)
        if info is None or info.key != key:
            return CorruptError("group index is not in the store", code="missing", key=key)
        try:
            return read_group_header(store, key, nbytes=info.nbytes)
        except NotFoundError:
            return CorruptError("group index is not in the store", code="missing", key=key)
        except CorruptError as error:
            return error

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-verify") as pool:
        results = list(pool.map(read, range(count)))
    groups = [result for result in results if isinstance(result, GroupIndex)]
    return groups, [result for result in results if isinstance(result, CorruptError)]


def check_objects(store: Store, groups: Sequence[GroupIndex]) -> list[CorruptError]:
    """Check existence and size of every object that holds chunks of these groups. Returns the problems.

    One request per segment, 16 at a time; segments that borrow chunks from older checkpoints take a few more.
    Raises UnavailableError.
    """

    def check(item: tuple[GroupIndex, disk_pb2.SegmentSummary]) -> list[CorruptError]:
        group, summary = item
        own = own_object_key(summary.object_key, summary.pack)
        if not summary.references:
            problem = _check_size(store, own, stored_nbytes(summary), rank=summary.rank)
            return [problem] if problem else []
        try:
            index = read_segment_index(store, group, summary.rank)
            stored_chunks(index)
        except NotFoundError:
            return [CorruptError("group index is not in the store", code="missing", key=group.key)]
        except CorruptError as error:
            return [error]
        return [
            problem
            for key, nbytes in object_extents(index.chunks, index.nbytes).items()
            if (problem := _check_size(store, key, nbytes, rank=summary.rank, own=key == own))
        ]

    items = [(group, summary) for group in groups for summary in group.header.segments]
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="ckpt-verify") as pool:
        return [problem for found in pool.map(check, items) for problem in found]


def _check_size(store: Store, key: str, nbytes: int, *, rank: int, own: bool = True) -> CorruptError | None:
    try:
        found = store.head(key).nbytes
    except NotFoundError:
        return CorruptError("segment is not in the store", code="missing", key=key, rank=rank)
    if found == nbytes or (found > nbytes and not own):
        return None
    return CorruptError(
        "segment has the wrong size", code="size", key=key, rank=rank, nbytes=found, expected=nbytes
    )


def _check_segment(
    store: Store,
    pool: ThreadPoolExecutor,
    group: GroupIndex,
    summary: disk_pb2.SegmentSummary,
    layouts: dict[bytes, LayoutSet],
) -> Iterator[tuple[list[CorruptError], int]]:
    """Yield (problems, bytes checked) for the index, then for each chunk."""
    try:
        index = read_segment_index(store, group, summary.rank)
        chunks = stored_chunks(index)
    except NotFoundError:
        yield [CorruptError("group index is not in the store", code="missing", key=group.key)], 0
        return
    except CorruptError as error:
        yield [error], 0
        return
    yield _check_arrays(index, layouts.get(summary.layout_digest), summary.object_key), 0

    def check(number: int) -> list[CorruptError]:
        try:
            raw = _read_chunk(store, chunks[number], run=index.run, rank=summary.rank, number=number)
            return _check_header(store, raw, chunks, index, summary.object_key) if number == 0 else []
        except CorruptError as error:
            return [error]

    for chunk, found in zip(chunks, pool.map(check, range(len(chunks))), strict=True):
        yield found, chunk.raw_nbytes


def _read_chunk(store: Store, chunk: StoredChunk, *, run: str, rank: int, number: int) -> Buffer:
    """Return the raw bytes of a chunk after checking them. Raises CorruptError naming object and chunk."""
    try:
        stored = store.get_range(chunk.object_key, chunk.offset, chunk.nbytes)
        raw = open_chunk(chunk, stored, run=run)
        if digest(raw) != chunk.digest:
            raise CorruptError("digest does not match: the chunk is damaged", code="digest")
    except NotFoundError as error:
        raise CorruptError(
            "segment is not in the store", code="missing", key=chunk.object_key, rank=rank, chunk=number
        ) from error
    except CorruptError as error:
        error.context.update(key=chunk.object_key, rank=rank, chunk=number)
        raise
    return raw


def _check_arrays(index: disk_pb2.SegmentIndex, layouts: LayoutSet | None, key: str) -> list[CorruptError]:
    """Compare the arrays that the index lists with what the layout says this rank stores."""
    if layouts is None:  # already reported
        return []
    planned = {
        entry.name: (entry.dtype, tuple(entry.shape), entry.nbytes)
        for entry in plan_save(layouts.values(), index.rank).tensor_entries()
    }
    listed = {
        entry.name: (entry.dtype, tuple(entry.shape), entry.nbytes)
        for entry in index.tensors
        if not entry.boxes
    }
    wrong = sorted(name for name in planned.keys() | listed.keys() if planned.get(name) != listed.get(name))
    if not wrong:
        return []
    return [
        CorruptError(
            "segment does not hold what the layout says this rank stores",
            code="arrays",
            key=key,
            rank=index.rank,
            tensor=wrong[0],
            total=len(wrong),
        )
    ]


def _check_header(
    store: Store, first: Buffer, chunks: Sequence[StoredChunk], index: disk_pb2.SegmentIndex, key: str
) -> list[CorruptError]:
    """Compare the safetensors header with the arrays that the index lists."""
    data = bytearray(first)
    wanted = 8 + int.from_bytes(data[:8], "little")
    for number in range(1, len(chunks)):  # a header longer than a chunk: very many tensors
        if len(data) >= wanted:
            break
        data += _read_chunk(store, chunks[number], run=index.run, rank=index.rank, number=number)
    arrays = read_safetensors_header(data, nbytes=index.nbytes, where=key)
    header = [(array.head.name, array.start, array.nbytes) for array in arrays]
    if header == [(entry.name, entry.start, entry.nbytes) for entry in index.tensors]:
        return []
    return [
        CorruptError(
            "segment index and the segment's own header disagree", code="arrays", key=key, rank=index.rank
        )
    ]
