"""Whatever bytes a parser is given: a CkptError or a result, in bounded memory and time."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpt.client.restore import room_for
from ckpt.errors import CorruptError, UnavailableError
from ckpt.format.chunks import check_chunk_table, object_extents, stored_chunk
from ckpt.format.codec import decode_chunk
from ckpt.format.envelope import Kind, seal_message
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId
from ckpt.format.invariants import check_groups
from ckpt.format.layout import LayoutSet
from ckpt.format.limits import MAX_CHUNK_NBYTES
from ckpt.format.manifest import parse_group_index
from ckpt.format.segment import read_safetensors_header
from ckpt.format.summaries import Summaries
from ckpt.format.values import decode_value
from ckpt.storage.staging import RunConfig
from ckpt_proto.v1 import common_pb2, disk_pb2, restore_pb2
from tests.fuzz.mutate import spoil
from tests.fuzz.targets import TARGETS, read
from tests.support.properties import examples

_MEMORY_NBYTES = 256 << 20  # beyond what the process has; documents here have some KB
_CPU_S = 60  # of one test, which takes about one


class Hang(BaseException):
    """A parser is still at it; not an Exception, so that nobody takes it for a parse error."""


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Memory that is asked for beyond the limit is a MemoryError, and a loop without end a Hang."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + _MEMORY_NBYTES
    handler = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_taken(name: str) -> None:
    """A target that refuses everything would prove nothing."""
    for seed in TARGETS[name].seeds:
        assert read(TARGETS[name], seed)


@pytest.mark.parametrize("name", TARGETS)
@given(seed=st.integers(0, 2**64 - 1))
@examples(150)
def test_spoiled_documents(name: str, seed: int) -> None:
    target = TARGETS[name]
    read(target, spoil(target.seeds, Random(seed), target.message))


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=400))
@examples(40)
def test_noise(name: str, data: bytes) -> None:
    read(TARGETS[name], data)


@pytest.mark.parametrize("name", TARGETS)
def test_every_truncation(name: str) -> None:
    for seed in TARGETS[name].seeds:
        for end in range(0, len(seed), max(1, len(seed) // 100)):
            read(TARGETS[name], seed[:end])


# --- bombs: a few bytes that once took any amount of memory or time, or another error than a CkptError ---

Value = common_pb2.Value
_RANGE = Value(
    registered=Value.Registered(name="range", value=Value(tuple=Value.Sequence(integers=[0, 2**62, 1])))
)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("set", _RANGE),
        ("frozenset", _RANGE),
        ("deque", _RANGE),
        ("complex", _RANGE),
        ("fraction", Value(tuple=Value.Sequence(items=[Value(text="1e999999999")]))),
        ("decimal", Value(tuple=Value.Sequence(integers=[1, 2]))),
        ("path", Value(integer=1)),
    ],
)
def test_a_registered_type_is_given_only_what_it_stores(name: str, stored: Value) -> None:
    with pytest.raises(CorruptError):
        decode_value(Value(registered=Value.Registered(name=name, value=stored)))


@pytest.mark.parametrize("chunk_nbytes", [0, MAX_CHUNK_NBYTES + 16, 2**63])
def test_chunk_sizes_that_no_reader_can_hold(chunk_nbytes: int) -> None:
    nbytes = 2**63
    index = disk_pb2.SegmentIndex(
        nbytes=nbytes, chunks=disk_pb2.ChunkTable(chunk_nbytes=chunk_nbytes, digests=bytes(16))
    )
    index.chunks.object_keys.append("data/00/x")
    with pytest.raises(CorruptError):
        stored_chunk(index, 0)


@pytest.mark.parametrize(("chunk_nbytes", "digests"), [(2, 1), (16, 1), (24, 2), (1 << 20, 0)])
def test_a_chunk_table_must_have_a_digest_for_every_chunk(chunk_nbytes: int, digests: int) -> None:
    """Else a document of 300 bytes plans the reading of 300,000 chunks."""
    table = disk_pb2.ChunkTable(chunk_nbytes=chunk_nbytes, digests=bytes(16 * digests))
    with pytest.raises(CorruptError):
        check_chunk_table(disk_pb2.SegmentIndex(nbytes=600_000, chunks=table))


@pytest.mark.parametrize(
    "change", [{"objects": [1]}, {"objects": [0, 0]}, {"offsets": [0, 1]}, {"stored_nbytes": [1, 1]}]
)
def test_the_ends_of_objects_are_asked_of_a_sound_table_only(change: dict[str, list[int]]) -> None:
    table = disk_pb2.ChunkTable(chunk_nbytes=16, digests=bytes(16), object_keys=["data/00/x"], offsets=[0])
    assert object_extents(table, 16) == {"data/00/x": 16}
    for name, numbers in change.items():
        table.ClearField(name)
        getattr(table, name).extend(numbers)
    with pytest.raises(CorruptError):
        object_extents(table, 16)


def test_stored_bytes_larger_than_raw_are_refused() -> None:
    table = disk_pb2.ChunkTable(chunk_nbytes=4096, digests=bytes(16), stored_nbytes=[2**62])
    table.object_keys.append("data/00/x")
    with pytest.raises(CorruptError):
        stored_chunk(disk_pb2.SegmentIndex(nbytes=4096, chunks=table), 0)


@pytest.mark.parametrize("says_size", [False, True])
def test_zstd_bomb(says_size: bool) -> None:
    """1 GiB of zeros in 100 KB, with its size in the frame and without."""
    context = zstandard.ZstdCompressor(level=1, write_content_size=says_size)
    writer = context.compressobj(size=1 << 30) if says_size else context.compressobj()
    zeros = bytes(1 << 20)
    stored = b"".join([*(writer.compress(zeros) for _ in range(1024)), writer.flush()])
    with pytest.raises(CorruptError):
        decode_chunk(disk_pb2.CODEC_ZSTD, stored, 1 << 20)


@pytest.mark.parametrize(
    "mesh",
    [
        common_pb2.Mesh(shape=[2**32 - 1], strides=[1]),
        common_pb2.Mesh(shape=[2**32 - 1] * 2000, strides=[2**62] * 2000),
        common_pb2.Mesh(shape=[1], base=2**32 - 1, strides=[0]),
        common_pb2.Mesh(shape=[2], ranks=[0, 2**31]),
    ],
)
def test_meshes_larger_than_any_job(mesh: common_pb2.Mesh) -> None:
    tensor = common_pb2.TensorLayout(name="a", dtype="float32", global_shape=[4])
    tensor.placements.extend([common_pb2.Placement(kind=1)] * len(mesh.shape))
    with pytest.raises(CorruptError):
        LayoutSet.decode(common_pb2.LayoutSet(meshes=[mesh], tensors=[tensor]).SerializeToString())


@pytest.mark.parametrize(
    ("shape", "factor"), [([2**64 - 1] * 100_000, 1), ([2**62, 2**62], 1), ([2**40], 2**32 - 1)]
)
def test_tensors_larger_than_any_memory(shape: list[int], factor: int) -> None:
    tensor = common_pb2.TensorLayout(name="a", dtype="float32", global_shape=shape)
    tensor.placements.add(kind=common_pb2.Placement.KIND_STRIDED_SHARD, split_factor=factor)
    mesh = common_pb2.Mesh(shape=[2], strides=[1])
    with pytest.raises(CorruptError):
        LayoutSet.decode(common_pb2.LayoutSet(meshes=[mesh], tensors=[tensor]).SerializeToString())


def test_segment_header_with_a_shape_that_takes_forever_to_multiply() -> None:
    sizes = ",".join(["9" * 4000] * 5000)
    text = f'{{"a":{{"dtype":"U8","shape":[{sizes}],"data_offsets":[0,1]}}}}'.encode()
    data = len(text).to_bytes(8, "little") + text + b"\0"
    with pytest.raises(CorruptError):
        read_safetensors_header(data, nbytes=len(data), where="x")


def test_a_group_count_is_not_believed() -> None:
    header = disk_pb2.GroupHeader(group=common_pb2.NodeGroup(count=2**32 - 1))
    group = parse_group_index(seal_message(Kind.GROUP_INDEX, header), key="x")
    assert check_groups(CheckpointId(1, 1), Summaries.of([group]))


@pytest.mark.parametrize(
    "field",
    ['"keep_local": Infinity', '"keep_local": -1', '"keep_last": 1e400', '"peers": ' + "[" * 10**5],
)
def test_run_json_of_numbers_and_depths_that_python_stumbles_over(field: str) -> None:
    with pytest.raises(CorruptError):
        RunConfig.from_json(f'{{"url": "s3://b/run", {field}}}'.encode(), where="x")


def test_run_json_with_half_a_character() -> None:
    with pytest.raises(CorruptError):
        RunConfig.from_json(rb'{"url": "s3://b/\ud800"}', where="x")


def test_ranks_of_a_peer_are_counted_before_they_are_listed() -> None:
    with pytest.raises(CorruptError):
        Held.from_json(["000000000001.a000001", 4, True, "0-99999999999", ""])


def test_a_server_that_announces_more_than_there_is() -> None:
    header = restore_pb2.ReadTensorHeader(dtype="float32", shape=[2**40], nbytes=2**42 + 1)
    with pytest.raises(CorruptError):
        room_for(header)
    header.nbytes = 2**42
    with pytest.raises(UnavailableError):  # memory is asked for under the limit of these tests
        room_for(header)
