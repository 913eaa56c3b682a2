"""Every parser of bytes that come from a disk, a store or the network: name -> valid documents, and a reader.

A reader goes on to do what the software does with the parsed thing, because a lie in a document often bites
later than in the parser. It may raise CkptErrors and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy as np
from google.protobuf.message import Message

from ckpt.digest import digest
from ckpt.errors import CkptError
from ckpt.format import envelope
from ckpt.format.chunks import check_chunk_table, stored_chunk
from ckpt.format.codec import CODECS, decode_chunk, encode_chunk
from ckpt.format.envelope import Kind, open_message, seal_message
from ckpt.format.held import Held
from ckpt.format.ids import CheckpointId
from ckpt.format.invariants import check_coverage, check_groups, check_layouts, layout_digests
from ckpt.format.keys import manifest_key, require_below
from ckpt.format.layout import LayoutSet, Mesh, Replicate, Shard, StridedShard, TensorLayout, owned_region
from ckpt.format.manifest import (
    encode_group_index,
    group_header,
    open_manifest,
    parse_group_index,
    single_header,
)
from ckpt.format.marks import GroupMark, mark_key, parse_mark_names
from ckpt.format.peer import PeerNode
from ckpt.format.problem import error_from_info, error_to_info
from ckpt.format.segment import read_safetensors_header
from ckpt.format.summaries import Summaries
from ckpt.format.values import decode_value, encode_value
from ckpt.geometry import Region
from ckpt.ops.attempts import Attempt
from ckpt.plan.read import Want, plan_chunks, plan_read
from ckpt.rpc.messages import parse_request
from ckpt.storage.peerfile import parse_peer_file
from ckpt.storage.staging import RunConfig
from ckpt_proto.v1 import common_pb2, disk_pb2, peer_pb2, restore_pb2, staging_pb2
from tests.support.builders import build_checkpoint, memory_store, sample_layouts
from tests.support.sealing import make_world, segment_bytes

__all__ = ["TARGETS", "Target", "read"]

IDENT = CheckpointId(7, 1)


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        seeds: valid documents.
        parse: takes bytes; raises CkptErrors at most.
        message: type of the documents, where they are protobuf.
    """

    seeds: Sequence[bytes]
    parse: Callable[[bytes], object]
    message: type[Message] | None = None


def read(target: Target, data: bytes) -> bool:
    """Give ``data`` to the parser; return whether it was taken. Raises whatever is no CkptError."""
    try:
        target.parse(data)
    except CkptError as error:
        str(error)  # what the error tells must be printable as well
        error_to_info(error)
        return False
    return True


def _segment_header(data: bytes) -> None:
    read_safetensors_header(data, nbytes=len(data), where="fuzz")


def _segment_index(data: bytes) -> None:
    index = open_message(
        Kind.SEGMENT_INDEX, seal_message(Kind.SEGMENT_INDEX, data), disk_pb2.SegmentIndex(), where="fuzz"
    )
    for number in (0, 1, 2**31):
        with contextlib.suppress(CkptError):
            require_below(stored_chunk(index, number).object_key)
    with contextlib.suppress(CkptError):
        decode_value(index.state, leaf=str)
    with contextlib.suppress(CkptError):
        decode_value(index.rank_state, leaf=str)
    with contextlib.suppress(CkptError):
        Summaries.of(
            [
                parse_group_index(
                    seal_message(Kind.GROUP_INDEX, single_header(index, index_digest=bytes(16))), key="fuzz"
                )
            ]
        )
    saved = _built.layouts
    plan = plan_read(saved, [Want(name, Region.whole(saved[name].global_shape), 0) for name in saved])
    check_chunk_table(index)
    entries = {entry.name: entry for entry in index.tensors}
    plan_chunks(entries, plan.by_rank.get(index.rank, ()), index.chunks.chunk_nbytes, index.nbytes)


def _group_index(data: bytes) -> None:
    group = parse_group_index(seal_message(Kind.GROUP_INDEX, data), key="fuzz")
    str(group.nbytes)
    summaries = Summaries.of([group])
    problems = check_groups(IDENT, summaries)
    GroupMark.of(group)
    used = layout_digests(summaries)
    merged, more = check_layouts(used, {_layouts.digest: _layouts})
    problems += more + check_coverage(merged, used, {_layouts.digest: _layouts})
    for problem in problems:
        str(problem)


def _layout_set(data: bytes) -> None:
    for layout in LayoutSet.decode(data).values():
        str(layout.nbytes)
        owned_region(layout, 0)
        owned_region(layout, layout.mesh.base)
        with contextlib.suppress(CkptError):
            corner = Region(tuple(() if n == 0 else Region.whole((1,)).runs[0] for n in layout.global_shape))
            plan_read(LayoutSet([layout]), [Want(layout.name, corner, 0)])


def _manifest(data: bytes) -> None:
    manifest = open_manifest(seal_message(Kind.MANIFEST, data), IDENT, key=manifest_key(IDENT))
    for other in (*manifest.references, manifest.parent):
        with contextlib.suppress(CkptError):
            CheckpointId.from_proto(other)


def _upload_record(data: bytes) -> None:
    message = seal_message(Kind.UPLOAD_RECORD, data)
    record = open_message(Kind.UPLOAD_RECORD, message, disk_pb2.UploadRecord(), where="fuzz")
    index = disk_pb2.SegmentIndex(nbytes=record.nbytes, chunks=record.chunks)
    stored_chunk(index, 0)


def _marks(data: bytes) -> None:
    found = parse_mark_names(data.decode("utf-8", "replace").split("\n"))
    if found is not None:
        found.members()


def _chunk(data: bytes) -> None:
    codec, rest = (data[0], data[1:]) if data else (0, b"")
    decode_chunk(codec, rest, 4096)


def _envelope(data: bytes) -> None:
    open_message(Kind.UPLOAD_RECORD, data, disk_pb2.UploadRecord(), where="fuzz")


def _value(data: bytes) -> None:
    message = parse_request(common_pb2.Value(), data)
    repr(type(decode_value(message, leaf=str)))


def _run_json(data: bytes) -> None:
    config = RunConfig.from_json(data, where="fuzz")
    RunConfig.from_proto(config.to_proto()).to_json()


def _peer_json(data: bytes) -> None:
    parse_peer_file(data, where="fuzz").to_proto()


def _attempt(data: bytes) -> None:
    Attempt.from_json(data, key="attempts/999998.000001.json").to_json()


def _request(make: Callable[[], Message], then: Callable[[Message], object]) -> Callable[[bytes], None]:
    def parse(data: bytes) -> None:
        then(parse_request(make(), data))

    return parse


def _error(message: Message) -> None:
    assert isinstance(message, common_pb2.ErrorInfo)
    str(error_from_info(message))


def _have(message: Message) -> None:
    assert isinstance(message, peer_pb2.HaveResponse)
    for held in message.checkpoints:
        Held.from_json(Held.from_proto(held).to_json())


def _layout_seeds() -> list[bytes]:
    mesh = Mesh.from_ranks((2, 4), ("dp", "tp"), [0, 1, 2, 3, 4, 5, 6, 7])
    odd = Mesh.from_ranks((3,), ("pp",), [0, 5, 2])
    layouts = [
        TensorLayout("a", "float32", (9, 4), mesh, (StridedShard(0, 4), Shard(0))),
        TensorLayout("b", "bfloat16", (1024, 1024), mesh, (Replicate(), Shard(1))),
        TensorLayout("c", "int64", (), odd, (Replicate(),)),
    ]
    return [LayoutSet(layouts).encode(), _layouts.encode()]


def _values() -> list[bytes]:
    many = {
        "a": [1, 2, 3, -4, 2**70, 1.5, None, True, "text", b"bytes", ("t", 1)],
        "b": {1, 2, 3},
        "c": deque([1, 2], 5),
        "d": [range(3), slice(1, 2), Fraction(1, 3), Decimal("1.5"), 1 + 2j, datetime.timedelta(1)],
        "e": [Counter("aab"), np.arange(6.0).reshape(2, 3), np.float32(1.0), datetime.date(2026, 1, 2)],
    }
    return [encode_value(item).SerializeToString() for item in (many, [many, many], 3)]


_world = make_world(rows=4, columns=8)
_layouts = sample_layouts(2)
_built = build_checkpoint(memory_store(), IDENT.step, group_size=2)
_indexes = list(_built.segments.values())


def _group_seed() -> bytes:
    return bytes(
        envelope.open_envelope(
            Kind.GROUP_INDEX, encode_group_index(group_header(_indexes), _indexes), where="seed", more=True
        )
    )


def _mark_seed() -> bytes:
    group = parse_group_index(seal_message(Kind.GROUP_INDEX, _group_seed()), key="seed")
    return mark_key(IDENT, GroupMark.of(group)).rpartition("/")[2].encode()


def _seed_manifest() -> bytes:
    return disk_pb2.Manifest(
        run="demo",
        id=IDENT.to_proto(),
        write_id=bytes(16),
        world_size=2,
        group_count=1,
        layout_digest=bytes(16),
        groups_digest=bytes(16),
        nbytes=8224,
        tensor_count=2,
        parent=CheckpointId(3, 1).to_proto(),
        references=[CheckpointId(2, 1).to_proto()],
        state_ranks=[0, 1],
        environment={"ckpt": "0.1.0"},
    ).SerializeToString()


def _record_seed() -> bytes:
    index = _indexes[0]
    return disk_pb2.UploadRecord(
        object_key=index.chunks.object_keys[0], nbytes=index.nbytes, chunks=index.chunks
    ).SerializeToString()


_node = PeerNode(node_id="0" * 16, target="host:1", domain="rack", host="host", ranks=(0, 1))
_run = RunConfig(url="s3://bucket/run", store_options={"region": "x"}, peers=(_node,))
_chunk_raw = bytes(range(256)) * 16
_header = staging_pb2.PutChunksHeader(run_key="run-0", id=IDENT.to_proto(), rank=1, chunks=[0, 1, 2])
_held = peer_pb2.HaveResponse(
    checkpoints=[Held(ident=IDENT, world_size=4, is_committed=True, own=(0, 1), replicas=(2,)).to_proto()]
)
_tensor = restore_pb2.ReadTensorRequest(
    url="s3://b/run", checkpoint="latest", name="w", box=disk_pb2.BoxRecord(offsets=[0], sizes=[4])
)
_info = common_pb2.ErrorInfo(kind="CorruptError", code="digest", message="x", context={"a": "b"})


def _chunk_seeds() -> list[bytes]:
    found = []
    for codec in CODECS:
        actual, stored = encode_chunk(codec, _chunk_raw)
        found.append(bytes([actual]) + bytes(stored))
    return found


TARGETS: dict[str, Target] = {
    "envelope": Target([seal_message(Kind.UPLOAD_RECORD, _record_seed())], _envelope),
    "segment_header": Target([segment_bytes(_world, rank)[0] for rank in (0, 1)], _segment_header),
    "segment_index": Target(
        [index.SerializeToString() for index in _indexes], _segment_index, disk_pb2.SegmentIndex
    ),
    "group_index": Target([_group_seed()], _group_index, disk_pb2.GroupHeader),
    "group_marks": Target([_mark_seed()], _marks),
    "layout_set": Target(_layout_seeds(), _layout_set, common_pb2.LayoutSet),
    "manifest": Target([_seed_manifest()], _manifest, disk_pb2.Manifest),
    "upload_record": Target([_record_seed()], _upload_record, disk_pb2.UploadRecord),
    "value": Target(_values(), _value, common_pb2.Value),
    "chunk": Target(_chunk_seeds(), _chunk),
    "run_json": Target([_run.to_json()], _run_json),
    "peer_json": Target(
        [json.dumps({**_node.to_json(), "pid": 1}).encode()],
        _peer_json,
    ),
    "attempt": Target(
        [
            Attempt(
                number=1, parent=None, world_size=2, host="h", started_at=1.5, claim_id=digest(b"").hex()
            ).to_json()
        ],
        _attempt,
    ),
    "put_chunks_header": Target(
        [_header.SerializeToString()],
        _request(staging_pb2.PutChunksHeader, lambda m: CheckpointId.from_proto(m.id)),  # type: ignore[attr-defined]
        staging_pb2.PutChunksHeader,
    ),
    "read_tensor": Target(
        [_tensor.SerializeToString()],
        _request(restore_pb2.ReadTensorRequest, lambda m: None),
        restore_pb2.ReadTensorRequest,
    ),
    "have_reply": Target(
        [_held.SerializeToString()], _request(peer_pb2.HaveResponse, _have), peer_pb2.HaveResponse
    ),
    "error_info": Target(
        [_info.SerializeToString()], _request(common_pb2.ErrorInfo, _error), common_pb2.ErrorInfo
    ),
}
